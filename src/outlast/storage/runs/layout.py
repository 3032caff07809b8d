"""The output directory of a run: which files are Outlast's own, and which are synchronized as they are."""

from __future__ import annotations

from outlast.job import contract
from outlast.storage import runs
from outlast.storage.runs import alive
from outlast.storage.sync import growing

OWN = ".push"
"""Directory in the output for the upload process: lock, index, journals of uploads."""
_PROTOCOL = {OWN, contract.TRACKING, contract.CHECKPOINTS, runs.PREVIOUS, runs.RUN, alive.ALIVE}
"""Entries with a protocol of their own, or that are in the store already."""


def skipped(path: str) -> bool:
    """Whether a path below the output is excluded from the sync: Outlast's own files, files that are still being written,
    and those that only grow (`sync.growing`)."""
    first, _, rest = path.partition("/")
    name = rest.rpartition("/")[2] if rest else first
    own = first in _PROTOCOL or growing.grows(path) or growing.is_part(path)
    return own or name.startswith(".") or name.endswith(".tmp")
