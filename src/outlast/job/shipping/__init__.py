"""A directory of code, and its archives: packing the same tree yields the same bytes."""
