"""The state of training: capturing, saving and restoring it, in memory, on disks and from peers."""
