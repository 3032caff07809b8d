"""Commands that start, steer and end training."""
