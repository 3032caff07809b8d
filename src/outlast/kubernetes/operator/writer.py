"""The operator's writes: fenced (only the leader writes), counted, and put into the cache before the next decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.base.errors import Absent, ClusterError, Conflict
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.operator.cache import Cache
from outlast.kubernetes.operator.metrics import Metrics

Document = dict[str, Any]


class NotLeader(ClusterError):
    """This operator must not write any more: another has taken over, or may have."""


class Writer:
    """The operator's writes to a cluster. All of them raise NotLeader when this operator does not lead."""

    def __init__(self, cluster: api.Cluster, cache: Cache, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._cluster, self._cache, self._metrics, self._leads = cluster, cache, metrics, leads

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document:
        """An object as the server has it."""
        return self._cluster.get(kind, name, namespace=namespace)

    def create(self, document: Document) -> Document:
        """Create an object."""
        kind = self._begin(kind_of(document), "create")
        return self._cached(kind, self._cluster.create(document))

    def apply(self, document: Document) -> Document:
        """Server-side apply."""
        kind = self._begin(kind_of(document), "apply")
        return self._cached(kind, self._cluster.apply(document))

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Replace an object, or its status, if its resource version is still this one."""
        kind = self._begin(kind_of(document), "update")
        return self._cached(kind, self._cluster.replace(document, subresource=subresource))

    def patch(self, kind: Kind, name: str, change: Document, *, namespace: str | None = None) -> Document:
        """JSON merge patch."""
        self._begin(kind, "patch")
        return self._cached(kind, self._cluster.patch(kind, name, change, namespace=namespace))

    def delete(
        self, kind: Kind, name: str, *, namespace: str | None = None, grace_s: float | None = None, uid: str | None = None
    ) -> Document:
        """Delete an object, if it has this uid."""
        self._begin(kind, "delete")
        inside = (namespace or self._cluster.namespace) if kind.namespaced else ""
        try:
            left = self._cluster.delete(kind, name, namespace=namespace, grace_s=grace_s, uid=uid)
        except (Absent, Conflict):
            if uid is not None:
                self._cache.deleted(kind, inside, name, uid)
            raise
        if left.get("kind") == kind.kind and left["metadata"].get("deletionTimestamp"):
            self._cached(kind, left)  # still terminating
        elif uid is not None:
            self._cache.deleted(kind, inside, name, uid)
        return left

    def _begin(self, kind: Kind, verb: str) -> Kind:
        if not self._leads():
            raise NotLeader(f"{kind} cannot be written: this operator is not the leader; see which one holds the Lease")
        self._metrics.count_write(kind.kind, verb)
        return kind

    def _cached(self, kind: Kind, answer: Document) -> Document:
        self._cache.wrote(kind, answer)
        return answer
