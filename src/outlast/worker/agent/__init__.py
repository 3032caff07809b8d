"""The agent: the process that launches a worker's training processes, watches them and outlives them."""
