"""Commands that show what jobs do and did."""
