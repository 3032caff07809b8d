"""Datasets: readers that validate everything, and writers that write all files or none."""
