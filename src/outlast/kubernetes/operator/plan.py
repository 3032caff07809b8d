"""A plan for one job, which `decide` returns and `apply.carry_out` executes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outlast.kubernetes.api.kinds import POD, Kind

Document = dict[str, Any]


@dataclass(frozen=True)
class Deletion:
    """An object to delete if it still has this uid."""

    name: str
    uid: str
    reason: str
    grace_s: int | None = None
    """0 deletes the object at once, without waiting for the node; None keeps the pod's own grace period."""
    kind: Kind = POD


@dataclass(frozen=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    """In CamelCase, such as `WorkerLost`."""
    message: str


@dataclass(frozen=True)
class Plan:
    """The writes for one job; empty for a job in a steady state. The fields are written in this order, except Events,
    which are written in the background after the status."""

    prerequisites: tuple[Document, ...] = ()
    """Objects to create unless they exist. Nothing else is done while an object of an earlier job with this name exists."""
    apply: tuple[Document, ...] = ()
    """Objects to update by server-side apply."""
    status: Mapping[str, Any] | None = None
    """The whole new status, if it changes; missing keys are removed."""
    deletes: tuple[Deletion, ...] = ()
    statuses: tuple[Document, ...] = ()
    """Kueue's Workloads with a new status, written only if the resource version is unchanged."""
    creates: tuple[Document, ...] = ()
    remove: Deletion | None = None
    """The job itself, once its TTL has passed."""
    events: tuple[Event, ...] = ()
    requeue_at: float | None = None
    """When to reconcile again even if nothing changes."""

    def __bool__(self) -> bool:
        own_changes = self.prerequisites or self.apply or self.status is not None or self.deletes or self.creates or self.remove
        return bool(own_changes or self.statuses)
