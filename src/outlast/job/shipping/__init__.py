"""The code in a directory, and archives of it: the same tree is packed to the same bytes."""
