"""Transports that carry the rendezvous between workers and their coordinator."""
