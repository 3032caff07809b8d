"""A plan: what `decide` returns and `apply.act` carries out.

In the order of the fields, each part only after the ones before. It may be broken off between any two writes: the next reconcile
pass makes the rest of it, or a better plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outlast.kubernetes.api.kinds import POD, Kind

Document = dict[str, Any]


@dataclass(frozen=True)
class Deletion:
    """An object to delete, if it still has this uid."""

    name: str
    uid: str
    reason: str
    grace_s: int | None = None
    """0: at once, without waiting for its node. Default: the pod's own grace period."""
    kind: Kind = POD


@dataclass(frozen=True)
class Event:
    """An Event of the job; its message is the sentence of the status."""

    type: Literal["Normal", "Warning"]
    reason: str
    """In CamelCase: `WorkerLost`."""
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do about one job now; empty for a job that has settled."""

    prerequisites: tuple[Document, ...] = ()
    """Objects to create unless they exist. While one of an earlier job of this name still exists, nothing else is done."""
    apply: tuple[Document, ...] = ()
    """Objects to change by server-side apply."""
    status: Mapping[str, Any] | None = None
    """The whole new `.status`, if it changes; a key that is missing is removed."""
    deletes: tuple[Deletion, ...] = ()
    statuses: tuple[Document, ...] = ()
    """Objects of others (Kueue's Workloads) with a new status, written only on this resource version."""
    creates: tuple[Document, ...] = ()
    """Pods."""
    remove: Deletion | None = None
    """The job itself, when its TTL has passed."""
    events: tuple[Event, ...] = ()
    requeue_at: float | None = None
    """When to reconcile again although nothing changes; seconds since the epoch."""

    def __bool__(self) -> bool:
        ours = self.prerequisites or self.apply or self.status is not None or self.deletes or self.creates or self.remove
        return bool(ours or self.statuses)
