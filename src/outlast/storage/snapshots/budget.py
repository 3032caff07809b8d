"""Computes the memory budget for a worker's snapshots, and how large a state fits into it. Pure. All sizes are in bytes.

A worker holds two snapshots, the newest complete one and the one in progress. Each contains the state common to all ranks
(`shared`), the state that only this worker's ranks have (`unique`), and `replicas` copies of other workers' unique state.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outlast.base import units

SNAPSHOTS = 2
_SHARE = 4
_FREE = 10
"""Divisors of the memory limit: with `auto`, 1/4 is used for snapshots, and 1/10 always stays free."""


class Budget(NamedTuple):
    """A worker's memory budget for snapshots."""

    bytes: int
    """0 if snapshots are off."""
    reason: str


class Fit(NamedTuple):
    """Which snapshots fit into a budget."""

    held: bool
    replicas: int
    reason: str = ""
    """Why there are no snapshots, or fewer replicas than requested; otherwise empty."""


Requested = int | Literal["auto", "off"]
"""A job's `checkpoint.memory`."""


def requested(text: str) -> Requested:
    """Parse the value of `contract.Env.MEMORY`; an empty string means `auto`. Raises ValueError."""
    match text:
        case "" | "auto":
            return "auto"
        case "off":
            return "off"
    return units.memory(text)


def budget(requested: Requested, limit: int, used: int, free: int) -> Budget:
    """Return the memory budget for a worker's snapshots.

    `limit` is the worker's memory limit, `used` the memory that the worker uses apart from snapshots, and `free` the machine's
    available memory.
    """
    if requested == "off":
        return Budget(0, "checkpoint.memory is off")
    room = max(0, min(limit - used, free) - limit // _FREE)
    desired = limit // _SHARE if requested == "auto" else requested
    source = f"a quarter of {units.human_bytes(limit)}" if requested == "auto" else "checkpoint.memory"
    if desired <= room:
        return Budget(desired, f"{units.human_bytes(desired)}, {source}")
    if not room:
        return Budget(0, f"no memory: less than a tenth of {units.human_bytes(limit)} is free")
    return Budget(
        room, f"{units.human_bytes(room)} instead of {units.human_bytes(desired)}, {source}: a tenth of the memory stays free"
    )


def needed(shared: int, unique: int, replicas: int) -> int:
    """Return the memory that a worker's snapshots need. `unique` is the size of one worker's own state."""
    return SNAPSHOTS * (shared + (1 + replicas) * unique)


def fit(budget: int, shared: int, unique: int, replicas: int, workers: int) -> Fit:
    """Return whether snapshots fit, and with how many replicas, of which at most `workers` - 1 are possible."""
    possible = min(replicas, workers - 1) if unique else 0
    limit = f"checkpoint.memory is {units.human_bytes(budget)}"
    for count in range(possible, -1, -1):
        if needed(shared, unique, count) <= budget:
            if count == possible:
                return Fit(True, count)
            taken = units.human_bytes(needed(shared, unique, possible))
            return Fit(True, count, f"snapshots with replicas: {possible} take {taken}, {limit}; replicas are reduced to {count}")
    taken = units.human_bytes(needed(shared, unique, 0))
    return Fit(False, 0, f"snapshots take {taken}, {limit}; there are none")


def largest(budget: int, replicas: int) -> tuple[int, int]:
    """Return the largest replicated state that fits, and the largest share per worker of a sharded state."""
    return budget // SNAPSHOTS, budget // (SNAPSHOTS * (1 + replicas))


def cost(requested: Requested, replicas: int, limit: int, workers: int, saved: int = 0) -> str:
    """Return a sentence for `outlast validate` about the memory for snapshots and the state that fits into it."""
    usable, possible = budget(requested, limit, 0, limit), min(replicas, workers - 1)
    if not usable.bytes:
        return usable.reason
    common, own = map(units.human_bytes, largest(usable.bytes, possible))
    sharded = f" with DDP, {own} a worker with FSDP and replicas: {possible}" if workers > 1 else ""
    if 1 < workers <= replicas:
        sharded += f" ({replicas} would need {replicas + 1} workers)"
    return f"{usable.reason}; a state of {common} fits{sharded}" + (
        _compared(usable.bytes, possible, workers, saved) if saved else ""
    )


def _compared(budget: int, replicas: int, workers: int, saved: int) -> str:
    fits = {"DDP": fit(budget, saved, 0, replicas, workers), "FSDP": fit(budget, 0, -(-saved // workers), replicas, workers)}
    newest = f"; that of the newest checkpoint, {units.human_bytes(saved)},"
    reasons = {name: each.reason for name, each in fits.items() if each.reason}
    if not reasons:
        return f"{newest} does"
    if workers == 1:
        return f"{newest} does not: {fits['DDP'].reason}"
    return newest + "".join(f"{' and' if at else ''} with {name}: {reason}" for at, (name, reason) in enumerate(reasons.items()))
