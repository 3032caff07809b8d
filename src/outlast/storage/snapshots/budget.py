"""How much memory of a worker snapshots may use, and what fits into it.

`outlast validate` prints it before a job runs, the agent asks with what it measures. Pure; all sizes are bytes.

A worker holds two snapshots at a time, the newest complete one and the one being written. Each is a copy of what every rank has
(`shared`), what only its own ranks have (`unique`), and a replica of the latter of as many other workers as there are replicas.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outlast.base import units

SNAPSHOTS = 2
"""Held at a time."""
_SHARE = 4
"""`auto` uses one part in so many of the limit."""
_FREE = 10
"""One part in so many of the limit stays free."""


class Budget(NamedTuple):
    """What snapshots may use of a worker's memory."""

    bytes: int
    """0: snapshots are off."""
    reason: str
    """One sentence."""


class Fit(NamedTuple):
    """What a budget is enough for."""

    held: bool
    """Whether snapshots are taken at all."""
    replicas: int
    reason: str = ""
    """Why that is less than was asked for; empty if it is not."""


Asked = int | Literal["auto", "off"]
"""`checkpoint.memory` of a job."""


def asked(text: str) -> Asked:
    """The value of `contract.Env.MEMORY`; an empty one is `auto`. Raises ValueError for any other text."""
    match text:
        case "" | "auto":
            return "auto"
        case "off":
            return "off"
    return units.memory(text)


def budget(asked: Asked, limit: int, used: int, free: int) -> Budget:
    """What snapshots may use of a worker.

    `limit` is what the worker may use in all (its cgroup's limit, else its share of the machine), `used` what it uses now without
    snapshots, `free` what is available on the machine for it.
    """
    if asked == "off":
        return Budget(0, "checkpoint.memory is off")
    room = max(0, min(limit - used, free) - limit // _FREE)
    wanted = limit // _SHARE if asked == "auto" else asked
    what = f"a quarter of {units.human_bytes(limit)}" if asked == "auto" else "checkpoint.memory"
    if wanted <= room:
        return Budget(wanted, f"{units.human_bytes(wanted)}, {what}")
    if not room:
        return Budget(0, f"no memory: less than a tenth of {units.human_bytes(limit)} is free")
    return Budget(
        room, f"{units.human_bytes(room)} instead of {units.human_bytes(wanted)}, {what}: a tenth of the memory stays free"
    )


def needed(shared: int, unique: int, replicas: int) -> int:
    """What the snapshots of a worker take: `unique` is of one worker."""
    return SNAPSHOTS * (shared + (1 + replicas) * unique)


def fit(budget: int, shared: int, unique: int, replicas: int, workers: int) -> Fit:
    """Whether snapshots of this size fit, and with how many replicas, of which a world has at most one less than workers."""
    possible = min(replicas, workers - 1) if unique else 0
    have = f"checkpoint.memory is {units.human_bytes(budget)}"
    for count in range(possible, -1, -1):
        if needed(shared, unique, count) <= budget:
            if count == possible:
                return Fit(True, count)
            taken = units.human_bytes(needed(shared, unique, possible))
            return Fit(True, count, f"snapshots with replicas: {possible} take {taken}, {have}; replicas are reduced to {count}")
    taken = units.human_bytes(needed(shared, unique, 0))
    return Fit(False, 0, f"snapshots take {taken}, {have}; there are none")


def largest(budget: int, replicas: int) -> tuple[int, int]:
    """The largest state that fits: one that every rank has, and a worker's part of one of which each rank has a part."""
    return budget // SNAPSHOTS, budget // (SNAPSHOTS * (1 + replicas))


def cost(asked: Asked, replicas: int, limit: int, workers: int, saved: int = 0) -> str:
    """What snapshots take of a worker that may use `limit` bytes, and what fits, in one sentence for `outlast validate`.

    `saved` is the size of the run's newest checkpoint, 0 if it has none.
    """
    found, wanted, replicas = budget(asked, limit, 0, limit), replicas, min(replicas, workers - 1)
    if not found.bytes:
        return found.reason
    common, own = map(units.human_bytes, largest(found.bytes, replicas))
    sharded = f" with DDP, {own} a worker with FSDP and replicas: {replicas}" if workers > 1 else ""
    if 1 < workers <= wanted:
        sharded += f" ({wanted} would need {wanted + 1} workers)"
    return f"{found.reason}; a state of {common} fits{sharded}" + (
        _compared(found.bytes, replicas, workers, saved) if saved else ""
    )


def _compared(budget: int, replicas: int, workers: int, saved: int) -> str:
    """Whether the state of a checkpoint of `saved` bytes fits: at every rank as with DDP, in parts as with FSDP."""
    kinds = {"DDP": fit(budget, saved, 0, replicas, workers), "FSDP": fit(budget, 0, -(-saved // workers), replicas, workers)}
    what = f"; that of the newest checkpoint, {units.human_bytes(saved)},"
    reasons = {name: found.reason for name, found in kinds.items() if found.reason}
    if not reasons:
        return f"{what} does"
    if workers == 1:
        return f"{what} does not: {kinds['DDP'].reason}"
    return what + "".join(f"{' and' if at else ''} with {name}: {reason}" for at, (name, reason) in enumerate(reasons.items()))
