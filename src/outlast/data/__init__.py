"""Datasets: readers that trust nothing, and writers that leave either the whole dataset or none."""
