"""Utilities that do not depend on jobs, such as errors, units, files, locks, clocks and checksums."""
