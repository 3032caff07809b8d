"""Leader election: if there are several operators, only the one that holds the Lease `outlast-operator` in its namespace acts.
The leader renews the Lease. A standby takes over once it has seen no renewal for the Lease's full duration on its own clock:
machines' clocks are never compared, and suspended time counts. A leader that cannot renew stops before then, so two never act
at once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from outlast.base.errors import ClusterError, Conflict, Taken
from outlast.job.contract import OPERATOR
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import LEASE

log = logging.getLogger(__name__)
Document = dict[str, Any]

DURATION_S = 7.0
"""How long the Lease lasts after a renewal, in seconds. If the leader's node is lost, nothing is decided for this long.
Kubernetes' own components use 15 s. A shorter time makes a needless change of leader more likely, but that costs little, as
running worlds do not need the operator."""
RENEW_S = 2.0
RENEW_DEADLINE_S = 5.0
"""The leader stops acting this many seconds after its last renewal, which leaves time for requests in flight."""

ANSWER_OVERDUE_S = 5.0
"""If a response is overdue by this many seconds, the API server counts as unavailable, even if no connection was lost."""


def boottime() -> float:
    """Return monotonic seconds that include the time for which the machine was suspended, as our Lease can expire meanwhile.
    CLOCK_MONOTONIC does not include that time; see clock_gettime(2)."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""CLOCK_BOOTTIME exists on Linux only."""


@dataclass(frozen=True)
class LeaseObservation:
    """The Lease at its last observed change."""

    version: str
    at: float
    """When we saw the change, on our monotonic clock."""


LeaseAction = Literal["create", "renew", "take", "wait"]


def next_action(
    lease: Document | None, identity: str, observation: LeaseObservation | None, now: float
) -> tuple[LeaseAction, LeaseObservation | None, str]:
    """Decide what to do about the Lease. Returns the action, the `observation` to pass next time, and the reason."""
    if lease is None:
        return "create", None, "there was no Lease yet"
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder == identity:
        return "renew", observation, "this operator holds the Lease"
    if not holder:
        return "take", None, "the Lease was released"
    if observation is None or observation.version != lease["metadata"]["resourceVersion"]:
        return "wait", LeaseObservation(lease["metadata"]["resourceVersion"], now), f"{holder} is the leader"
    silent_s = now - observation.at
    if silent_s < float(spec.get("leaseDurationSeconds") or DURATION_S):
        return "wait", observation, f"{holder} is the leader"
    return "take", observation, f"{holder} has not renewed the Lease for {silent_s:.0f} s"


class Leadership:
    """Takes part in the leader election. `run` needs a separate thread."""

    def __init__(
        self,
        cluster: api.Cluster,
        identity: str,
        namespace: str,
        *,
        clock: Callable[[], float] = boottime,
        interval_s: float = RENEW_S,
        duration_s: float = DURATION_S,
    ) -> None:
        self.cluster, self.identity, self.namespace = cluster, identity, namespace
        self._clock = clock
        self._interval_s, self._duration_s = interval_s, duration_s
        self._renewed_at: float | None = None
        self._observation: LeaseObservation | None = None
        self._lease: Document | None = None
        self._last_logged = ""
        self._answered_at: float | None = None
        self._answering_since = 0.0

    def answered_for_s(self) -> float:
        """Return how long the API server has responded without interruption, in seconds. Watches do not show this: a hung server
        keeps its connections, and delivers old events afterwards."""
        now = self._clock()
        return 0.0 if self._answer_is_overdue(now) else now - self._answering_since

    def _answer_is_overdue(self, now: float) -> bool:
        return self._answered_at is None or now - self._answered_at > self._interval_s + ANSWER_OVERDUE_S

    def is_leader(self) -> bool:
        """Return whether this operator may act now."""
        return (
            self._renewed_at is not None and self._clock() - self._renewed_at < self._duration_s * RENEW_DEADLINE_S / DURATION_S
        )

    @property
    def is_standby(self) -> bool:
        """True if another operator leads."""
        return self._observation is not None

    @property
    def lost_leadership(self) -> bool:
        """True if this operator has led and must no longer act."""
        return self._renewed_at is not None and not self.is_leader()

    def run(self, stop: threading.Event) -> None:
        """Acquire and renew the Lease until `stop` is set or the Lease is lost, then release it if it is still held."""
        while not stop.is_set() and not self.lost_leadership:
            begun = self._clock()
            try:
                self.acquire_or_renew()
            except ClusterError as error:
                self._log_once(f"the Lease {self.namespace}/{OPERATOR} cannot be acquired or renewed: {error}")
            # A standby polls more often, to take over soon. A slow response must not delay the next renewal.
            interval_s = self._interval_s if self.is_leader() else self._interval_s / 2
            stop.wait(max(0.1 * interval_s, begun + interval_s - self._clock()))
        self.release()

    def acquire_or_renew(self) -> None:
        """Read the Lease once, and acquire or renew it if possible. Raises ClusterError."""
        requested_at = self._clock()
        lease = self.cluster.find(LEASE, OPERATOR, namespace=self.namespace)
        answered_at = self._clock()
        if self._answer_is_overdue(answered_at):
            self._answering_since = answered_at
        self._answered_at = answered_at
        action, self._observation, reason = next_action(lease, self.identity, self._observation, requested_at)
        if self._renewed_at is not None and action != "renew":
            self._renewed_at = float("-inf")  # another operator took over: we must not act any more, even if it is gone now
            self._log_once(f"{reason}; this operator stops acting")
            return
        if action == "wait":
            self._log_once(reason)
            return
        with contextlib.suppress(Taken, Conflict):  # another was faster; the next attempt shows which
            write = self.cluster.create if lease is None else self.cluster.replace
            self._lease = write(_renewed_lease(lease, self.identity, self.namespace, self._duration_s))
            first, self._renewed_at = self._renewed_at is None, requested_at
            if first:
                self._log_once(f"{reason}; this operator ({self.identity}) is the leader now")

    def release(self) -> None:
        """Release the Lease, so that a standby need not wait until it expires."""
        if not self.is_leader() or self._lease is None:
            return
        self._renewed_at = float("-inf")
        spec = {**self._lease["spec"], "holderIdentity": ""}
        try:
            self.cluster.replace({**self._lease, "spec": spec})
        except ClusterError as error:
            self._log_once(f"the Lease was not released, it expires in {self._duration_s:g} s: {error}")

    def _log_once(self, sentence: str) -> None:
        if sentence != self._last_logged:
            self._last_logged = sentence
            log.info(sentence)


def _renewed_lease(old: Document | None, identity: str, namespace: str, duration_s: float) -> Document:
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = dict((old or {}).get("spec") or {})
    if spec.get("holderIdentity") != identity:
        spec["acquireTime"] = now
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
    spec |= {"holderIdentity": identity, "leaseDurationSeconds": max(1, round(duration_s)), "renewTime": now}
    meta = (old or {}).get("metadata") or {"name": OPERATOR, "namespace": namespace}
    meta = {name: value for name, value in meta.items() if name != "managedFields"}
    return LEASE.document(meta, spec=spec)
