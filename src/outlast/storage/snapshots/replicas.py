"""Decides which workers hold replicas (`holders`, pure), and sends replicas at a limited rate, so that training is not disturbed.

No worker holds more than a fair share, so that memory can be planned. Workers on other nodes are preferred, then workers in other
zones, and then workers far away in the ring of ranks, because neighbours often share a rack.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from outlast.base.errors import OutlastError
from outlast.storage.snapshots import agent_messages, part_format
from outlast.storage.snapshots.part_format import Part
from outlast.storage.snapshots.rooms import Refused, Room, Rooms


@dataclasses.dataclass(frozen=True)
class Place:
    """A worker's location."""

    address: str
    """Address of the agent's data port; empty if it has none."""
    node: str = ""
    zone: str = ""


def holders(workers: Sequence[Place], count: int) -> list[tuple[str, ...]]:
    """Return, for each worker in rank order, the addresses of the `count` other workers that hold its replicas."""
    ring = _Ring(workers, count)
    for _ in range(count):
        for own in range(len(workers)):
            ring.choose(own)
    return [tuple(workers[each].address for each in peers) for peers in ring.peers]


class _Ring:
    """The peers chosen so far, and each worker's remaining capacity for replicas."""

    def __init__(self, workers: Sequence[Place], count: int) -> None:
        self._workers = workers
        self.peers: list[list[int]] = [[] for _ in workers]
        holders = [n for n, place in enumerate(workers) if place.address]
        total = sum(min(count, len(holders) - bool(place.address)) for place in workers)
        share = -(-total // len(holders)) if holders else 0
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
        """Assign a peer to a worker. If no suitable peer has capacity left, swap peers with another worker."""
        peer = self._best(own)
        if peer is None:
            holders = (n for n, free in enumerate(self._free) if free)
            swaps = ((left, other, theirs) for left in holders for other in self._after(own) for theirs in self.peers[other])
            for left, other, theirs in swaps:
                if self._suits(other, left) and self._suits(own, theirs):
                    self.peers[other][self.peers[other].index(theirs)] = left
                    self.peers[own].append(theirs)
                    self._count(left, -1)
                    return
            return
        self.peers[own].append(peer)
        self._count(peer, -1)

    def _after(self, own: int) -> Iterator[int]:
        first = own + max(1, len(self._workers) // 2)
        return (other % len(self._workers) for other in range(first, first + len(self._workers)))

    def _suits(self, own: int, other: int) -> bool:
        return other != own and other not in self.peers[own]

    def _best(self, own: int) -> int | None:
        """Return the first peer with capacity, if possible on a node and in a zone without a copy of this worker's parts."""
        nodes, zones = ({getattr(self._workers[each], name) for each in (own, *self.peers[own])} for name in ("node", "zone"))
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


SLOWEST = 50e6
"""Minimum rate in bytes per second. A lower rate would make snapshots rare."""
_FIRST = 200e6
"""Rate in bytes per second until an interval has been measured. The value is arbitrary."""


def rate(nbytes: int, interval_s: float | None) -> float:
    """Return the rate, in bytes per second, at which sending a part takes a quarter of the interval between snapshots.

    Half of the interval would be too long, because the next snapshot waits until the replicas are sent. If such a wait has
    stretched the interval to two steps, a quarter of it is less than one step, so the next interval is one step again.
    """
    return _FIRST if interval_s is None else max(SLOWEST, 4 * nbytes / max(interval_s, 1e-3))


class Sender:
    """Sends the replicas of one agent."""

    def __init__(self, rooms: Rooms, key: bytes) -> None:
        self._rooms, self._key = rooms, key
        self._lock = threading.Lock()
        self._began: dict[tuple[object, ...], float] = {}
        self._idle: dict[str, list[agent_messages.Connection]] = collections.defaultdict(list)
        """Idle connections, keyed by address. They are kept because connecting takes longer than sending a small part."""

    def send(self, part: Part, to: Sequence[str], complete: tuple[int, int]) -> list[str]:
        """Send a part to several agents, one after another. Returns a sentence for each failure."""
        now = time.monotonic()
        with self._lock:
            previous = self._began.get((part.kind, part.rank))
            self._began[part.kind, part.rank] = now
        speed = rate(part.bytes * len(to), None if previous is None else now - previous)
        problems = []
        for address in to:
            try:
                with self._rooms.opened(part) as room:
                    self._put(part, room, address, complete, speed)
            except (OSError, ValueError, OutlastError) as error:
                problems.append(f"no replica of {part} at {address}: {error}")
        return problems

    def _connected(self, address: str) -> agent_messages.Connection:
        while True:
            with self._lock:
                idle = self._idle[address].pop() if self._idle[address] else None
            if idle is None:
                return agent_messages.connect(address, self._key)
            if not idle.waiting():  # otherwise the peer has closed it
                return idle
            idle.close()

    def _put(self, part: Part, room: Room, address: str, complete: tuple[int, int], speed: float) -> None:
        connection, over = self._connected(address), False
        try:
            connection.send({"put": part.json(), "tail": room.tail, "complete": complete})
            _expect(connection, "go")
            connection.write_from(room.file.fd, part_format.PAGE + part.bytes, room.tail)
            began, sent = time.monotonic(), 0
            deadline = began + agent_messages.TIMEOUT_S + 2 * part.bytes / SLOWEST
            for item in room.index:
                for place, nbytes in item.blocks():
                    connection.write_from(room.file.fd, part_format.PAGE + place, nbytes)
                    sent += nbytes
                    now = time.monotonic()
                    if now > deadline:
                        raise Refused(f"it took longer than {deadline - began:.0f} s")
                    if (early := began + sent / speed - now) > 0:
                        time.sleep(early)
            _expect(connection, "held")
            over = True
        finally:
            if over:
                with self._lock:
                    self._idle[address].append(connection)
            else:
                connection.close()

    def close(self) -> None:
        with self._lock:
            for connection in (each for idle in self._idle.values() for each in idle):
                connection.close()
            self._idle.clear()


def _expect(connection: agent_messages.Connection, word: str) -> None:
    while "soon" in (reply := connection.receive()):
        pass  # the peer is allocating memory
    if word not in reply:
        raise Refused(str(reply.get("problem", reply))[:500])
