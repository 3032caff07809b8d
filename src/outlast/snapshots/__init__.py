"""Snapshots of the training in the memory of its workers. Imports no torch."""
