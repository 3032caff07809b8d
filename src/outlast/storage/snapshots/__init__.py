"""Snapshots: the newest step of training in the memory of agents, from which training goes on after a failure.

A rank copies its state into shared memory that its agent owns, a *part*; the agent sends parts that no other worker holds to
other agents, as *replicas*. `part_format` is their format, `rooms` the memory that holds them, `server` the agent's side,
`client` that of ranks. Docs: docs/decisions/0037-snapshots-in-memory.md.
"""
