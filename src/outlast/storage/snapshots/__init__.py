"""Snapshots: the newest training state, which agents hold in memory, and from which training resumes after a failure.

A rank copies its state, as a *part*, into shared memory of its agent, which sends *replicas* to agents on other workers. `server`
is the agent's side, `client` the rank's. See docs/decisions/0037-snapshots-in-memory.md.
"""
