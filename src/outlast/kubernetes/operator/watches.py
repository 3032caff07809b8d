"""Fills the operator's cache from one watch per kind of object, and discovers Kueue and gang schedulers.

Errors are logged and counted, and the watch is started again after a pause. Only the watches of Kueue's objects may end: they do
when the cluster no longer serves these objects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.base import backoff
from outlast.base.clock import Clock
from outlast.base.errors import ClusterError, NotServed
from outlast.job.contract import Label
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE, NODE, POD, POD_GROUP, PRIORITY_CLASS, VOLCANO_GROUP, Kind
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.operator import cluster_cache as caches
from outlast.kubernetes.operator import leaving_nodes
from outlast.kubernetes.operator.cluster_cache import Cache, Document, Key
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures, KueueObjects
from outlast.kubernetes.operator.observed_job import RECEIVED_AT, is_ready
from outlast.kubernetes.operator.prometheus import Metrics

log = logging.getLogger(__name__)

WATCH_RETRY_S = 10.0
"""Maximum pause before a watch is restarted. It is short, so that a newly installed CRD is found quickly."""
_JOIN_S = 0.5
_GANGS = (VOLCANO_GROUP, POD_GROUP)


@dataclass(frozen=True)
class Settings:
    namespace: str | None = None
    """The only namespace that the operator serves; all if None."""
    workers: int = 8
    host: str = ""
    """Address on which the probes are served; all addresses if empty."""
    port: int = 0
    retry_s: float = 1.0
    """Pause before the first retry. It doubles with each further failure."""
    discovery_s: float = 60.0
    """Interval between checks for Kueue and gang schedulers."""


class Watches:
    """Threads that fill `cache`. They call `on_change` when the cluster's features change, as every job must then be
    reconciled."""

    def __init__(
        self,
        cluster: api.Cluster,
        cache: Cache,
        metrics: Metrics,
        clock: Clock,
        on_change: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._cluster, self._cache, self._metrics, self._clock, self._on_change = cluster, cache, metrics, clock, on_change
        self._settings = settings
        self._stop = api.Stop()
        self._served: tuple[Kind, ...] = ()
        self._discovering = threading.Lock()
        self._optional: dict[Kind, threading.Thread] = {}
        self._unready_since: dict[str, float] = {}
        self._notice_seen_at: dict[str, float] = {}
        kinds = (*cache.jobs, POD, LEASE, NODE)
        self.threads = [
            *(threading.Thread(target=self._watch, args=(kind,), name=f"watch {kind}", daemon=True) for kind in kinds),
            threading.Thread(target=self._discover_periodically, name="discovery", daemon=True),
        ]
        """The process must end when one of these threads ends."""

    def start(self) -> None:
        self.discover()
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in (*self.threads, *self._optional.values()):
            thread.join(_JOIN_S)  # the connections are closed next, when no thread may use them; some may hang

    def serves(self, group: str) -> bool:
        """Return whether the cluster serves an API group of Kueue or a gang scheduler."""
        return any(kind.group == group for kind in self._served)

    def features(self, key: Key) -> ClusterFeatures:
        """Return the cluster's optional features, and a job's Kueue objects."""
        groups = frozenset(kind.group for kind in self._served)
        queues = next((kinds for kinds in kueue.VERSIONS if kinds[0] in self._served), ())
        if not queues or self._cache.unsynced((*queues, PRIORITY_CLASS)):
            return ClusterFeatures(groups)
        workload, flavor, priority = queues
        flavors = {each["metadata"]["name"]: each for each in self._cache.documents(flavor)}
        classes = (*self._cache.documents(priority), *self._cache.documents(PRIORITY_CLASS))
        return ClusterFeatures(groups, KueueObjects(workload, self._cache.of_job(workload, key), flavors, classes))

    def discover(self) -> None:
        """Discover which of Kueue and the gang schedulers the cluster serves, and start watching Kueue's objects."""
        with self._discovering:
            try:
                queues = next((kinds for kinds in kueue.VERSIONS if all(self._cluster.serves(kind) for kind in kinds)), ())
                discovered = (*queues, *(kind for kind in _GANGS if self._cluster.serves(kind)))
            except Exception as error:  # a bug must not end the process
                return self._failed("Kueue and gang schedulers cannot be discovered", error)
            previous, self._served = self._served, discovered
            self._watch_queues(queues)
        if discovered != previous:
            log.info("this cluster has %s now", ", ".join(kind.resource for kind in discovered) or "neither Kueue nor gangs")
            self._on_change()

    def _discover_periodically(self) -> None:
        while not self._stop.wait(self._settings.discovery_s):
            self.discover()

    def _failed(self, sentence: str, error: Exception) -> None:
        self._metrics.count_error()
        bug = None if isinstance(error, ClusterError) else error
        log.log(logging.ERROR if bug else logging.WARNING, "%s: %s", sentence, error, exc_info=bug)

    def _watch_queues(self, queues: tuple[Kind, ...]) -> None:
        for kind in (*queues, PRIORITY_CLASS) if queues else ():
            if kind not in self._optional or not self._optional[kind].is_alive():
                self._cache.add_kind(kind)
                watch = threading.Thread(target=self._watch, args=(kind,), name=f"watch {kind}", daemon=True)
                self._optional[kind] = watch
                watch.start()

    def _watch(self, kind: Kind) -> None:
        watch = _Watch(kind)
        while not self._stop.is_set():
            self._cache.begin_listing(kind)
            try:
                self._follow(watch)
            except NotServed as error:
                if kind in self._optional:
                    log.info("%s are no longer watched: %s", kind.resource, error)
                    return self._cache.set_version(kind, None, self._clock())
                if kind in self._cache.jobs and kind != ELASTIC_JOB:
                    self._cache.mark_unserved(kind, self._clock())  # the kind is optional, so nothing waits for it
                else:
                    self._set_version(watch, None)
                    if not watch.failures:
                        log.warning("waiting for %s: %s", kind.resource, error)
            except Exception as error:  # a bug must not end the watch: all jobs depend on it
                self._set_version(watch, None)
                self._failed(f"{kind.resource} cannot be watched", error)
            watch.failures += 1
            self._stop.wait(backoff.exponential(watch.failures - 1, self._settings.retry_s, WATCH_RETRY_S))

    def _follow(self, watch: _Watch) -> None:
        kind = watch.kind
        scope: dict[str, Any] = {}
        if kind.namespaced:
            scope = {"namespace": self._settings.namespace} if self._settings.namespace else {"everywhere": True}
        labelled = kind in (POD, LEASE) or kind in (versions[0] for versions in kueue.VERSIONS)
        for change in self._cluster.watch(
            kind,
            stop=self._stop,
            labels=Label.JOB if labelled else "",
            on_version=lambda version: self._set_version(watch, version),
            **scope,
        ):
            self._apply(kind, change)

    def _set_version(self, watch: _Watch, version: str | None) -> None:
        connects = not watch.connected and version is not None
        if watch.connected and version is None:
            log.warning("the watch of %s is lost; no worker is presumed dead until it is back", watch.kind.resource)
        elif connects:
            watch.failures = 0
            log.info("%s are watched", watch.kind.resource)
        watch.connected = version is not None
        self._cache.set_version(watch.kind, version, self._clock())
        if connects and watch.kind in self._optional:
            self._on_change()  # the jobs' queues may be known now

    def _apply(self, kind: Kind, change: api.Change) -> None:
        """Cache a change from a watch. A bug that affects one object must not block the others."""
        try:
            if change.type == "deleted":
                if kind == NODE:
                    self._unready_since.pop(change.document["metadata"]["name"], None)
                    self._notice_seen_at.pop(change.document["metadata"]["name"], None)
                self._cache.remove(kind, change.document)
            else:
                self._cache.put(kind, self._stamped(kind, caches.trimmed(kind, change.document)))
        except Exception as error:
            self._metrics.count_error()
            meta = change.document["metadata"]
            where = {"namespace": meta.get("namespace", ""), "job": meta.get("name", "")}
            log.error("%s %s cannot be cached: %s", kind, meta.get("name"), error, extra=where, exc_info=error)

    def _stamped(self, kind: Kind, document: Document) -> Document:
        """Stamp a Lease with its arrival time, and a node with the times when it became unready and when its termination notice
        arrived, all by our clock."""
        if kind == LEASE:
            return {**document, RECEIVED_AT: self._clock()}
        if kind != NODE:
            return document
        name = document["metadata"]["name"]
        if leaving_nodes.node_departure(document) is None:
            self._notice_seen_at.pop(name, None)
        else:
            document = {**document, leaving_nodes.TAINTED_AT: self._notice_seen_at.setdefault(name, self._clock())}
        if is_ready(document):
            self._unready_since.pop(name, None)
            return document
        return {**document, RECEIVED_AT: self._unready_since.setdefault(name, self._clock())}


@dataclass
class _Watch:
    kind: Kind
    failures: int = 0
    connected: bool = False
