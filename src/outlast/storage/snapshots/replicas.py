"""Sends parts to the agents of other workers, slowly enough not to disturb training. Which workers: `peers`."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

from outlast.base.errors import OutlastError
from outlast.storage.snapshots import parts, wire
from outlast.storage.snapshots.parts import Part
from outlast.storage.snapshots.rooms import Refused, Room, Rooms

SLOWEST = 50e6
"""Bytes per second; slower would make snapshots rare."""
_FIRST = 200e6
"""Of the first part, when the interval of snapshots is not known yet. Arbitrary."""


def rate(nbytes: int, interval_s: float | None) -> float:
    """Bytes per second at which a part takes a quarter of the interval of snapshots.

    Not half: the next snapshot waits for the replicas of this one. If that makes the interval two steps long, replicas are there
    after the first of them, and the next interval is one step.
    """
    return _FIRST if interval_s is None else max(SLOWEST, 4 * nbytes / max(interval_s, 1e-3))


class Sender:
    """Sends replicas."""

    def __init__(self, rooms: Rooms, key: bytes) -> None:
        self._rooms, self._key = rooms, key
        self._lock = threading.Lock()
        self._began: dict[tuple[object, ...], float] = {}
        """When the last part of a rank and kind was sent."""
        self._idle: dict[str, list[wire.Connection]] = collections.defaultdict(list)
        """Connections to agents that are used again: to make one takes both sides longer than to send a small part."""

    def send(self, part: Part, to: Sequence[str], complete: tuple[int, int]) -> list[str]:
        """Send a part to agents, one after another. Returns what went wrong, a sentence for each."""
        now = time.monotonic()
        with self._lock:
            before = self._began.get((part.kind, part.rank))
            self._began[part.kind, part.rank] = now
        speed = rate(part.bytes * len(to), None if before is None else now - before)
        problems = []
        for address in to:
            try:
                with self._rooms.opened(part) as room:
                    self._put(part, room, address, complete, speed)
            except (OSError, ValueError, OutlastError) as error:
                problems.append(f"no replica of {part} at {address}: {error}")
        return problems

    def _connected(self, address: str) -> wire.Connection:
        """A connection to an agent. Raises OSError, ValueError."""
        while True:
            with self._lock:
                idle = self._idle[address].pop() if self._idle[address] else None
            if idle is None:
                return wire.connect(address, self._key)
            if not idle.waiting():  # else the other side has hung up
                return idle
            idle.close()

    def _put(self, part: Part, room: Room, address: str, complete: tuple[int, int], speed: float) -> None:
        connection, over = self._connected(address), False
        try:
            connection.send({"put": part.json(), "tail": room.tail, "complete": complete})
            _expect(connection, "go")
            connection.write_from(room.file.fd, parts.PAGE + part.bytes, room.tail)
            began, sent = time.monotonic(), 0
            deadline = began + wire.TIMEOUT_S + 2 * part.bytes / SLOWEST
            for item in room.index:
                for place, nbytes in item.blocks():
                    connection.write_from(room.file.fd, parts.PAGE + place, nbytes)
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
        """Hang up."""
        with self._lock:
            for connection in (each for idle in self._idle.values() for each in idle):
                connection.close()
            self._idle.clear()


def _expect(connection: wire.Connection, word: str) -> None:
    while "soon" in (said := connection.receive()):
        pass  # it allocates memory
    if word not in said:
        raise Refused(str(said.get("problem", said))[:500])
