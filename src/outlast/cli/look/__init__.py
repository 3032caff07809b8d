"""Commands that show current and past jobs."""
