"""Objects in clusters and places in stores that belong to somebody else: no command of ours replaces or deletes them. Pure.

An object is ours by its labels. A place in a store is ours when it is empty, or has the mark that this very command leaves there:
a marker, a manifest, a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outlast.base.errors import OutlastError, Taken
from outlast.job.contract import Label

_OURS = ("app.kubernetes.io/part-of", "app.kubernetes.io/managed-by")
"""Labels with the value `outlast`; some of our objects have one of them only."""


def ours(document: Mapping[str, Any], labels: Mapping[str, str] = {}) -> bool:
    """Whether we have made an object, with these labels."""
    there = document["metadata"].get("labels") or {}
    return any(there.get(name) == "outlast" for name in _OURS) and labels.items() <= there.items()


def check(there: Mapping[str, Any] | None, labels: Mapping[str, str] = {}, *, instead: str) -> None:
    """Raise Taken for an object that we have not made with these labels; `instead` is the way out."""
    if there is None or ours(there, labels):
        return
    meta = there["metadata"]
    known, where = meta.get("labels") or {}, f" in namespace {meta['namespace']}" if meta.get("namespace") else ""
    owner = f"job {known[Label.JOB]}" if Label.JOB in known else known.get(_OURS[1]) or "somebody else"
    raise Taken(f"{there['kind']} {meta['name']}{where} belongs to {owner} and stays as it is; {instead}")


def check_place(
    place: str, names: Iterable[str], mark: str | None, wanted: str = "", *, instead: str = "choose a new or empty place"
) -> None:
    """Raise OutlastError unless nothing is in a place, or its `mark` is `wanted`; None: it has no mark."""
    if mark is None and (first := min(names, default="")):
        raise OutlastError(f"{place} holds other files ({first}); {instead}")
    if mark not in (None, wanted):
        raise OutlastError(f"{place} holds a part of {mark}; complete that with the same command as before, or {instead}")
