"""The code in a directory, and its archives: packing the same tree yields the same bytes."""
