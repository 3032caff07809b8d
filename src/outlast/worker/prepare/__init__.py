"""Prepares a worker for training: code, Python packages, data, and models."""
