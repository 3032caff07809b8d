"""Utilities without any dependency on jobs: errors, units, files, locks, sockets, clocks, backoff, checksums, archives."""
