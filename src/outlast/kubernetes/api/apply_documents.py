"""Applies documents to a cluster, checks who owns existing objects, and reports whether each object was created or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.base.errors import Conflict, NotServed
from outlast.job import ownership
from outlast.kubernetes.api.client import without_server_fields
from outlast.kubernetes.api.kinds import kind_of

if TYPE_CHECKING:
    from outlast.kubernetes.api.client import Cluster
    from outlast.kubernetes.api.requests import Document


@dataclass(frozen=True)
class Applied:
    """The outcome of applying one document. A dry run only predicts it."""

    old: Document | None
    """None if the object did not exist."""
    new: Document

    @property
    def what(self) -> str:
        """`created`, `changed` or `unchanged`."""
        if self.old is None:
            return "created"
        return "unchanged" if without_server_fields(self.old) == without_server_fields(self.new) else "changed"


def existing(cluster: Cluster, document: Document) -> Document | None:
    """Return the existing object, or None if it is absent or its kind is not served."""
    meta = document["metadata"]
    try:
        return cluster.find(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except NotServed:  # `apply` raises the error
        return None


def check(cluster: Cluster, documents: Iterable[Document], labels: Mapping[str, str] = {}, *, instead: str) -> None:
    """Raise Taken if a document's name is used by an object that Outlast did not create with these labels. The error suggests
    `instead`."""
    for document in documents:
        ownership.check(existing(cluster, document), labels, instead=instead)


def apply(cluster: Cluster, document: Document, *, old: Document | None, dry_run: bool = False) -> Applied:
    """Apply a document server-side, and once more if the object has changed since `old` was read. Raises ClusterError, and
    Conflict if the object may now belong to another owner."""

    def applied(old: Document | None) -> Applied:
        precondition = {name: old["metadata"][name] for name in ("uid", "resourceVersion")} if old else {}
        return Applied(old, cluster.apply({**document, "metadata": {**document["metadata"], **precondition}}, dry_run=dry_run))

    try:
        return applied(old)
    except Conflict:
        current = existing(cluster, document)
        if old is None or (
            current and any(current["metadata"].get(name) != old["metadata"].get(name) for name in ("uid", "labels"))
        ):
            raise
        return applied(current)
