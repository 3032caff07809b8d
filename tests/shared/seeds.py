"""Selects random schedules: OUTLAST_TEST_SCHEDULES=200 for the first 200, 60:90 for these thirty only."""

from __future__ import annotations

import os


def seeds(usual: int) -> range:
    """Return the seeds of this run, by default the first `usual`."""
    first, _, last = os.environ.get("OUTLAST_TEST_SCHEDULES", str(usual)).rpartition(":")
    return range(int(first or 0), int(last))
