"""Mechanics that know nothing of jobs: errors, units, files, locks, sockets, clocks, pauses, checksums, archives."""
