"""How a training process starts: a warm process that has imported torch forks it."""
