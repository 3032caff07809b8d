"""Which other workers keep replicas of a worker's parts. Pure.

Nobody keeps more than a fair share, so that memory can be planned. Within it other nodes come first, then other zones, then a
ring with a jump: neighbours in rank, often in one rack, have their replicas far from each other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence


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
    ring = _Ring(workers, count)
    for _ in range(count):
        for own in range(len(workers)):
            ring.choose(own)
    return [tuple(workers[each].address for each in those) for those in ring.found]


class _Ring:
    """What has been chosen so far, and how many replicas each worker may still keep."""

    def __init__(self, workers: Sequence[Place], count: int) -> None:
        self._workers = workers
        self.found: list[list[int]] = [[] for _ in workers]
        holders = [n for n, place in enumerate(workers) if place.address]
        wanted = sum(min(count, len(holders) - bool(place.address)) for place in workers)
        share = -(-wanted // len(holders)) if holders else 0
        self._free = [0] * len(workers)
        self._zoned = len({place.zone for place in workers}) > 1
        self._by_node, self._by_zone = Counter[str](), Counter[str]()
        for n in holders:
            self._count(n, share)

    def _count(self, other: int, more: int) -> None:
        self._free[other] += more
        self._by_node[self._workers[other].node] += more
        self._by_zone[self._workers[other].zone] += more

    def choose(self, own: int) -> None:
        """Give a worker the best peer that is left. Where no peer with room suits it, one that has another peer changes over."""
        peer = self._best(own)
        if peer is None:
            holders = (n for n, free in enumerate(self._free) if free)
            swaps = ((left, other, theirs) for left in holders for other in self._after(own) for theirs in self.found[other])
            for left, other, theirs in swaps:
                if self._suits(other, left) and self._suits(own, theirs):
                    self.found[other][self.found[other].index(theirs)] = left
                    self.found[own].append(theirs)
                    self._count(left, -1)
                    return
            return
        self.found[own].append(peer)
        self._count(peer, -1)

    def _after(self, own: int) -> Iterator[int]:
        """The ring: others first, from half of it on."""
        first = own + max(1, len(self._workers) // 2)
        return (other % len(self._workers) for other in range(first, first + len(self._workers)))

    def _suits(self, own: int, other: int) -> bool:
        return other != own and other not in self.found[own]

    def _best(self, own: int) -> int | None:
        """The first peer with room, on a node and in a zone that has none of this worker's yet, as far as there are such."""
        nodes, zones = ({getattr(self._workers[each], name) for each in (own, *self.found[own])} for name in ("node", "zone"))
        room = sum(self._free)
        least = sum(self._by_node[node] for node in nodes) == room, self._zoned and sum(self._by_zone[z] for z in zones) == room
        best: tuple[tuple[bool, bool], int] | None = None
        for other in self._after(own):
            if self._free[other] and self._suits(own, other):
                place = self._workers[other]
                cost = place.node in nodes, self._zoned and place.zone in zones
                if best is None or cost < best[0]:
                    best = cost, other
                if cost <= least:
                    break
        return best[1] if best else None
