"""What a worker needs before it can train: code, Python packages, data, models."""
