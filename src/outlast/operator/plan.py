"""What is to be done about a job: the answer of `decide`, and what `act` carries out.

In this order, each part only after the ones before: `setup`, `apply`, `status`, `deletes`, `statuses`, `creates`, `remove`. It
may be broken off between any two, and the next look makes the rest of it, or a better plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outlast.kube.kinds import POD, Kind

Document = dict[str, Any]


@dataclass(frozen=True)
class Deletion:
    """A document to be deleted, if it is still the one with this uid."""

    name: str
    uid: str
    reason: str
    grace_s: int | None = None
    """0: at once, whatever its node says. Default: as the pod says itself."""
    kind: Kind = POD


@dataclass(frozen=True)
class Note:
    """An Event of the job; its message is the sentence of the status."""

    type: Literal["Normal", "Warning"]
    reason: str
    """In CamelCase: `WorkerLost`."""
    message: str


@dataclass(frozen=True)
class Plan:
    """What is to be done about one job now. A plan without anything to do is a job that is settled."""

    setup: tuple[Document, ...] = ()
    """Documents that are to be there; those that are stay as they are, but for those of an earlier job of this name: until they
    have gone, nothing else is done."""
    apply: tuple[Document, ...] = ()
    """Documents of which what we say is to be made true (server-side apply)."""
    status: Mapping[str, Any] | None = None
    """The whole `.status` to be, if it is not as it is; a key that is missing goes."""
    deletes: tuple[Deletion, ...] = ()
    statuses: tuple[Document, ...] = ()
    """Documents of others whose status is to be as it is here, if they are still of the version that is here."""
    creates: tuple[Document, ...] = ()
    """Pods."""
    remove: Deletion | None = None
    """The job itself: its time after the end is over."""
    notes: tuple[Note, ...] = ()
    look_again: float | None = None
    """When to look again although nothing happens; seconds since the epoch."""

    def __bool__(self) -> bool:
        ours = self.setup or self.apply or self.status is not None or self.deletes or self.creates or self.remove
        return bool(ours or self.statuses)
