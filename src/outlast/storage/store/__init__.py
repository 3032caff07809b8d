"""Reads and writes objects in a store: S3 and compatible services, GCS, Azure, a directory, or memory.

objects = store.open_("s3://bucket/runs/digits")     keys are relative to this URL
objects.upload(Path("logs/worker-0.log"), "logs/worker-0.log")
"""

from __future__ import annotations

from outlast.base.errors import Changed, Denied, Exists, Missing, NoBucket, Stopped, StoreError, Unreachable
from outlast.storage.store.client import Entry, Store, open_
from outlast.storage.store.urls import normalised

__all__ = [
    "Changed", "Denied", "Entry", "Exists", "Missing", "NoBucket", "Stopped", "Store", "StoreError", "Unreachable", "normalised",
    "open_",
]  # fmt: skip
