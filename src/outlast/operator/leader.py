"""Who of several operators acts: the one that holds the Lease `outlast-operator` in its namespace.

A holder renews it all the time; who finds it unchanged for its whole duration, by the own clock from the own first look, takes it
over: nobody's clocks are compared, and a machine that slept counts the time it did. A holder that could not renew for less than
that stops acting before anybody else may begin. `judge` is pure; `Leadership` does what it says.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from outlast import kube
from outlast.contract import OPERATOR
from outlast.errors import Absent, ClusterError, Conflict, Taken
from outlast.kube.kinds import LEASE

Document = dict[str, Any]

DURATION_S = 15.0
"""How long a Lease lasts after it was renewed."""
RENEW_S = 5.0
"""How often it is renewed."""
LOST_S = 10.0
"""Without a renewal for so long, its holder stops acting: a third of the duration is left for what is on its way."""

BREAK_S = 5.0
"""An answer that comes so much later than we ask is a break: the API server was away, though no connection may have been lost."""


def asleep_or_awake() -> float:
    """Seconds on a clock that also runs while the machine is suspended, when our Lease lapses and another process may take it.
    CLOCK_MONOTONIC stands still then, see clock_gettime(2)."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Only Linux has the first one."""


@dataclass(frozen=True)
class Seen:
    """The Lease as it was when it was found to have changed last."""

    version: str
    at: float
    """By our own monotonic clock."""


Verdict = Literal["create", "renew", "take", "wait"]


def judge(lease: Document | None, me: str, seen: Seen | None, clock: float) -> tuple[Verdict, Seen | None, str]:
    """What to do about the Lease, what to remember of it, and why."""
    if lease is None:
        return "create", None, "nobody has held the lease yet"
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder == me:
        return "renew", seen, "the lease is ours"
    if not holder:
        return "take", None, "the lease was given back"
    if seen is None or seen.version != lease["metadata"]["resourceVersion"]:
        return "wait", Seen(lease["metadata"]["resourceVersion"], clock), f"{holder} acts"
    lapsed = clock - seen.at
    if lapsed < float(spec.get("leaseDurationSeconds") or DURATION_S):
        return "wait", seen, f"{holder} acts"
    return "take", seen, f"{holder} has not renewed the lease for {lapsed:.0f} s"


class Leadership:
    """Our part in the Lease. `run` is to be called by a thread of its own."""

    def __init__(
        self,
        cluster: kube.Cluster,
        me: str,
        namespace: str,
        *,
        told: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = asleep_or_awake,
        every_s: float = RENEW_S,
        duration_s: float = DURATION_S,
    ) -> None:
        self.cluster, self.me, self.namespace = cluster, me, namespace
        self._told, self._clock = told, clock
        self._every_s, self._duration_s = every_s, duration_s
        self._renewed: float | None = None
        self._seen: Seen | None = None
        self._lease: Document | None = None
        self._said = ""
        self._answered: float | None = None
        self._unbroken = 0.0

    def heard_for(self) -> float:
        """For how many seconds the API server has answered without a break. A watch does not tell: a server that stands still
        keeps its connections, and what comes through them afterwards is old."""
        now = self._clock()
        return 0.0 if self._broken(now) else now - self._unbroken

    def _broken(self, now: float) -> bool:
        """Whether an answer is overdue."""
        return self._answered is None or now - self._answered > self._every_s + BREAK_S

    def holds(self) -> bool:
        """Whether we may act now."""
        return self._renewed is not None and self._clock() - self._renewed < self._duration_s * LOST_S / DURATION_S

    @property
    def waits(self) -> bool:
        """Whether another acts, as far as we know."""
        return self._seen is not None

    @property
    def lost(self) -> bool:
        """Whether we may act no more, after we did."""
        return self._renewed is not None and not self.holds()

    def run(self, stop: threading.Event) -> None:
        """Try to become the leader and to stay it, until told to stop, or until it is lost. Gives the Lease back at the end."""
        while not stop.is_set() and not self.lost:
            try:
                self.step()
            except ClusterError as error:
                self._say(f"the lease {self.namespace}/{OPERATOR} cannot be had: {error}")
            # In a contest, whoever comes late should not be late by a whole round.
            stop.wait(self._every_s if self.holds() else self._every_s / 2)
        self.release()

    def step(self) -> None:
        """Look at the Lease once, and do what is to be done about it. Raises ClusterError."""
        asked = self._clock()
        try:
            lease: Document | None = self.cluster.get(LEASE, OPERATOR, namespace=self.namespace)
        except Absent:
            lease = None
        answered = self._clock()
        if self._broken(answered):
            self._unbroken = answered
        self._answered = answered
        verdict, self._seen, why = judge(lease, self.me, self._seen, asked)
        if self._renewed is not None and verdict != "renew":
            self._renewed = float("-inf")  # somebody has taken it from us: we may not act, whatever became of that one
            self._say(f"{why}; this operator acts no more")
            return
        if verdict == "wait":
            self._say(why)
            return
        with contextlib.suppress(Taken, Conflict):  # another was faster; the next look says who
            if lease is None:
                self._lease = self.cluster.create(_made(None, self.me, self.namespace, self._duration_s))
            else:
                self._lease = self.cluster.replace(_made(lease, self.me, self.namespace, self._duration_s))
            first, self._renewed = self._renewed is None, asked
            if first:
                self._say(f"{why}; this operator ({self.me}) acts now")

    def release(self) -> None:
        """Give the Lease back, so that another need not wait until it lapses."""
        if not self.holds() or self._lease is None:
            return
        self._renewed = float("-inf")
        spec = {**self._lease["spec"], "holderIdentity": ""}
        try:
            self.cluster.replace({**self._lease, "spec": spec})
        except ClusterError as error:
            self._say(f"the lease was not given back, it lapses in {self._duration_s:g} s: {error}")

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._told(sentence)


def _made(old: Document | None, me: str, namespace: str, duration_s: float) -> Document:
    """The Lease as its holder writes it."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = dict((old or {}).get("spec") or {})
    if spec.get("holderIdentity") != me:
        spec["acquireTime"] = now
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
    spec |= {"holderIdentity": me, "leaseDurationSeconds": max(1, round(duration_s)), "renewTime": now}
    meta = (old or {}).get("metadata") or {"name": OPERATOR, "namespace": namespace}
    meta = {name: value for name, value in meta.items() if name != "managedFields"}
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}
