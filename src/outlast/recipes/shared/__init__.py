"""Parts shared by the recipes: training loop, settings and results."""
