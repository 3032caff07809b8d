"""The watcher of one node: asks for notices, marks the node, and drains it before the deadline.

    watcher = Watcher(node, source, cluster, Settings(), clock=Clock(), send=outbox.put)
    while not stop.wait(watcher.tick()): ...

A notice is acted on in this order: taint, cordon and annotations in one write, on which the operator has the workers leave; the
message to a queue; orders to workers without an operator; evictions, as `drain` decides. Whatever fails is said once and tried
again: the metadata service with growing pauses, the API server at the next round. All state is in the node and its pods, so
it may be killed between any two lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast import backoff, probes
from outlast.errors import ClusterError, Conflict
from outlast.kube import NODE, POD, Cluster
from outlast.nodewatch import drain, evictions, node, notices, orders
from outlast.nodewatch.drain import Plan, Window
from outlast.nodewatch.evictions import Outcome
from outlast.nodewatch.notices import Notice
from outlast.nodewatch.sources import MetadataAway, Source

log = logging.getLogger(__name__)

Document = Mapping[str, Any]

LONGEST_BACKOFF_S = 30.0
"""Longest pause between two questions to a metadata service that does not answer."""
PASS_S = 2.0
"""Interval of the passes of a drain, and so of the attempts to evict a pod that a PodDisruptionBudget keeps."""
STUCK_S = 120.0
"""A round that takes longer fails the liveness probe."""
_TRIES = 5
"""Writes of the node, while others write it at the same moment."""


@dataclass(frozen=True)
class Settings:
    """How a node is watched."""

    every_s: float = 1.0
    """Interval between two questions for notices."""
    ahead_s: float = 900.0
    """How long before its deadline a notice is acted on: maintenance is announced days before. Azure announces 15 minutes."""
    dry_run: bool = False
    """Only log what would be done."""
    order_s: float = 1.0
    """Timeout of an order to a worker: an agent answers in milliseconds, and evictions wait for this."""
    evict_s: float = 5.0
    """Timeout of an eviction: one answer that does not come must not cost the other pods their time."""


class Watcher:
    """Watches one node. Not thread-safe, but for `health`."""

    def __init__(
        self,
        found: Document,
        source: Source,
        cluster: Cluster,
        settings: Settings = Settings(),
        *,
        clock: Callable[[], float],
        send: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.machine, self.source, self.cluster, self.settings, self.clock = node.machine(found), source, cluster, settings, clock
        self._send = send
        self.said = node.read(found)
        """What the node says now."""
        self.known: tuple[Notice, ...] = (self.said,) if self.said else ()
        self._since: tuple[str, float] | None = None
        """Id of the notice that is acted on, and when it came."""
        self._sent: set[tuple[object, ...]] = set()
        """Notices about which the message and the orders have been sent."""
        self._failures, self._failing_since = 0, 0.0
        """Questions in a row that were not answered, and when the first of them was asked."""
        self._next = self._next_pass = 0.0
        self._refused: set[str] = set()
        """Uids of pods whose eviction was refused."""
        self._drained: Notice | None = None
        self._logged: set[str] = set()
        """What has been said of the present notice."""
        self._evicted = 0
        self._began = self._ended = clock()
        """Of the last round."""

    def tick(self) -> float:
        """One round; seconds until the next. Errors of cloud and cluster are logged, not raised."""
        self._began = now = self.clock()
        self._poll(now)
        now = self.clock()
        notice = notices.due(self.known, now, ahead_s=self.settings.ahead_s)
        if notice is None:
            self._since, self._drained, self._next_pass = None, None, 0.0
            self._refused.clear()
        elif self._since is None or self._since[0] != notice.id:
            self._since = notice.id, now
        marked = self._mark(notice, now)
        if notice is not None:
            self._tell(notice)
            self._drain(notice, now)
        self._ended = now = self.clock()
        wakes = [self._next, self._next_pass] if notice is not None and self._drained != notice else [self._next]
        return max(0.0, min(wakes) - now) if marked else min(PASS_S, self.settings.every_s)

    # Noticing

    def _poll(self, now: float) -> None:
        if now < self._next:
            return
        try:
            read = self.source.read(now)
        except MetadataAway as error:
            if not self._failures:
                self._failing_since = now
                log.warning("%s; trying again", error)
            pause = backoff.exponential(self._failures, self.settings.every_s, LONGEST_BACKOFF_S)
            self._failures += 1
            self._next = self.clock() + max(self.settings.every_s, pause)
            return
        if self._failures:
            log.info("%s answers again, after %.0f s", self.source.name, now - self._failing_since)
        self._failures = 0
        self._next = now + self.settings.every_s
        self.known = notices.merged(self.known, read, now)

    # Saying it

    def _mark(self, notice: Notice | None, now: float) -> bool:
        """Have the node say this notice, or none; whether it does."""
        if node.same(notice, self.said):
            return True
        name = self.machine.node
        if notice is None:
            sentence = f"node {name} stays: the notice is withdrawn; its taint is taken back"
        else:
            left = "no deadline" if notice.deadline is None else f"{notice.deadline - now:.0f} s left"
            sentence = f"node {name} leaves ({notice.kind}, {left}): {notice.reason}; it is tainted and cordoned"
        if self.settings.dry_run:
            log.warning("dry run: %s", sentence)
        elif not self._write(notice):
            return False
        else:
            log.warning("%s", sentence)
        self.said = notice
        self._logged.clear()
        return True

    def _write(self, notice: Notice | None) -> bool:
        for _ in range(_TRIES):
            try:
                found = self.cluster.get(NODE, self.machine.node)
                change = node.cleared(found) if notice is None else node.marked(found, notice)
                self.cluster.patch(NODE, self.machine.node, change)
                return True
            except Conflict:
                continue
            except ClusterError as error:
                self._once(f"node {self.machine.node} cannot be marked: {error}; trying again")
                return False
        return False

    def _tell(self, notice: Notice) -> None:
        """Send the message about this notice, once."""
        key = (notice.kind, notice.deadline)
        if self._send is None or key in self._sent:
            return
        pods = self._pods()
        if pods is None:
            return
        self._sent.add(key)
        message = node.message(self.machine, drain.affected(pods), notice, self._since[1] if self._since else self._began)
        if self.settings.dry_run:
            log.warning("dry run: would send %s", message)
        else:
            self._send(message)

    # Draining

    def _drain(self, notice: Notice, now: float) -> None:
        """One pass of evictions. Without a deadline there is none: only workers leave, on the taint."""
        if notice.deadline is None:
            self._drained = notice
            return
        if self._drained == notice or now < self._next_pass:
            return
        self._next_pass = now + PASS_S
        pods = self._pods()
        if pods is None:
            return
        self._order(pods, notice, notice.deadline, now)
        plan = drain.plan(pods, Window(self._since[1] if self._since else now, notice.deadline), now, self._refused)
        if plan.drained:
            self._all_gone(notice, now)
        elif self.settings.dry_run:
            self._only_say(plan)
        else:
            for outcome in evictions.carry_out(self.cluster, plan.steps, self.settings.evict_s):
                self._note(outcome)
            if plan.waiting:
                self._once(f"waiting for pods to leave by themselves: {', '.join(plan.waiting)}")

    def _order(self, pods: list[dict[str, Any]], notice: Notice, deadline: float, now: float) -> None:
        """Tell workers that no operator runs by when they must have left: each once, before it is evicted."""
        key = (notice.kind, deadline, "order")
        if key in self._sent or self.settings.dry_run:
            return
        self._sent.add(key)
        order = orders.Order(deadline, notice.reason, self.settings.order_s)
        for name, said in orders.send(self.cluster, pods, order, now).items():
            log.warning("%s %s", name, said)

    def _only_say(self, plan: Plan) -> None:
        for step in plan.steps:
            self._once(f"dry run: {step.verb} {step.name}, with {step.grace_s} s to end", step.name)

    def _note(self, outcome: Outcome) -> None:
        step = outcome.step
        if outcome.error is None:
            self._evicted += 1
            self._once(str(step))
        else:
            self._refused.add(step.pod["metadata"]["uid"])
            self._once(f"{step.name} stays for now: {outcome.error}", f"{step.name} {type(outcome.error).__name__}")

    def _all_gone(self, notice: Notice, now: float) -> None:
        self._once(f"node {self.machine.node} is drained{notices.against(notice.deadline, now)}")
        try:
            if not self.settings.dry_run:
                self.source.acknowledge(notice)
        except MetadataAway as error:
            self._once(f"the event cannot be acknowledged: {error}; trying again")
            return
        self._drained = notice

    def _pods(self) -> list[dict[str, Any]] | None:
        """The pods of the node; None when the API server does not say."""
        try:
            return self.cluster.list_(POD, everywhere=True, fields=f"spec.nodeName={self.machine.node}")
        except ClusterError as error:
            self._once(f"the pods of node {self.machine.node} cannot be listed: {error}; trying again")
            return None

    def _once(self, sentence: str, key: str = "") -> None:
        """Log something about the present notice, unless it has been said."""
        if (key or sentence) not in self._logged:
            self._logged.add(key or sentence)
            log.warning("%s", sentence)

    def health(self) -> probes.Health:
        """What the probes answer."""
        now, said = self.clock(), self.said
        stuck = self._began > self._ended and now - self._began > STUCK_S
        asked = self._next > 0 and not self._failures
        reason = "watching"
        if stuck:
            reason = f"a round takes longer than {STUCK_S:.0f} s"
        elif not asked:
            reason = f"{self.source.name} does not answer" if self._failures else "starting"
        elif said is not None:
            reason = f"the node leaves: {said.reason}"
        metrics = {
            "node_leaving": float(said is not None),
            "metadata_failing_seconds": now - self._failing_since if self._failures else 0.0,
            "pods_evicted": float(self._evicted),
        }
        if said is not None and said.deadline is not None:
            metrics["node_deadline_seconds"] = said.deadline
        return probes.Health(not stuck, asked, reason, metrics)
