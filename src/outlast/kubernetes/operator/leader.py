"""Leader election: if there are several operators, only the one that holds the Lease `outlast-operator` in its namespace acts.
The leader renews the Lease. A standby takes the Lease over if it has seen no renewal for the whole duration, measured on its own
clock: clocks of machines are not compared, and time while suspended counts. A leader that cannot renew stops acting before then,
so two never act at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from outlast.base.errors import Absent, ClusterError, Conflict, Taken
from outlast.job.contract import OPERATOR
from outlast.kubernetes import api
from outlast.kubernetes.api.kinds import LEASE

Document = dict[str, Any]

DURATION_S = 15.0
"""Duration of the Lease after a renewal, in seconds."""
RENEW_S = 5.0
"""Interval between renewals."""
LOST_S = 10.0
"""The leader stops acting this long after its last renewal: the rest of the duration is for requests in flight."""

BREAK_S = 5.0
"""If an answer is overdue by this much, the API server was unavailable, even if no connection was lost."""


def asleep_or_awake() -> float:
    """Monotonic seconds that include time while suspended, in which our Lease can expire. CLOCK_MONOTONIC stops then, see
    clock_gettime(2)."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""CLOCK_BOOTTIME exists on Linux only."""


@dataclass(frozen=True)
class Seen:
    """The Lease as of its last change."""

    version: str
    at: float
    """When we saw the change, on our monotonic clock."""


Verdict = Literal["create", "renew", "take", "wait"]


def judge(lease: Document | None, me: str, seen: Seen | None, clock: float) -> tuple[Verdict, Seen | None, str]:
    """Decide what to do about the Lease. Returns the verdict, the state to pass as `seen` next time, and the reason."""
    if lease is None:
        return "create", None, "there was no Lease yet"
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder == me:
        return "renew", seen, "this operator holds the Lease"
    if not holder:
        return "take", None, "the Lease was released"
    if seen is None or seen.version != lease["metadata"]["resourceVersion"]:
        return "wait", Seen(lease["metadata"]["resourceVersion"], clock), f"{holder} is the leader"
    lapsed = clock - seen.at
    if lapsed < float(spec.get("leaseDurationSeconds") or DURATION_S):
        return "wait", seen, f"{holder} is the leader"
    return "take", seen, f"{holder} has not renewed the Lease for {lapsed:.0f} s"


class Leadership:
    """Takes part in the leader election. `run` needs a thread of its own."""

    def __init__(
        self,
        cluster: api.Cluster,
        me: str,
        namespace: str,
        *,
        log: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = asleep_or_awake,
        every_s: float = RENEW_S,
        duration_s: float = DURATION_S,
    ) -> None:
        self.cluster, self.me, self.namespace = cluster, me, namespace
        self._log, self._clock = log, clock
        self._every_s, self._duration_s = every_s, duration_s
        self._renewed: float | None = None
        self._seen: Seen | None = None
        self._lease: Document | None = None
        self._logged = ""
        self._answered: float | None = None
        self._unbroken = 0.0

    def answered_for(self) -> float:
        """Seconds for which the API server has answered without interruption. Watches do not show this: a server that hangs keeps
        its connections, and delivers old events afterwards."""
        now = self._clock()
        return 0.0 if self._broken(now) else now - self._unbroken

    def _broken(self, now: float) -> bool:
        return self._answered is None or now - self._answered > self._every_s + BREAK_S

    def holds(self) -> bool:
        """Whether this operator may act now."""
        return self._renewed is not None and self._clock() - self._renewed < self._duration_s * LOST_S / DURATION_S

    @property
    def waits(self) -> bool:
        """Whether another operator leads."""
        return self._seen is not None

    @property
    def lost(self) -> bool:
        """Whether this operator has led and must no longer act."""
        return self._renewed is not None and not self.holds()

    def run(self, stop: threading.Event) -> None:
        """Acquire and renew the Lease until `stop` is set or the Lease is lost; release it at the end."""
        while not stop.is_set() and not self.lost:
            try:
                self.step()
            except ClusterError as error:
                self._log_once(f"the Lease {self.namespace}/{OPERATOR} cannot be acquired or renewed: {error}")
            # A standby polls more often, to take over soon.
            stop.wait(self._every_s if self.holds() else self._every_s / 2)
        self.release()

    def step(self) -> None:
        """Read the Lease once, and acquire or renew it if possible. Raises ClusterError."""
        requested_at = self._clock()
        try:
            lease: Document | None = self.cluster.get(LEASE, OPERATOR, namespace=self.namespace)
        except Absent:
            lease = None
        answered = self._clock()
        if self._broken(answered):
            self._unbroken = answered
        self._answered = answered
        verdict, self._seen, why = judge(lease, self.me, self._seen, requested_at)
        if self._renewed is not None and verdict != "renew":
            self._renewed = float("-inf")  # another has taken it over: we must not act any more, even if that one is gone
            self._log_once(f"{why}; this operator stops acting")
            return
        if verdict == "wait":
            self._log_once(why)
            return
        with contextlib.suppress(Taken, Conflict):  # another was faster; the next step shows which
            write = self.cluster.create if lease is None else self.cluster.replace
            self._lease = write(_renewed(lease, self.me, self.namespace, self._duration_s))
            first, self._renewed = self._renewed is None, requested_at
            if first:
                self._log_once(f"{why}; this operator ({self.me}) is the leader now")

    def release(self) -> None:
        """Release the Lease, so that a standby need not wait until it expires."""
        if not self.holds() or self._lease is None:
            return
        self._renewed = float("-inf")
        spec = {**self._lease["spec"], "holderIdentity": ""}
        try:
            self.cluster.replace({**self._lease, "spec": spec})
        except ClusterError as error:
            self._log_once(f"the Lease was not released, it expires in {self._duration_s:g} s: {error}")

    def _log_once(self, sentence: str) -> None:
        if sentence != self._logged:
            self._logged = sentence
            self._log(sentence)


def _renewed(old: Document | None, me: str, namespace: str, duration_s: float) -> Document:
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = dict((old or {}).get("spec") or {})
    if spec.get("holderIdentity") != me:
        spec["acquireTime"] = now
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
    spec |= {"holderIdentity": me, "leaseDurationSeconds": max(1, round(duration_s)), "renewTime": now}
    meta = (old or {}).get("metadata") or {"name": OPERATOR, "namespace": namespace}
    meta = {name: value for name, value in meta.items() if name != "managedFields"}
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}
