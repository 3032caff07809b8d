"""Which other workers keep replicas of a worker's parts. Pure.

A ring with a jump: neighbours in rank, often in one rack, have their replicas far from each other. Other
nodes come first, then other zones. Nobody keeps more than a fair share, so that memory can be planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker is."""

    address: str
    """Of its agent's data port; empty if it has none."""
    node: str = ""
    zone: str = ""


def replicas(workers: Sequence[Place], count: int) -> list[tuple[str, ...]]:
    """For each worker the addresses of the `count` others that keep replicas of its parts; fewer where there are not so many.

    `workers` are in the order of their ranks. Every worker works out the same.
    """
    load = [0] * len(workers)
    found: list[list[int]] = [[] for _ in workers]
    for _ in range(count):
        for own in range(len(workers)):
            chosen = _next(workers, own, found[own], [held < count for held in load])
            if chosen is not None:
                found[own].append(chosen)
                load[chosen] += 1
    return [tuple(workers[each].address for each in those) for those in found]


def _next(workers: Sequence[Place], own: int, before: Sequence[int], free: Sequence[bool]) -> int | None:
    """The best peer for a worker that has those `before` already: `free` are the workers that have not their share yet."""
    nodes, zones = ({getattr(workers[each], name) for each in (own, *before)} for name in ("node", "zone"))
    zoned = any(place.zone != workers[own].zone for place in workers)
    best: tuple[tuple[bool, bool, bool], int] | None = None
    for step in range(len(workers)):
        other = (own + max(1, len(workers) // 2) + step) % len(workers)
        place = workers[other]
        if other == own or other in before or not place.address:
            continue
        cost = place.node in nodes, not free[other], zoned and place.zone in zones
        if best is None or cost < best[0]:
            best = cost, other
        if not any(cost):
            break
    return best[1] if best else None
