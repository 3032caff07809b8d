"""Transports that carry messages between workers and their coordinator."""
