"""Parts shared by recipes: the training loop, settings, results, and packed images."""
