"""Runs in a store: which run owns a URL (`owner`, in `run.json`), and its heartbeat (`heartbeat`, in `alive.json`)."""

from __future__ import annotations

from outlast.storage.runs.owner import PREVIOUS, RUN, Run, acquire, archive, check, claim, end, read, update

__all__ = ["PREVIOUS", "RUN", "Run", "acquire", "archive", "check", "claim", "end", "read", "update"]
