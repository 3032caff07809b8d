"""Runs in a store: whose a place is (`run.json`, `record`), and who trains there now (`alive.json`, `alive`)."""

from __future__ import annotations

from outlast.runs.record import PREVIOUS, RUN, Run, check, claim, end, read, set_aside, take, update

__all__ = ["PREVIOUS", "RUN", "Run", "check", "claim", "end", "read", "set_aside", "take", "update"]
