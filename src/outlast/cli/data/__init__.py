"""Commands for datasets, checkpoints and results, here and in stores."""
