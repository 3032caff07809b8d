"""The operator's way of writing: only as the leader, counted, and known to its own cache before anything else is decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast import kube
from outlast.errors import Absent, ClusterError, Conflict
from outlast.kube.kinds import Kind, kind_of
from outlast.operator.cache import Cache
from outlast.operator.metrics import Metrics

Document = dict[str, Any]


class Deposed(ClusterError):
    """This operator acts no more: another has taken over, or may have."""


class Hands:
    """`act.Writes` over a cluster. All raise Deposed when this is not the leader."""

    def __init__(self, cluster: kube.Cluster, cache: Cache, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._cluster, self._cache, self._metrics, self._leads = cluster, cache, metrics, leads

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document:
        """A document as the server has it."""
        return self._cluster.get(kind, name, namespace=namespace)

    def create(self, document: Document) -> Document:
        """Make a document."""
        kind = self._writing(kind_of(document), "create")
        return self._wrote(kind, self._cluster.create(document))

    def apply(self, document: Document) -> Document:
        """Make what we say of a document true."""
        kind = self._writing(kind_of(document), "apply")
        return self._wrote(kind, self._cluster.apply(document))

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Write a document, or its status, if it is of the version that it says."""
        kind = self._writing(kind_of(document), "update")
        return self._wrote(kind, self._cluster.replace(document, subresource=subresource))

    def patch(self, kind: Kind, name: str, change: Document, *, namespace: str | None = None) -> Document:
        """Change parts of a document."""
        self._writing(kind, "patch")
        return self._wrote(kind, self._cluster.patch(kind, name, change, namespace=namespace))

    def delete(
        self, kind: Kind, name: str, *, namespace: str | None = None, grace_s: float | None = None, uid: str | None = None
    ) -> Document:
        """Delete a document, if it has this uid."""
        self._writing(kind, "delete")
        inside = (namespace or self._cluster.namespace) if kind.namespaced else ""
        try:
            left = self._cluster.delete(kind, name, namespace=namespace, grace_s=grace_s, uid=uid)
        except (Absent, Conflict):
            if uid is not None:
                self._cache.deleted(kind, inside, name, uid)
            raise
        if left.get("kind") == kind.kind and left["metadata"].get("deletionTimestamp"):
            self._wrote(kind, left)  # it is still going
        elif uid is not None:
            self._cache.deleted(kind, inside, name, uid)
        return left

    def _writing(self, kind: Kind, verb: str) -> Kind:
        if not self._leads():
            raise Deposed(f"{kind} cannot be written: this operator is not the leader; look for who holds its lease")
        self._metrics.count_write(kind.kind, verb)
        return kind

    def _wrote(self, kind: Kind, answer: Document) -> Document:
        self._cache.wrote(kind, answer)
        return answer
