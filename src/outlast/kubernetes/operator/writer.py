"""Writes to the cluster for the operator, if it is the leader. Each write is counted, and its result is in the cache before the
next decision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from outlast.base.errors import Absent, ClusterError, Conflict
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.operator.cluster_cache import Cache
from outlast.kubernetes.operator.prometheus import Metrics

log = logging.getLogger(__name__)

D = TypeVar("D")
R = TypeVar("R")

IN_FLIGHT = 8
"""Maximum number of a plan's writes in flight at once. If a quota rejects one of them, it would reject the rest too, so no more
are sent."""


class Parallel:
    """A thread pool for several callers, each with at most `IN_FLIGHT` calls running."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def __call__(self, function: Callable[[D], R], items: Sequence[D], /) -> list[R]:
        """Return the function's results for all items, in order. Raises the first error, once no call is running."""
        results: list[R] = []
        for begin in range(0, len(items), IN_FLIGHT):
            first, *others = items[begin : begin + IN_FLIGHT]
            futures = [self._pool.submit(function, item) for item in others]
            try:
                results.append(function(first))  # otherwise the caller would only wait
            finally:
                wait(futures)
            results += [future.result() for future in futures]
        return results


class Background:
    """Runs calls in order in one thread and ignores their results."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._pending: set[Future[None]] = set()

    def __call__(self, function: Callable[[], None]) -> None:
        if len(self._pending) > self._limit:
            return log.warning("an Event is dropped: %d are pending", self._limit)
        future = self._pool.submit(function)
        self._pending.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        self._pending.discard(future)
        if bug := future.exception():
            log.error("an Event could not be written", exc_info=bug)

    def finish(self, timeout_s: float) -> None:
        """Wait until all calls are done, or until the timeout."""
        wait(list(self._pending), timeout_s)


Document = dict[str, Any]


class NotLeader(ClusterError):
    """This operator must not write, as another one leads or may lead."""


class Writer:
    """The operator's writes to a cluster. They raise NotLeader if this operator does not lead."""

    def __init__(self, cluster: api.Cluster, cache: Cache, metrics: Metrics, is_leader: Callable[[], bool]) -> None:
        self._cluster, self._cache, self._metrics, self._is_leader = cluster, cache, metrics, is_leader

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document:
        """Return an object from the server, not from the cache. Raises Absent if it does not exist."""
        return self._cluster.get(kind, name, namespace=namespace)

    def find(self, kind: Kind, name: str, *, namespace: str | None = None) -> Document | None:
        """Return an object from the server, not from the cache, or None if it does not exist."""
        return self._cluster.find(kind, name, namespace=namespace)

    def create(self, document: Document) -> Document:
        kind = self._check_and_count(kind_of(document), "create")
        return self._store(kind, self._cluster.create(document))

    def apply(self, document: Document) -> Document:
        kind = self._check_and_count(kind_of(document), "apply")
        return self._store(kind, self._cluster.apply(document))

    def replace(self, document: Document, *, subresource: str = "") -> Document:
        """Replace an object or its status if its resource version is unchanged."""
        kind = self._check_and_count(kind_of(document), "update")
        return self._store(kind, self._cluster.replace(document, subresource=subresource))

    def patch(self, kind: Kind, name: str, change: Document, *, namespace: str | None = None) -> Document:
        """Apply a JSON merge patch to an object."""
        self._check_and_count(kind, "patch")
        return self._store(kind, self._cluster.patch(kind, name, change, namespace=namespace))

    def delete(
        self, kind: Kind, name: str, *, namespace: str | None = None, grace_s: float | None = None, uid: str | None = None
    ) -> Document:
        """Delete an object. If `uid` is given, delete it only if it has this uid."""
        self._check_and_count(kind, "delete")
        object_namespace = (namespace or self._cluster.namespace) if kind.namespaced else ""
        try:
            remaining = self._cluster.delete(kind, name, namespace=namespace, grace_s=grace_s, uid=uid)
        except (Absent, Conflict):
            if uid is not None:
                self._cache.mark_deleted(kind, object_namespace, name, uid)
            raise
        if remaining.get("kind") == kind.kind and remaining["metadata"].get("deletionTimestamp"):
            self._store(kind, remaining)  # still terminating
        elif uid is not None:
            self._cache.mark_deleted(kind, object_namespace, name, uid)
        return remaining

    def _check_and_count(self, kind: Kind, verb: str) -> Kind:
        if not self._is_leader():
            raise NotLeader(f"{kind} cannot be written: this operator is not the leader; see which one holds the Lease")
        self._metrics.count_write(kind.kind, verb)
        return kind

    def _store(self, kind: Kind, answer: Document) -> Document:
        self._cache.add_written(kind, answer)
        return answer
