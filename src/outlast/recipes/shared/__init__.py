"""Parts shared by recipes: the training loop, settings, results, packed images."""
