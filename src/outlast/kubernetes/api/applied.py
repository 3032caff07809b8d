"""Documents brought to a cluster: whose is what is there, and what became of each.

applied.check(cluster, documents, instead="choose another name")     nothing has changed when one is somebody else's
done = applied.apply(cluster, document, old=applied.there(cluster, document))
done.what                                                            created, changed or unchanged
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.base.errors import Conflict, NotServed
from outlast.job import foreign
from outlast.kubernetes.api.client import without_server_fields
from outlast.kubernetes.api.kinds import kind_of

if TYPE_CHECKING:
    from outlast.kubernetes.api.client import Cluster
    from outlast.kubernetes.api.requests import Document


@dataclass(frozen=True)
class Applied:
    """The outcome for one document, or what it would be in a dry run."""

    old: Document | None
    """The object before; None when there was none."""
    new: Document
    """The object now."""

    @property
    def what(self) -> str:
        """created | changed | unchanged"""
        if self.old is None:
            return "created"
        return "unchanged" if without_server_fields(self.old) == without_server_fields(self.new) else "changed"


def there(cluster: Cluster, document: Document) -> Document | None:
    """The existing object; None if it is absent, or its kind is not served."""
    meta = document["metadata"]
    try:
        return cluster.find(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except NotServed:  # the error follows when it is applied
        return None


def check(cluster: Cluster, documents: Iterable[Document], labels: Mapping[str, str] = {}, *, instead: str) -> None:
    """Raise Taken for the first document whose name belongs to an object that we have not made with these labels; `instead` is
    the remedy."""
    for document in documents:
        foreign.check(there(cluster, document), labels, instead=instead)


def apply(cluster: Cluster, document: Document, *, old: Document | None, dry_run: bool = False) -> Applied:
    """Server-side apply to `old` as it was read, and once more if it has changed since. Raises ClusterError: Conflict when it
    may belong to somebody else by now."""

    def applied(old: Document | None) -> Applied:
        seen = {name: old["metadata"][name] for name in ("uid", "resourceVersion")} if old else {}
        return Applied(old, cluster.apply({**document, "metadata": {**document["metadata"], **seen}}, dry_run=dry_run))

    try:
        return applied(old)
    except Conflict:
        now = there(cluster, document)
        if old is None or (now and any(now["metadata"].get(name) != old["metadata"].get(name) for name in ("uid", "labels"))):
            raise
        return applied(now)
