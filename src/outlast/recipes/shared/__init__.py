"""Parts shared by the recipes: training loop, settings, results, evaluation and packing of images."""
