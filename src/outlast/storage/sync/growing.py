"""Files that only grow, in a store: logs, the ledger, metrics. A push adds what is new as an object that is never written again.

    logs/worker-0.log                                              here
    logs/worker-0.parts/00000000-0-8c736521.log                    there, one a push: number, first byte in the file, crc32
    logs/worker-0.parts/00000001-5242880-11cdfc7b.log

Nothing in the store is ever replaced. When a file was truncated (`metrics.jsonl`, when a run resumes from an earlier step), the
next part begins before the end of the last one: the file is its parts, written in order (`as_file`). Logs and ledgers are never
truncated, so the store has what a machine has lost of them (`pieces`).

The parts are the only state: a sender continues behind the last part that it finds in the file. `agent.upload` sends,
`ownership` and `stored` fetch, the command line reads. Docs: docs/decisions/0019-growing-files.md.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from outlast.base import crc32
from outlast.base.errors import Denied, NoBucket, Stopped, StoreError, Unreachable
from outlast.job import contract
from outlast.storage.store import Store
from outlast.storage.sync import tree

T = TypeVar("T")

PART = 8 << 20
"""Bytes of the largest part: one request, and small enough to be held."""
_AT_ONCE = 8
"""Concurrent uploads of parts."""
_PIECE = 1 << 20
"""Bytes of a part read at a time by `pieces`."""
AHEAD = 32
_HELD = 64 << 20
_HELD_READ = 8 << 20
"""Concurrent requests for parts, most of which are small, and bytes read ahead by a fetch and by a stream (there may be many)."""
_KNOWN = 16
"""Parts of a file that the sender remembers; if none of them is in the file, it lists them all."""
_NAME = re.compile(r"(\d{8,})-(\d+)-([0-9a-f]{8})")


class Part(NamedTuple):
    """An object with some bytes of a file."""

    key: str
    number: int
    start: int
    """Where in the file they begin."""
    size: int
    crc32: int

    @property
    def end(self) -> int:
        """Where in the file they end."""
        return self.start + self.size


def grows(path: str) -> bool:
    """Whether this path below the output of a job is such a file."""
    directory, _, name = path.rpartition("/")
    return path == contract.METRICS or (directory, os.path.splitext(name)[1]) in (
        (contract.LOGS, ".log"),
        (contract.LEDGER, ".jsonl"),
    )


def place(path: str) -> str:
    """What the keys of its parts begin with."""
    return f"{os.path.splitext(path)[0]}.parts"


def is_part(key: str) -> bool:
    """Whether an object is a part."""
    directory, _, name = key.rpartition("/")
    stem, ext = os.path.splitext(name)
    return directory.endswith(".parts") and _NAME.fullmatch(stem) is not None and grows(directory.removesuffix(".parts") + ext)


def files(store: Store) -> list[str]:
    """The growing files that have parts in a store."""
    found = set()
    for directory, ext in (("", os.path.splitext(contract.METRICS)[1]), (contract.LOGS, ".log"), (contract.LEDGER, ".jsonl")):
        for name in store.names(directory):
            path = f"{directory}/" * bool(directory) + name.removesuffix(".parts") + ext
            if name.endswith(".parts") and grows(path):
                found.add(path)
    return sorted(found)


def parts(store: Store, path: str) -> list[Part]:
    """The parts of a file, in the order in which they were written."""
    found = []
    for entry in store.entries(place(path)):
        stem, ext = os.path.splitext(entry.key.rpartition("/")[2])
        if (said := _NAME.fullmatch(stem)) and ext == os.path.splitext(path)[1]:
            found.append(Part(entry.key, int(said[1]), int(said[2]), entry.size, int(said[3], 16)))
    return sorted(found, key=lambda part: part[1:])


def as_file(found: Sequence[Part]) -> list[tuple[Part, int]]:
    """The parts that make the file, each with the offset where later parts replace it.

    Of two with one number, one is from a sender that was superseded meanwhile; the one that later parts continue counts.
    """
    made, limit = [], None
    for _, group in itertools.groupby(reversed(found), lambda part: part.number):
        same = list(group)
        part = next((each for each in same if each.end == limit), same[0])
        end = part.end if limit is None else min(part.end, limit)
        if part.start < end:
            made.append((part, end))
        limit = part.start if limit is None else min(limit, part.start)
    return made[::-1]


# Sending


class Sender:
    """Sends what files below `root` have grown by. Only one sender per directory at a time."""

    def __init__(self, store: Store, root: Path) -> None:
        self._store, self._root = store, root
        self._known: dict[str, list[Part]] = {}
        self._tried: dict[str, Part] = {}
        """Parts whose arrival is not certain. Sent again unchanged, they are stored once."""
        self.failed: list[tuple[str, str]] = []
        """Files that the last push could not read or send, and why."""

    def forget(self, path: str) -> None:
        """Forget the parts of a file, since another sender may have added some."""
        self._known.pop(path, None)

    def push(self, paths: Iterable[str], stop: threading.Event) -> int:
        """Send what is new in these files; returns the bytes sent. Raises Stopped, and errors that concern all files, such as
        Unreachable."""
        self.failed = []
        with ThreadPoolExecutor(_AT_ONCE, "outlast-growing") as pool:
            return sum(pool.map(lambda path: self._try(path, stop), paths))

    def _try(self, path: str, stop: threading.Event) -> int:
        if wrong := self._store.impossible(f"{place(path)}/{0:08d}-{0}-{0:08x}{os.path.splitext(path)[1]}"):
            spoken = path.encode(errors="backslashreplace").decode()
            self.failed.append((spoken, f"it cannot be the name of an object: {wrong}; rename it"))
            return 0
        try:
            return self._push(path, stop)
        except FileNotFoundError:
            return 0
        except (Stopped, NoBucket, Denied, Unreachable):  # so will the others be
            raise
        except StoreError as error:
            self.forget(path)
            self.failed.append((path, str(error)))
            return 0
        except OSError as error:
            self.failed.append((path, f"it cannot be read: {error.strerror}"))
            return 0

    def _push(self, path: str, stop: threading.Event) -> int:
        if path not in self._known:
            self._known[path] = parts(self._store, path)[-_KNOWN:]
        known, sent = self._known[path], 0
        with (self._root / path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            at = self._behind(file.fileno(), size, path)
            while at < size:
                if stop.is_set():
                    raise Stopped(f"pushing {path} was stopped")
                part, data = self._next(path, file.fileno(), at, min(PART, size - at))
                if not data:
                    break
                self._tried[path] = part
                self._store.put(part.key, data)
                del self._tried[path]
                known.append(part)
                del known[:-_KNOWN]
                at, sent = part.end, sent + part.size
        return sent

    def _next(self, path: str, file: int, start: int, size: int) -> tuple[Part, bytes]:
        number = max((part.number for part in self._known[path]), default=-1) + 1
        if tried := self._tried.get(path):
            data = os.pread(file, tried.size, tried.start)
            if tried.number == number and tried.start == start and crc32.update(data) == tried.crc32:
                return tried, data
            number = max(number, tried.number + 1)
        data = os.pread(file, size, start)
        crc = crc32.update(data)
        key = f"{place(path)}/{number:08d}-{start}-{crc:08x}{os.path.splitext(path)[1]}"
        return Part(key, number, start, len(data), crc), data

    def _behind(self, file: int, size: int, path: str) -> int:
        """The offset from which the store lacks the file: the end of the last part that matches it."""
        known = self._known[path]
        at = self._found(file, size, known)
        if at is None and len(known) == _KNOWN:
            at = self._found(file, size, parts(self._store, path))
        return at or 0

    def _found(self, file: int, size: int, known: Sequence[Part]) -> int | None:
        whole = (part for part, end in reversed(as_file(known)) if end == part.end <= size)
        return next((part.end for part in whole if self._same(file, part)), None)

    def _same(self, file: int, part: Part) -> bool:
        data = os.pread(file, part.size, part.start)
        return len(data) == part.size and crc32.update(data) == part.crc32


# Receiving


def fetch(store: Store, path: str, to: Path, stop: threading.Event | None = None) -> bool:
    """Fetch a file in one piece unless it exists here; returns whether it exists now."""
    made = as_file(parts(store, path))
    if to.exists() or not made:
        return to.exists()
    with tree.AtomicFile(str(to)) as partial, ThreadPoolExecutor(AHEAD, "outlast-growing") as pool:

        def bring(part: Part, start: int, end: int) -> None:
            if stop is not None and stop.is_set():
                raise Stopped(f"fetching {path} was stopped")
            tree.write(partial.fd, store.range(part.key, start - part.start, end - part.start), start)

        pieces = ((part, at, min(end, at + PART)) for part, end in made for at in range(part.start, end, PART))
        for _ in _ahead(pool, ((end - at, bring, (part, at, end)) for part, at, end in pieces), _HELD):
            pass
        partial.finish_unless_there()
    return True


def pieces(store: Store, path: str, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """The bytes of a file as a stream: of metrics as they are now, of logs and ledgers all that was ever pushed. Threads of
    `pool` read ahead."""
    found = parts(store, path)
    made = as_file(found) if path == contract.METRICS else [(part, part.end) for part in found]
    wanted = ((part, at, min(end - part.start, at + _PIECE)) for part, end in made for at in range(0, end - part.start, _PIECE))
    asked = ((end - start, store.range, (part.key, start, end)) for part, start, end in wanted)
    yield from map(bytes, _ahead(pool, asked, _HELD_READ))


def since(store: Store, path: str, start: int) -> bytes:
    """The bytes of a file from `start` on, as it is now; none beyond its end."""
    wanted = [(part, max(start, part.start), end) for part, end in as_file(parts(store, path)) if end > start]
    return b"".join(bytes(store.range(part.key, at - part.start, end - part.start)) for part, at, end in wanted)


def _ahead(pool: ThreadPoolExecutor, jobs: Iterable[tuple[int, Callable[..., T], tuple[Any, ...]]], most: int) -> Iterator[T]:
    """The results of jobs (bytes, function, arguments) in order, with at most so many bytes in flight or waiting."""
    coming: collections.deque[tuple[int, Future[T]]] = collections.deque()
    held = 0
    for size, do, arguments in jobs:
        while coming and (held + size > most or len(coming) >= AHEAD):
            was, first = coming.popleft()
            held -= was
            yield first.result()
        coming.append((size, pool.submit(do, *arguments)))
        held += size
    while coming:
        yield coming.popleft()[1].result()


def tail(store: Store, path: str, count: int) -> list[bytes]:
    """The last lines of a log; reads no more than it must."""
    text = b""
    for part in reversed(parts(store, path)):
        for end in range(part.size, 0, -PART):
            text = bytes(store.range(part.key, max(0, end - PART), end)) + text
            lines = text.splitlines()
            if len(lines) > count:
                return lines[len(lines) - count :]
    return text.splitlines()[-count:] if count else []
