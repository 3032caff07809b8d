"""Commands for datasets, checkpoints and results, on this machine and in stores."""
