"""What a session saves and loads: the state of training, in memory, on disks, from the peers."""
