"""Keeps records of a run in a store: which run owns the URL (`owner`, in `run.json`), and its heartbeat (`heartbeat`)."""

from __future__ import annotations

from outlast.storage.runs.owner import PREVIOUS, RUN, Run, acquire, archive, check, claim, end, read, update

__all__ = ["PREVIOUS", "RUN", "Run", "acquire", "archive", "check", "claim", "end", "read", "update"]
