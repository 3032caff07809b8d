"""Runs in a store: whose a place is (`run.json`, `record`), and who trains there now (`alive.json`, `alive`)."""

from __future__ import annotations

from outlast.storage.runs.record import PREVIOUS, RUN, Run, acquire, archive, check, claim, end, read, update

__all__ = ["PREVIOUS", "RUN", "Run", "acquire", "archive", "check", "claim", "end", "read", "update"]
