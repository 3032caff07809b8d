"""Which memory a new part gets: the rule that keeps one complete snapshot at any time, and no more than two.

Rooms are kept and used again, since memory that has been touched costs no page faults. A room is free unless somebody uses it, or
it holds a part of the newest complete snapshot, or of the one that is being made. Everything else (an older snapshot, one that
was given up, one of a world that has ended) is overwritten. Pure; `server` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

At = tuple[int, int]
"""(generation, step) of a snapshot; (0, 0) is before all."""
_WASTE = 1.1
"""A room is used for a part that is smaller by this factor at most, while there is memory for another. Arbitrary."""


@dataclass(frozen=True)
class Room:
    """Some memory."""

    id: int
    size: int
    """Bytes."""
    at: At | None = None
    """Of the part that it holds or is to hold, if any."""
    busy: bool = False
    """Somebody writes or reads it."""
    replica: bool = False
    """It holds a part of another worker's."""


@dataclass(frozen=True)
class Choice:
    """What to do for a part that needs room: reuse one, or make one after dropping others; `problem` if neither is possible."""

    reuse: int | None = None
    drop: tuple[int, ...] = ()
    problem: str = ""


def free(room: Room, at: At, complete: At) -> bool:
    """Whether a room may be overwritten for the snapshot `at`, when `complete` is the newest complete one."""
    return not room.busy and (room.at is None or (room.at < at and room.at != complete))


def surplus(rooms: Sequence[Room], before: At) -> list[int]:
    """Rooms that no snapshot has used since the complete one `before` the newest: parts have another size now."""
    return [room.id for room in rooms if not room.busy and room.at is not None and room.at < before]


def choose(rooms: Sequence[Room], size: int, budget: int, at: At, complete: At, *, replica: bool = False) -> Choice:
    """Find room for a part of `size` bytes.

    Replicas leave room for two snapshots of the worker's own; its own displace replicas.
    """
    idle = [room for room in rooms if free(room, at, complete)]
    kept = [room for room in rooms if room not in idle]
    used, total = (sum(room.size for room in some) for some in (kept, rooms))
    replicas = sum(room.size for room in kept if room.replica)
    if replica and size + replicas > budget - max(2 * _newest_own(rooms), used - replicas):
        return Choice(problem=_problem(size, used, budget))
    tight = [room for room in idle if size <= room.size <= size * _WASTE]
    if tight:
        return Choice(reuse=min(tight, key=lambda room: room.size).id)
    drop = []
    others = [] if replica else [room for room in kept if room.replica and not room.busy]
    for room in sorted(idle, key=lambda room: -room.size) + sorted(others, key=lambda room: -room.size):
        if total + size <= budget:
            break
        drop.append(room.id)
        total -= room.size
    return Choice(drop=tuple(drop)) if total + size <= budget else Choice(problem=_problem(size, used, budget))


def _newest_own(rooms: Sequence[Room]) -> int:
    """Bytes of the worker's own parts of its newest snapshot."""
    own = [room for room in rooms if not room.replica and room.at is not None]
    newest = max((room.at for room in own if room.at is not None), default=None)
    return sum(room.size for room in own if room.at == newest)


def _problem(size: int, used: int, budget: int) -> str:
    full = f"{_megabytes(used)} of the {_megabytes(budget)} for snapshots in the memory of this worker are in use"
    return f"{full}, {_megabytes(size)} more are needed; raise checkpoint.memory, or lower checkpoint.replicas"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
