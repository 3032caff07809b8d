"""A code directory and its archives. Packing the same tree always yields the same bytes."""
