"""Utilities that do not depend on jobs: errors, units, files, locks, sockets, clocks, backoff, checksums, archives."""
