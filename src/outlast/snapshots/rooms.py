"""The rooms of one agent: files in memory, which parts they hold, who uses them. Threads of `server` and `port` share it.

`pool` decides which room a part gets. Here are also the fences: nothing of another run or of an earlier generation comes in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

from outlast.errors import OutlastError
from outlast.snapshots import memory, pool
from outlast.snapshots.parts import Damaged, Item, Part

_STALE_S = 20.0
"""How long a part waits for memory that was given up but is still in use; less than ranks wait for the agent."""


class Refused(OutlastError):
    """There is no room for a part, or it may not come in."""


@dataclasses.dataclass(eq=False)
class Room:
    """One file in memory."""

    id: int
    file: memory.File
    at: pool.At
    replica: bool
    users: int = 1
    """Who writes or reads it now."""
    part: Part | None = None
    """What it holds, once its header is written."""
    tail: int = 0
    """Bytes of the tail of that part."""
    index: Sequence[Item] = ()
    stale: bool = False
    """Given up while somebody used it: free from then on."""

    def seen(self) -> pool.Room:
        """As `pool` sees it."""
        at = self.at if self.part or self.users else None
        return pool.Room(self.id, self.file.size, at, bool(self.users), self.replica)

    def clear(self) -> None:
        """It holds nothing any more."""
        self.part, self.stale = None, False
        self.file.clear()


class Rooms:
    """All rooms of an agent."""

    def __init__(self, run: str, budget: int, headroom: Callable[[], int]) -> None:
        self.run, self.budget, self.headroom = run, budget, headroom
        self._rooms: dict[int, Room] = {}
        self._lock = threading.Condition()
        self._next = 0
        self._complete: pool.At = (0, 0)
        self._before: pool.At = (0, 0)
        """The complete snapshot before that."""
        self._generation = 0

    def admit(self, run: str, at: pool.At, complete: pool.At) -> None:
        """Note which generation trains and which snapshot is complete. Raises Refused for anything out of date."""
        if run != self.run:
            raise Refused(f"this worker trains run {self.run}, not {run}")
        with self._lock:
            if at[0] < self._generation:
                raise Refused(f"generation {at[0]} is over: generation {self._generation} trains here now")
            self._generation = at[0]
            if complete > self._complete:
                self._before, self._complete = self._complete, complete

    def take(self, size: int, at: pool.At, *, replica: bool = False) -> Room:
        """A room for a part of so many bytes; `release` or `hold` it. Raises Refused."""
        with self._lock:
            for id in pool.surplus([room.seen() for room in self._rooms.values()], self._before):
                self._rooms.pop(id).file.close()
            choice = self._choose(size, at, replica)
            while choice.problem and not replica and self._stale() and self._lock.wait(_STALE_S):
                choice = self._choose(size, at, replica)
            if choice.problem:
                raise Refused(choice.problem)
            for id in choice.drop:
                self._rooms.pop(id).file.close()
            if choice.reuse is not None:
                room = self._rooms[choice.reuse]
                room.part, room.at, room.replica, room.users = None, at, replica, 1
                room.file.clear()
                return room
            if size > (headroom := self.headroom()):
                short = f"{size / 1e6:.1f} MB are needed for snapshots, and {headroom / 1e6:.1f} MB can be taken"
                raise Refused(f"{short}, if a tenth of the memory is to stay free; lower checkpoint.memory or use less elsewhere")
            try:
                file = memory.File(size)
            except OSError as error:
                raise Refused(f"{size / 1e6:.1f} MB for snapshots cannot be had: {error.strerror}") from error
            self._next += 1
            room = self._rooms[self._next] = Room(self._next, file, at, replica)
            return room

    def _choose(self, size: int, at: pool.At, replica: bool) -> pool.Choice:
        rooms = [room.seen() for room in self._rooms.values()]
        return pool.choose(rooms, size, self.budget, at, self._complete, replica=replica)

    def _stale(self) -> bool:
        return any(room.stale for room in self._rooms.values())

    def hold(self, room: Room, part: Part, index: Sequence[Item], tail: bytes) -> None:
        """Write tail and header; the part can be opened from now on. Raises Refused if it has been given up meanwhile."""
        if not room.stale:
            room.file.finish(part, tail)
        with self._lock:
            if room.stale:
                raise Refused(f"{part} was given up: training goes on from another snapshot")
            room.part, room.index, room.tail, room.users = part, index, len(tail), room.users - 1

    def release(self, room: Room) -> None:
        """Somebody no longer uses a room."""
        with self._lock:
            room.users -= 1
            if room.stale and not room.users:
                room.clear()
                self._lock.notify_all()

    def parts(self) -> list[Part]:
        """The parts that can be opened here."""
        with self._lock:
            return [room.part for room in self._rooms.values() if room.part and not room.stale]

    def ids(self) -> list[int]:
        """All rooms."""
        with self._lock:
            return list(self._rooms)

    def busy(self) -> list[int]:
        """The rooms that somebody uses."""
        with self._lock:
            return [room.id for room in self._rooms.values() if room.users]

    def open(self, part: Part) -> Room:
        """The room that holds a part; `release` it. Raises Damaged."""
        with self._lock:
            for room in self._rooms.values():
                if room.part and room.part.name == part.name and not room.stale:
                    room.users += 1
                    return room
        raise Damaged(f"{part} is not in the memory of this worker any more")

    @contextlib.contextmanager
    def opened(self, part: Part) -> Iterator[Room]:
        """`open`, and `release` at the end."""
        room = self.open(part)
        try:
            yield room
        finally:
            self.release(room)

    def forget(self, keep: pool.At | None) -> None:
        """Give up all parts but those of the snapshot `keep`, from which training goes on: it is the newest complete one now."""
        with self._lock:
            self._before = self._complete = keep or (0, 0)
            for room in self._rooms.values():
                if room.at != keep:
                    room.stale = bool(room.users)
                    if room.part and not room.users:
                        room.clear()

    def close(self) -> None:
        """Free what nobody uses; the rest is freed with the process."""
        with self._lock:
            for id in [id for id, room in self._rooms.items() if not room.users]:
                self._rooms.pop(id).file.close()
