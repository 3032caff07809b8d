"""Runs in a store: the owner of a place (`record`, in `run.json`), and its heartbeat (`alive`, in `alive.json`)."""

from __future__ import annotations

from outlast.storage.runs.record import PREVIOUS, RUN, Run, acquire, archive, check, claim, end, read, update

__all__ = ["PREVIOUS", "RUN", "Run", "acquire", "archive", "check", "claim", "end", "read", "update"]
