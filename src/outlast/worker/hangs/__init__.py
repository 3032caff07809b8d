"""Hang detection: whether a rank makes progress, and which ranks wait for each other."""
