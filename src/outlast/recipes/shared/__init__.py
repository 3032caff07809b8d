"""Parts that the recipes share: the loop, its settings, its results, images."""
