"""Checks who owns an object in the cluster, by its labels, or a location in a store, so that no command replaces or deletes
somebody else's work. A location may be used if it is empty or contains the command's own mark, such as a manifest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outlast.base.errors import OutlastError, Taken
from outlast.job.contract import Label

_OURS = ("app.kubernetes.io/part-of", "app.kubernetes.io/managed-by")
"""Labels whose value is `outlast` on Outlast's objects. Some objects have only one of the two."""


def owned(document: Mapping[str, Any], labels: Mapping[str, str] = {}) -> bool:
    """Return whether an object was created by Outlast and has these labels."""
    existing = document["metadata"].get("labels") or {}
    return any(existing.get(name) == "outlast" for name in _OURS) and labels.items() <= existing.items()


def check(existing: Mapping[str, Any] | None, labels: Mapping[str, str] = {}, *, instead: str) -> None:
    """Raise Taken unless an existing object was created by Outlast and has these labels. `instead` is the remedy in the error."""
    if existing is None or owned(existing, labels):
        return
    meta = existing["metadata"]
    has, where = meta.get("labels") or {}, f" in namespace {meta['namespace']}" if meta.get("namespace") else ""
    owner = f"job {has[Label.JOB]}" if Label.JOB in has else has.get(_OURS[1]) or "somebody else"
    raise Taken(f"{existing['kind']} {meta['name']}{where} belongs to {owner} and stays as it is; {instead}")


def check_place(
    place: str, names: Iterable[str], mark: str | None, expected: str = "", *, instead: str = "choose a new or empty place"
) -> None:
    """Raise OutlastError unless a location in a store is empty or its `mark` equals `expected`. `mark` is None if the location
    has no mark."""
    if mark is None and (first := min(names, default="")):
        raise OutlastError(f"{place} holds other files ({first}); {instead}")
    if mark not in (None, expected):
        raise OutlastError(f"{place} holds a part of {mark}; complete that with the same command as before, or {instead}")
