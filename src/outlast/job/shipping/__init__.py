"""A code directory, and its archives: packing the same tree yields the same bytes."""
