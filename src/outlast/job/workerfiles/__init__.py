"""Files by which a worker's agent and its training processes talk to each other."""
