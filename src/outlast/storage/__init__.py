"""Where state is kept: in memory, on a disk, in a store."""
