"""Utilities that know nothing about jobs: errors, units, files, locks, sockets, clocks, pauses, checksums, archives."""
