"""Writes a rank's parts of snapshots into the agent's shared memory, and reads parts from this worker and others.

    client = connect(os.environ)                                        None if snapshots are off
    room = client.room(nbytes, at, complete)                            a buffer ("room") of the agent, mapped into this process
    client.spare([nbytes], complete)                                    whether `room` would return without asking the agent
    room.view[place : place + n] = ...
    client.publish(room, part, index, to=addresses, complete=at)        returns at once
    client.poll()                                                       {("unique", 120): "held"}

    for part in client.catalog():
        with client.open(part) as source:
            source.fetch([(i, memory) for i, item in enumerate(source.index)])

Only one thread at a time may use a client, but `poll` and `spare`, which do not block, are safe to call from any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from outlast.base import crc32, unix_sockets
from outlast.base.errors import NotRestored, OutlastError, StoreError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.storage.snapshots import agent_messages, part_format
from outlast.storage.snapshots.part_format import Damaged, Item, OutOfReach, Part

_REPLY_S = 60
"""Timeout for replies from this worker's agent, in seconds. The value is arbitrary."""
_STATES = 16
_BATCH = 1024


class NoMemory(OutlastError):
    """The agent has no memory for a part."""


class Where(NamedTuple):
    """A worker's location. Its fields are empty if unknown."""

    node: str
    zone: str


@dataclasses.dataclass(frozen=True)
class Room:
    """A buffer in the agent's memory, mapped into this process, with every page already faulted in."""

    id: int
    view: memoryview
    whole: memoryview
    """The whole mapping. It is aligned to pages, and stays the same each time the room is reused."""


@dataclasses.dataclass
class _Lent:
    mapped: mmap.mmap
    size: int
    place: int
    """Index, in the sizes passed to `reserve`, of the part that the buffer is for."""
    at: tuple[int, int] | None = None


_open: weakref.WeakSet[Client] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close the clients in a forked process, such as a data loader's worker, so that the agent notices when the rank dies."""
    for client in list(_open):
        client.close()


os.register_at_fork(after_in_child=_close_in_fork)


class Client:
    """One rank's connection to its agent."""

    def __init__(self, connection: agent_messages.Connection) -> None:
        """Read the agent's first message. Raises OSError, ValueError."""
        self._connection = connection
        self._using = threading.Lock()
        self._states: dict[tuple[str, int], str] = {}
        self._lent: dict[int, _Lent] = {}
        self._digests: dict[str, tuple[int, str]] = {}
        self._indices: dict[tuple[str, int], Sequence[Item]] = {}
        hello = connection.receive()["hello"]
        self.address: str = hello["address"]
        """Address of the agent's data port; empty if it has none."""
        self.where = Where(hello["node"], hello["zone"])
        self._key = bytes.fromhex(hello["key"])
        self._store = bool(hello.get("store"))
        """False for older agents, which cannot query the store."""
        _open.add(self)

    def room(self, nbytes: int, at: tuple[int, int], complete: tuple[int, int] = (0, 0)) -> Room:
        return self.rooms([nbytes], at, complete)[0]

    def rooms(self, sizes: Sequence[int], at: tuple[int, int], complete: tuple[int, int] = (0, 0)) -> list[Room]:
        """Return memory for the parts of the snapshot `at`, given as (generation, step). Raises NoMemory.

        `sizes` are in bytes. Parts older than `complete`, the newest complete snapshot, may be overwritten. Blocks while the
        agent allocates memory, which is not necessary if `spare` returns True.
        """
        self.reserve(sizes, at, complete)
        rooms = []
        for id, nbytes in zip(self._fitting(sizes, complete, at), sizes, strict=True):
            lent = self._lent[id]
            lent.at, whole = at, memoryview(lent.mapped)
            whole[: part_format.PAGE] = bytes(part_format.PAGE)  # invalidates the part that the memory held
            rooms.append(Room(id, whole[part_format.PAGE : part_format.PAGE + nbytes], whole))
        return rooms

    def reserve(self, sizes: Sequence[int], at: tuple[int, int], complete: tuple[int, int] = (0, 0), session: str = "") -> None:
        """Have the agent allocate the memory that `rooms` will need. For 100 GB, this takes half a minute. Raises NoMemory."""
        fitting = self._fitting(sizes, complete, at)
        if 0 not in fitting:
            return
        self.give_back(complete, [id for id, lent in self._lent.items() if lent.at not in (complete, at) and id not in fitting])
        try:
            for place in (place for place, id in enumerate(fitting) if not id):
                with self._without_timeout():
                    reply = self._request({"room": sizes[place], "at": at, "complete": complete, "session": session})
                fd = self._connection.descriptor()
                try:
                    mapped = mmap.mmap(fd, part_format.PAGE + reply["size"], mmap.MAP_SHARED | mmap.MAP_POPULATE)
                finally:
                    os.close(fd)
                self._lent[reply["room"]] = _Lent(mapped, reply["size"], place)
        except OutlastError as problem:
            raise NoMemory(str(problem)) from problem
        except (OSError, ValueError) as error:
            raise NoMemory(f"the agent gives no memory: {error}") from error

    def spare(self, sizes: Sequence[int], complete: tuple[int, int]) -> bool:
        """Return whether `rooms` already has memory for parts of these sizes. Does not block."""
        return 0 not in self._fitting(sizes, complete)

    def _fitting(self, sizes: Sequence[int], *used: tuple[int, int]) -> list[int]:
        """Return for each part the id of its smallest room that is large enough and holds none of the snapshots `used`, or 0."""
        free = sorted((lent.size, id, lent.place) for id, lent in list(self._lent.items()) if lent.at not in used)
        return [next((id for size, id, own in free if own == place and size >= nbytes), 0) for place, nbytes in enumerate(sizes)]

    def give_back(self, complete: tuple[int, int], ids: Sequence[int] | None = None) -> None:
        """Give lent memory, by default all of it, back to the agent, which keeps the snapshot `complete` and frees the rest."""
        ids = list(self._lent) if ids is None else ids
        for id in ids:
            del self._lent[id]
        if ids:
            with self._using, contextlib.suppress(OSError):
                self._connection.send({"give": ids, "complete": complete})

    def publish(
        self, room: Room, part: Part, index: Sequence[Item], *, to: Sequence[str] = (), complete: tuple[int, int] = (0, 0)
    ) -> None:
        """Publish a written part. The agent sends replicas of it to the agents at `to`. `poll` returns the progress."""
        self._states[part.kind, part.step] = ""
        for old in list(self._states)[:-_STATES]:
            del self._states[old]
        key = part.kind, part.local_rank
        previous, self._indices[key] = self._indices.get(key), index
        rows = None if previous == index else part_format.rows(index)
        message = {"publish": room.id, "part": part.json(), "index": rows, "to": list(to), "complete": complete}
        if room.id in self._lent:
            self._lent[room.id].at = part.at
        try:
            with self._using:
                self._connection.send(message)
        except OSError as error:
            self._states[part.kind, part.step] = f"{part} cannot be kept: the agent is gone ({error})"

    def poll(self) -> Mapping[tuple[str, int], str]:
        """Return the states of the latest published parts, keyed by (kind, step). Does not block.

        A state is empty while the agent computes checksums, then `held`, `replicated`, or `held; ` followed by the reasons why
        replicas failed. Any other state says why the agent does not hold the part.
        """
        if self._using.acquire(blocking=False):
            try:
                while self._connection.waiting():
                    self._on_event(self._connection.receive())
            except (OSError, ValueError) as error:
                for each, state in self._states.items():
                    if state in ("", "held"):
                        self._states[each] = f"the agent is gone ({error})"
            finally:
                self._using.release()
        return dict(self._states)

    def digest(self, kind: str, step: int) -> str:
        """Return the digest of a published part; empty if it is unknown."""
        held, digest = self._digests.get(kind, (0, ""))
        return digest if held == step else ""

    def catalog(self) -> list[Part]:
        """Return the parts in this worker's memory. Raises Damaged, OutOfReach."""
        with _reading("the agent does not answer"):
            return part_format.catalog(self._request({"catalog": True})["parts"])

    def open(self, part: Part, address: str | None = None) -> Source:
        """Open a part for reading, from this worker's agent or from the agent at `address`. Raises Damaged, OutOfReach."""
        if address is not None and address != self.address:
            with _reading(f"{part} is out of reach: {address}"):
                return Source(_Peer(address, self._key, part), part)
        with _reading("the agent does not answer"):
            id = self._request({"open": part.json()})["open"]
            return Source(_Local(self._connection.descriptor(), lambda: self._connection.send({"close": id})), part)

    def forget(self, keep: tuple[int, int] | None = None) -> None:
        """Delete all parts in this worker's memory, except those of the snapshot `keep`."""
        with contextlib.suppress(OSError, ValueError):
            self._request({"forget": keep})

    def newest(self) -> tuple[int, int] | None:
        """Return (generation, step) of the newest checkpoint in the store, or None. Raises StoreError, also after a timeout."""
        at = self._stored({"newest": True})["newest"] if self._store else None
        return at and (int(at[0]), int(at[1]))

    def restore(self) -> None:
        """Have the agent download the store's newest checkpoint, and wait until it is done. Raises StoreError."""
        self._stored({"restore": True})

    def _stored(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._without_timeout():
                reply = self._exchange(message)
        except (OSError, ValueError) as error:
            raise StoreError(f"the newest checkpoint cannot be fetched: the agent is gone ({error})", retry=True) from error
        if "problem" in reply:
            raise StoreError(reply["problem"], retry=reply["retry"])
        return reply

    def close(self) -> None:
        """Close the connection. The agent takes back the lent rooms."""
        self._connection.close()

    @contextlib.contextmanager
    def _without_timeout(self) -> Iterator[None]:
        agent_messages.set_timeout(self._connection.sock, 0)
        try:
            yield
        finally:
            agent_messages.set_timeout(self._connection.sock, _REPLY_S)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._using:
            self._connection.send(message)
            while "event" in (reply := self._connection.receive()):
                self._on_event(reply)
        return reply

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = self._exchange(message)
        if "problem" in reply:
            raise OutlastError(str(reply["problem"]))
        return reply

    def _on_event(self, message: dict[str, Any]) -> None:
        kind, step, state = message["event"]
        if (kind, step) in self._states:
            self._states[kind, step] = state
            self._digests[kind] = step, str(message.get("digest", ""))


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (Damaged, OutOfReach):
        raise
    except OutlastError as problem:  # reported by the holder
        raise Damaged(str(problem)) from problem
    except OSError as error:
        raise OutOfReach(f"{what}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{what}: {error!r}") from error


def connect(environ: Mapping[str, str]) -> Client | None:
    """Return this process's client, or None if snapshots are off. Raises NotRestored if the agent does not respond."""
    path = Path(environ.get(Env.STATE, "/nonexistent")) / contract.SNAPSHOTS
    try:
        sock = unix_sockets.connect(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotRestored(f"the agent of this worker does not answer at {path}: {error}") from error
    connection = agent_messages.Connection(agent_messages.set_timeout(sock, _REPLY_S), longest=agent_messages.INDEX)
    try:
        client = Client(connection)
        if client._store and environ.get("RANK", "0") == "0":  # prefetch: rank 0 requests the newest checkpoint when it resumes
            connection.send({"look": True})
        return client
    except (OSError, ValueError, KeyError, TypeError) as error:
        connection.close()
        raise NotRestored(f"the agent of this worker does not answer at {path}: {error!r}") from error


class Source:
    """A part that is open for reading."""

    def __init__(self, reader: _Local | _Peer, part: Part) -> None:
        """Read the part's index. Raises Damaged if the index is damaged or belongs to another part; also OSError and
        ValueError."""
        self._reader = reader
        try:
            self.part, self.tail = reader.described()
            if self.part.name != part.name or self.part.bytes != part.bytes:
                raise Damaged(f"{part} was announced, and {self.part} is there")
            self.index, self._crcs = part_format.read_tail(self.part, self.tail)
        except BaseException:
            reader.close()
            raise

    def fetch(self, items: Iterable[tuple[int, memoryview]]) -> None:
        """Read items, each given as its number in the index and memory of the item's size. Raises Damaged, OutOfReach."""
        blocks = []
        for i, into in items:
            item, memory = self.index[i], into.cast("B")
            if memory.nbytes != item.nbytes:
                raise ValueError(f"{item.key} has {item.nbytes} bytes, the memory for it {memory.nbytes}")
            for (place, nbytes), crc in zip(item.blocks(), self._crcs[i], strict=True):
                start = place - item.place
                blocks.append(_Block(place, memory[start : start + nbytes], crc, item.key))
        with _reading(f"{self.part} cannot be read"):
            self._reader.fetch(blocks)

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Block(NamedTuple):
    place: int
    into: memoryview
    crc: int
    key: str

    def verify(self, crc: int | None = None) -> None:
        """Raise Damaged if the checksum is wrong. Pass `crc` if the checksum of `into` is already known."""
        if (crc32.update(self.into) if crc is None else crc) != self.crc:
            raise Damaged(f"{self.key:.80} has a wrong checksum in a snapshot")


class _Local:
    """Reads parts from the memory of this worker's agent, with several threads, because checksums take most of the time."""

    def __init__(self, fd: int, closed: Any) -> None:
        self._fd, self._closed = fd, closed
        self._over = False

    def described(self) -> tuple[Part, bytes]:
        part, length = part_format.read_header(os.pread(self._fd, part_format.PAGE, 0))
        tail = bytearray(length)
        self._read(memoryview(tail), part_format.PAGE + part.bytes)
        return part, bytes(tail)

    def fetch(self, blocks: Sequence[_Block]) -> None:
        def read(block: _Block) -> None:
            at = part_format.PAGE + block.place
            block.verify(part_format.filled(block.into, lambda offset, piece: self._read(piece, at + offset)))

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 4), "outlast-snapshots-read") as pool:
            list(pool.map(read, blocks))

    def _read(self, into: memoryview, at: int) -> None:
        while into:
            count = os.preadv(self._fd, [into], at)
            if not count:
                raise Damaged("a part of a snapshot is shorter than it should be")
            into, at = into[count:], at + count

    def close(self) -> None:
        if self._over:  # the descriptor's number may belong to another file
            return
        self._over = True
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self._closed()


class _Peer:
    """Reads another worker's memory through its agent, and verifies checksums in a second thread."""

    def __init__(self, address: str, key: bytes, part: Part) -> None:
        self._connection, self._part = agent_messages.connect(address, key), part

    def described(self) -> tuple[Part, bytes]:
        self._connection.send({"open": self._part.json()})
        reply = self._connection.receive()
        if "problem" in reply:
            raise Damaged(str(reply["problem"])[:500])
        part, length = part_format.described(reply)
        tail = bytearray(length)
        self._connection.read_into(memoryview(tail))
        return part, bytes(tail)

    def fetch(self, blocks: Sequence[_Block]) -> None:
        rest = iter(blocks)
        with ThreadPoolExecutor(1, "outlast-snapshots-check") as pool:
            checks = []
            while batch := list(itertools.islice(rest, _BATCH)):
                self._connection.send({"items": [[block.place, len(block.into)] for block in batch]})
                for block in batch:
                    self._connection.read_into(block.into)
                    checks.append(pool.submit(block.verify))
        for check in checks:
            check.result()

    def close(self) -> None:
        self._connection.close()
