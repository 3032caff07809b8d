"""Hang detection: the progress of each rank, and ranks that wait for each other."""
