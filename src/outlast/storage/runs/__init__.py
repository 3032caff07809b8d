"""Runs in a store: the owner of a place (`run.json`, `record`), and its heartbeat (`alive.json`, `alive`)."""

from __future__ import annotations

from outlast.storage.runs.record import PREVIOUS, RUN, Run, acquire, archive, check, claim, end, read, update

__all__ = ["PREVIOUS", "RUN", "Run", "acquire", "archive", "check", "claim", "end", "read", "update"]
