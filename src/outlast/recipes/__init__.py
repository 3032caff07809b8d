"""Complete training programs, one readable file each, to run unchanged or to copy and change."""
