"""Outlast: distributed PyTorch training that outlasts its machines."""

__version__ = "0.1.0"
