"""Snapshots: training's newest state in agents' memory, which training resumes from after a failure.

A rank copies its state into shared memory that its agent owns, a *part*. The agent sends parts that no other worker holds to
other agents, as *replicas*. `part_format` defines their format, `rooms` manages the memory, `server` is the agent's side,
and `client` the rank's side. Docs: docs/decisions/0037-snapshots-in-memory.md.
"""
