"""Keeps training state in memory, on disks and in stores."""
