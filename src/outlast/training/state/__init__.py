"""Captures, saves and restores the state of training, in memory, on disks and from peers."""
