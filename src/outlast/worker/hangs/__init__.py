"""Hang detection: whether a rank still moves, and which ranks wait for each other."""
