"""Datasets: readers that validate everything, and writers that mark a dataset as complete only at the end."""
