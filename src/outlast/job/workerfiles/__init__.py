"""Files that a worker's agent and its training processes communicate through."""
