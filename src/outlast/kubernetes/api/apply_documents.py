"""Apply documents to a cluster: who owns existing objects of these names, and whether each was created or changed.

applied.check(cluster, documents, instead="choose another name")     if one is somebody else's, nothing has changed
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
    """The outcome for one document; in a dry run, the outcome that it would have."""

    old: Document | None
    """The object before; None if there was none."""
    new: Document
    """The object after."""

    @property
    def what(self) -> str:
        """`created`, `changed` or `unchanged`."""
        if self.old is None:
            return "created"
        return "unchanged" if without_server_fields(self.old) == without_server_fields(self.new) else "changed"


def there(cluster: Cluster, document: Document) -> Document | None:
    """The existing object; None if it is absent, or if its kind is not served."""
    meta = document["metadata"]
    try:
        return cluster.find(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except NotServed:  # the error follows when it is applied
        return None


def check(cluster: Cluster, documents: Iterable[Document], labels: Mapping[str, str] = {}, *, instead: str) -> None:
    """Raise Taken for the first document whose name belongs to an object that Outlast has not made with these labels; `instead`
    is the remedy in the error."""
    for document in documents:
        foreign.check(there(cluster, document), labels, instead=instead)


def apply(cluster: Cluster, document: Document, *, old: Document | None, dry_run: bool = False) -> Applied:
    """Apply a document server-side to `old` as it was read, and once more if it has changed since. Raises ClusterError, and
    Conflict if the object may belong to somebody else by now."""

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
