"""Preparation of a worker for training: code, Python packages, data, models."""
