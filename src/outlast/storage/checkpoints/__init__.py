"""Committed checkpoints on a worker's disk (`on_disk`) and in a store (`in_store`), and transfers between the two."""

from __future__ import annotations

from outlast.storage.checkpoints.on_disk import (
    Checkpoint,
    Commit,
    abandon,
    acquire,
    checksum,
    commit,
    expired,
    fetching,
    first,
    generation,
    latest,
    list_,
    owner,
    place,
    read,
    reading,
    remove,
    saving,
    sweep,
    verify,
    ways_back,
    withdraw,
)
from outlast.storage.checkpoints.retention import Metric, Retention, named, ranked, withdrawn

__all__ = [
    "Checkpoint", "Commit", "Metric", "Retention", "abandon", "acquire", "checksum", "commit", "expired", "fetching", "first",
    "generation", "latest", "list_", "named", "owner", "place", "ranked", "read", "reading", "remove", "saving", "sweep",
    "verify", "ways_back", "withdraw", "withdrawn",
]  # fmt: skip
