"""The watcher of one node, which polls for notices, marks the node, and evicts its pods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outlast.base import backoff
from outlast.base.errors import Absent, ClusterError, Conflict
from outlast.job.contract import LeavingKind
from outlast.kubernetes.api import Cluster, kinds, pod_status
from outlast.kubernetes.nodewatch import drain, notices
from outlast.kubernetes.nodewatch.drain import Step
from outlast.kubernetes.nodewatch.metadata import Metadata, MetadataAway
from outlast.kubernetes.nodewatch.notices import Notice

log = logging.getLogger(__name__)
LONGEST_BACKOFF_S = 30.0
PASS_S = 2.0
"""Interval between attempts to mark or to drain the node, in seconds."""
EVICT_S = 5.0
"""Timeout for an eviction, in seconds."""


class Watcher:
    def __init__(
        self,
        node: Mapping[str, Any],
        metadata: Metadata,
        cluster: Cluster,
        *,
        clock: Callable[[], float],
        interval_s: float = 1.0,
    ) -> None:
        self.name, self.metadata, self.cluster = pod_status.name(node), metadata, cluster
        self.clock, self.interval_s = clock, interval_s
        self.recorded = notices.read(node)
        self._notices: list[Notice] | None = None
        self._failures, self._next = 0, 0.0
        self._logged: set[str] = set()

    def tick(self) -> float:
        """Poll once, act on the notices, and return the seconds until the next call."""
        now = self.clock()
        if now >= self._next:
            self._poll(now)
        notice = self.recorded if self._notices is None else notices.effective(self._notices, self.recorded, now)
        done = notice == self.recorded or self._mark(notice, now)
        if notice is not None and (
            notice.kind is LeavingKind.SPOT or (notice.kind is not LeavingKind.REBALANCE and self._notices)
        ):
            done = self._drain(notice, self.clock()) and done  # only workers follow a recommendation, because of the taint
        pause_s = max(0.0, self._next - self.clock())
        return pause_s if done else min(pause_s, PASS_S)

    def _poll(self, now: float) -> None:
        try:
            self._notices = self.metadata.read(now)
            if self._failures:
                self._logged.clear()
                log.info("AWS's metadata service answers again")
            self._failures, self._next = 0, now + self.interval_s
        except MetadataAway as error:
            self._log_once(f"{error}; trying again")
            self._next = self.clock() + max(self.interval_s, backoff.exponential(self._failures, 1.0, LONGEST_BACKOFF_S))
            self._failures += 1

    def _mark(self, notice: Notice | None, now: float, tries: int = 5) -> bool:
        try:
            self.cluster.patch(kinds.NODE, self.name, notices.node_patch(self.cluster.get(kinds.NODE, self.name), notice))
        except Conflict:
            return tries > 1 and self._mark(notice, now, tries - 1)  # another client has just written the node
        except ClusterError as error:
            self._log_once(f"node {self.name} cannot be marked: {error}; trying again")
            return False
        self.recorded = notice
        self._logged.clear()
        time_left = "" if notice is None or notice.deadline is None else f", {notice.deadline - now:.0f} s left"
        reason = notice and f"leaves ({notice.kind}{time_left}): {notice.reason}; it is tainted and cordoned"
        self._log_once(f"node {self.name} {reason or 'stays: the notice is withdrawn; its taint is taken back'}")
        return True

    def _drain(self, notice: Notice, now: float) -> bool:
        try:
            pods = self.cluster.list_(kinds.POD, everywhere=True, fields=f"spec.nodeName={self.name}")
        except ClusterError as error:
            self._log_once(f"the pods of node {self.name} cannot be listed: {error}; trying again")
            return False
        steps, waiting = drain.plan(pods, notice.deadline, now)
        with ThreadPoolExecutor(8, thread_name_prefix="evict") as pool:
            list(pool.map(self._evict, steps))
        self._log_once(
            f"waiting for pods to leave: {', '.join(waiting)}" if waiting else "" if steps else f"node {self.name} is drained"
        )
        return not steps and not waiting

    def _evict(self, step: Step) -> None:
        meta, name = step.pod["metadata"], drain.full_name(step.pod)
        options = {"namespace": meta["namespace"], "uid": meta["uid"], "grace_s": step.grace_s, "timeout_s": EVICT_S}
        try:
            try:
                self.cluster.evict(meta["name"], **options)
            except (Absent, Conflict):
                return  # the pod is gone; after Conflict, another pod has its name
            except ClusterError:
                if not step.last:
                    raise
                self.cluster.delete(kinds.POD, meta["name"], **options)
        except ClusterError as error:
            return self._log_once(f"{name} stays for now: {error}", f"{name} {type(error).__name__}")
        self._log_once(f"evicts {name}, which has {step.grace_s} s to end", name)

    def _log_once(self, sentence: str, key: str = "") -> None:
        if sentence and (key or sentence) not in self._logged:
            self._logged.add(key or sentence)
            log.warning("%s", sentence)
