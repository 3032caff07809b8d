"""Manages the shared-memory buffers ("rooms") of one agent, each of which holds one part of a snapshot.

The newest complete snapshot is always kept, and memory holds at most two snapshots. Rooms are reused, because memory that has
been touched causes no page faults. Parts of another run, of an earlier generation, or from processes that have ended are refused.
A room is allocated outside the lock, because allocation takes a third of a second per GiB. A tenth of the machine's memory always
stays free, because a worker without snapshots is better than one that is OOM-killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from outlast.base import machine_memory
from outlast.base.errors import OutlastError
from outlast.storage.snapshots import budget, part_format
from outlast.storage.snapshots.part_format import Damaged, Item, Part

At = tuple[int, int]
"""(generation, step) of a snapshot; (0, 0) sorts before all snapshots."""
_WASTE = 1.1
"""A room is reused for a part only if it is at most this many times as large as the part. The value is arbitrary."""


@dataclass(frozen=True)
class View:
    """The facts about a room that `choose` needs."""

    id: int
    size: int
    at: At | None = None
    """None if the room is empty."""
    busy: bool = False
    replica: bool = False


@dataclass(frozen=True)
class Choice:
    """Where to put a part: the id of a room to `reuse`, or the ids of rooms to `drop` before allocating one, or a `problem`."""

    reuse: int | None = None
    drop: tuple[int, ...] = ()
    problem: str = ""


def free(room: View, at: At, complete: At) -> bool:
    """Return whether a room may be overwritten with a part of the snapshot `at`; `complete` is the newest complete snapshot."""
    return not room.busy and (room.at is None or (room.at < at and room.at != complete))


def surplus(rooms: Sequence[View], previous: At) -> list[int]:
    """Return the ids of rooms not used since the `previous` complete snapshot."""
    return [room.id for room in rooms if not room.busy and room.at is not None and room.at < previous]


def choose(rooms: Sequence[View], size: int, budget: int, at: At, complete: At, *, replica: bool = False) -> Choice:
    """Choose a room for a part of `size` bytes.

    Replicas leave enough memory for two snapshots of this worker. A part of this worker may replace replicas that nobody uses.
    """
    idle = [room for room in rooms if free(room, at, complete)]
    retained = [room for room in rooms if room not in idle]
    used, total = (sum(room.size for room in some) for some in (retained, rooms))
    replicas = sum(room.size for room in retained if room.replica)
    if replica and size + replicas > budget - max(2 * _newest_own(rooms), used - replicas):
        return Choice(problem=_problem(size, used, budget))
    tight = [room for room in idle if size <= room.size <= size * _WASTE]
    if tight:
        return Choice(reuse=min(tight, key=lambda room: room.size).id)
    drop = []
    others = [] if replica else [room for room in retained if room.replica and not room.busy]
    for room in sorted(idle, key=lambda room: -room.size) + sorted(others, key=lambda room: -room.size):
        if total + size <= budget:
            break
        drop.append(room.id)
        total -= room.size
    return Choice(drop=tuple(drop)) if total + size <= budget else Choice(problem=_problem(size, used, budget))


def _newest_own(rooms: Sequence[View]) -> int:
    own = [room for room in rooms if not room.replica and room.at is not None]
    newest = max((room.at for room in own if room.at is not None), default=None)
    return sum(room.size for room in own if room.at == newest)


def _problem(size: int, used: int, budget: int) -> str:
    full = f"{_megabytes(used)} of the {_megabytes(budget)} for snapshots in the memory of this worker are in use"
    return f"{full}, {_megabytes(size)} more are needed; raise checkpoint.memory, or lower checkpoint.replicas"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


_STALE_S = 20.0
"""Maximum time that an allocation waits for dropped rooms that are still in use, in seconds."""


class Refused(OutlastError):
    """A part is rejected, because it is out of date or memory is short."""


@dataclasses.dataclass(eq=False)
class Room:
    """A buffer for one part."""

    id: int
    size: int
    at: At
    replica: bool
    file: File = dataclasses.field(init=False)
    users: int = 1
    """Number of readers and writers, plus one while the room is lent to a rank."""
    part: Part | None = None
    tail: int = 0
    index: Sequence[Item] = ()
    stale: bool = False
    """True if the room was dropped while in use; its last user then clears it."""

    @property
    def view(self) -> View:
        at = self.at if self.part or self.users else None
        return View(self.id, self.size, at, bool(self.users), self.replica)

    def clear(self) -> None:
        self.part, self.stale = None, False
        self.file.clear()


class Rooms:
    """All rooms of one agent. Thread-safe."""

    def __init__(self, run: str, budget: int, headroom: Callable[[], int]) -> None:
        self.run, self.budget, self.headroom = run, budget, headroom
        self._rooms: dict[int, Room] = {}
        self._lock = threading.Condition()
        self._next = 0
        self._complete: At = (0, 0)
        self._previous: At = (0, 0)
        self._generation = 0
        self._session, self._over = "", set[str]()
        self._allocating = 0
        """Bytes being allocated, which the kernel does not yet count as used."""
        self._closed = False

    def admit(self, run: str, at: At, complete: At, session: str = "", *, own: bool = True) -> None:
        """Check that a part of the snapshot `at` is up to date, and record its generation and the newest complete snapshot.

        Another worker's part (`own` is False) must be of the same session as this worker's parts. Raises Refused.
        """
        if run != self.run:
            raise Refused(f"this worker trains run {self.run}, not {run}")
        with self._lock:
            if at[0] < self._generation:
                raise Refused(f"generation {at[0]} is over: generation {self._generation} trains here now")
            if session in self._over or not (own or self._session in ("", session)):
                raise Refused(f"step {at[1]} of generation {at[0]} is of processes that have ended")
            if own and session != self._session:
                self._end_session()
                self._session = session
            self._generation = at[0]
            unused: list[Room] = []
            if complete > self._complete:
                self._previous, self._complete = self._complete, complete
                unused = [self._rooms.pop(id) for id in surplus([room.view for room in self._rooms.values()], self._previous)]
        _free(unused)

    def _end_session(self) -> None:
        self._over |= {self._session} - {""}
        self._session = ""

    def take(self, size: int, at: At, *, replica: bool = False, alive: Callable[[], None] = lambda: None) -> Room:
        """Reserve a room for a part of `size` bytes. The caller must `release` or `hold` it. Raises Refused.

        `alive` is called about once a second during allocation, and may cancel it by raising an exception.
        """
        with self._lock:
            choice = self._choose(size, at, replica)
            while choice.problem and not replica and any(room.stale for room in self._rooms.values()):
                if not self._lock.wait(_STALE_S):
                    break
                choice = self._choose(size, at, replica)
            if choice.problem or self._closed:
                raise Refused(choice.problem or "this worker is ending")
            dropped = [self._rooms.pop(id) for id in choice.drop]
            if choice.reuse is None:
                self._next += 1
                self._rooms[self._next] = Room(self._next, size, at, replica)
            room = self._rooms[choice.reuse or self._next]
            room.part, room.at, room.replica, room.users = None, at, replica, 1
        _free(dropped)
        if choice.reuse is None:
            self._allocate(room, alive)
        room.file.clear()
        return room

    def _allocate(self, room: Room, alive: Callable[[], None]) -> None:
        with self._lock:
            self._allocating += room.size
            headroom = max(0, self.headroom() + room.size - self._allocating)
        try:
            if room.size > headroom:
                short = f"{room.size / 1e6:.1f} MB are needed for snapshots, and {headroom / 1e6:.1f} MB can be taken"
                raise Refused(f"{short}, if a tenth of the memory is to stay free; lower checkpoint.memory or use less elsewhere")
            room.file = File(room.size, alive)
        except BaseException as error:
            with self._lock:
                del self._rooms[room.id]
            if isinstance(error, OSError):
                raise Refused(f"{room.size / 1e6:.1f} MB for snapshots cannot be allocated: {error.strerror}") from error
            raise
        finally:
            with self._lock:
                self._allocating -= room.size

    def _choose(self, size: int, at: At, replica: bool) -> Choice:
        rooms = [room.view for room in self._rooms.values()]
        return choose(rooms, size, self.budget, at, self._complete, replica=replica)

    def use(self, room: Room, at: At) -> None:
        """Mark a lent room as being written by its rank. The caller must later `hold` or `release` it once more."""
        with self._lock:
            room.part, room.at, room.users = None, at, room.users + 1

    def hold(self, room: Room, part: Part, index: Sequence[Item], tail: bytes) -> None:
        """Write the part's tail and header, so that the part can be opened. Raises Refused if the room has been dropped."""
        if not room.stale:
            room.file.finish(part, tail)
        with self._lock:
            if room.stale:
                raise Refused(f"{part} was given up: training goes on from another snapshot")
            room.part, room.index, room.tail, room.users = part, index, len(tail), room.users - 1

    def release(self, room: Room) -> None:
        with self._lock:
            room.users -= 1
            if room.stale and not room.users:
                room.clear()
                self._lock.notify_all()

    def give_back(self, rooms: Iterable[Room], complete: At) -> None:
        """Take rooms back from a rank, and free all idle memory except the newest complete snapshot's."""
        for room in rooms:
            self.release(room)
        with self._lock:
            self._complete = max(self._complete, complete)
            unused = [id for id, each in self._rooms.items() if not each.users and not (each.part and each.at == self._complete)]
            dropped = [self._rooms.pop(id) for id in unused]
        _free(dropped)

    def parts(self) -> list[Part]:
        """Return all valid parts."""
        with self._lock:
            return [room.part for room in self._rooms.values() if room.part and not room.stale and not room.file.torn]

    def ids(self) -> list[int]:
        with self._lock:
            return list(self._rooms)

    def busy(self) -> list[int]:
        with self._lock:
            return [room.id for room in self._rooms.values() if room.users]

    def open(self, part: Part) -> Room:
        """Return the room that holds a part. The caller must `release` the room. Raises Damaged if the part is gone."""
        with self._lock:
            for room in self._rooms.values():
                if room.part and room.part.name == part.name and not room.stale:
                    room.users += 1
                    return room
        raise Damaged(f"{part} is not in the memory of this worker any more")

    @contextlib.contextmanager
    def opened(self, part: Part) -> Iterator[Room]:
        """Open a part like `open`, and release its room at the end of the `with` block."""
        room = self.open(part)
        try:
            yield room
        finally:
            self.release(room)

    def forget(self, keep: At | None) -> None:
        """Drop all parts except those of the snapshot `keep`, which becomes the newest complete snapshot."""
        with self._lock:
            self._end_session()
            self._previous = self._complete = keep or (0, 0)
            for room in self._rooms.values():
                if room.at != keep:
                    room.stale = bool(room.users)
                    if room.part and not room.users:
                        room.clear()

    def close(self) -> None:
        """Free all idle rooms. Rooms in use are freed when the process ends."""
        with self._lock:
            self._closed = True
            dropped = [self._rooms.pop(id) for id in [id for id, room in self._rooms.items() if not room.users]]
        _free(dropped)


def _free(rooms: Iterable[Room]) -> None:
    """Free the memory of rooms. This is slow: never call it while holding the lock."""
    for room in rooms:
        room.file.close()


# ---- memory


class Machine(machine_memory.Machine):
    """The machine's memory, with a budget for snapshots."""

    def budget(self, requested: budget.Requested, workers: int) -> budget.Budget:
        """Return one worker's memory budget, if `workers` workers share this machine."""
        machine = self.machine()
        total, free = machine.get("MemTotal", 0), machine.get("MemAvailable", 0)
        shared = total // workers, max(0, total // workers - free // workers)
        limit, used = min([*self.groups(), shared])
        return budget.budget(requested, limit, used, free // workers)


_PIECE = 4 << 30
"""Number of bytes allocated at a time, which takes about a second."""


class File:
    """An in-memory file for one part: a header page, `size` bytes of data, and later a tail.

    The constructor allocates all pages, piece by piece, and calls `alive` between pieces. Raises OSError, and whatever `alive`
    raises.
    """

    def __init__(self, size: int, alive: Callable[[], None] = lambda: None) -> None:
        self.size = size
        self.fd = os.memfd_create("outlast-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            end = part_format.PAGE + size
            os.posix_fallocate(self.fd, 0, min(_PIECE, end))
            for at in range(_PIECE, end, _PIECE):
                alive()
                os.posix_fallocate(self.fd, at, min(_PIECE, end - at))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # so that processes that map it get no SIGBUS
            self._whole = memoryview(mmap.mmap(self.fd, end))
            self.data = self._whole[part_format.PAGE :]
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def torn(self) -> bool:
        """True if the file holds no part, or a rank has begun to overwrite it."""
        return not self._whole[0]

    def clear(self) -> None:
        os.pwrite(self.fd, bytes(part_format.PAGE), 0)

    def finish(self, part: Part, tail: bytes) -> None:
        """Write the tail and then the header, which makes the part valid."""
        _write(self.fd, tail, part_format.PAGE + part.bytes)
        _write(self.fd, part_format.header(part, len(tail)), 0)

    def close(self) -> None:
        """Close the file. The kernel frees its memory once no process maps it."""
        self.data.release()
        self._whole.release()
        os.close(self.fd)


def _write(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        rest, at = rest[written:], at + written
