"""Keeps snapshots, the newest training state, in the memory of agents, so that training resumes from it after a failure.

A rank copies its state, as a *part*, into shared memory of its agent, which sends *replicas* to agents on other workers. `server`
is the agent's side, `client` is the rank's. See docs/decisions/0037-snapshots-in-memory.md.
"""
