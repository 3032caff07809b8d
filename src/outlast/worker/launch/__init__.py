"""Starts training processes, by forking a warm process that has imported torch."""
