"""Snapshots: the newest training state, held in agents' memory, from which training resumes after a failure.

A rank copies its state, as a *part*, into shared memory that its agent owns. The agent sends parts that no other worker holds to
other agents, as *replicas*. `part_format` defines the format of parts, `rooms` manages the memory, `server` is the agent's side,
and `client` is the rank's side. See docs/decisions/0037-snapshots-in-memory.md.
"""
