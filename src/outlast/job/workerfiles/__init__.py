"""Files through which a worker's agent and its training processes communicate."""
