"""Pushes and fetches files that only grow: logs, the ledger, and metrics.

A push adds the new bytes of a file to the store, as objects ("parts") that are never replaced:

    logs/worker-0.log                                              the file
    logs/worker-0.parts/00000000-0-8c736521.log                    its parts, named by number, offset and crc32
    logs/worker-0.parts/00000001-5242880-11cdfc7b.log

If a file was truncated (`metrics.jsonl`, when a run resumes from an earlier step), the next part begins before the end of the
last one. Writing all parts in order then yields the file (`as_file`). Logs and ledgers are never truncated: where their parts
overlap, a machine has lost bytes, which the store keeps (`pieces`). The parts are the only state: a sender continues after the
last part that matches the file. See docs/decisions/0019-growing-files.md.
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
"""Maximum size of a part in bytes, small enough for one request."""
_AT_ONCE = 8
_PIECE = 1 << 20
AHEAD = 32
_HELD = 64 << 20
_HELD_READ = 8 << 20
"""Limits of concurrent requests, of bytes that a fetch reads ahead, and of bytes that each of many streams reads ahead."""
_RECENT = 16
"""Number of parts per file that the sender caches. If none matches the file, the sender lists all parts."""
_NAME = re.compile(r"(\d{8,})-(\d+)-([0-9a-f]{8})")


class Part(NamedTuple):
    """An object that holds a range of a file's bytes."""

    key: str
    number: int
    start: int
    size: int
    crc32: int

    @property
    def end(self) -> int:
        return self.start + self.size


def grows(path: str) -> bool:
    """Return whether a path in a job's output is a growing file."""
    directory, _, name = path.rpartition("/")
    return path == contract.METRICS or (directory, os.path.splitext(name)[1]) in (
        (contract.LOGS, ".log"),
        (contract.LEDGER, ".jsonl"),
    )


def place(path: str) -> str:
    """Return the directory that holds a file's parts."""
    return f"{os.path.splitext(path)[0]}.parts"


def is_part(key: str) -> bool:
    directory, _, name = key.rpartition("/")
    stem, ext = os.path.splitext(name)
    return directory.endswith(".parts") and _NAME.fullmatch(stem) is not None and grows(directory.removesuffix(".parts") + ext)


def files(store: Store) -> list[str]:
    """Return the growing files that have parts in a store."""
    paths = set()
    for directory, ext in (("", os.path.splitext(contract.METRICS)[1]), (contract.LOGS, ".log"), (contract.LEDGER, ".jsonl")):
        for name in store.names(directory):
            path = f"{directory}/" * bool(directory) + name.removesuffix(".parts") + ext
            if name.endswith(".parts") and grows(path):
                paths.add(path)
    return sorted(paths)


def parts(store: Store, path: str) -> list[Part]:
    """Return a file's parts in the order in which they were written."""
    parts = []
    for entry in store.entries(place(path)):
        stem, ext = os.path.splitext(entry.key.rpartition("/")[2])
        if (name := _NAME.fullmatch(stem)) and ext == os.path.splitext(path)[1]:
            parts.append(Part(entry.key, int(name[1]), int(name[2]), entry.size, int(name[3], 16)))
    return sorted(parts, key=lambda part: part[1:])


def as_file(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return the parts that make up a file, each with the offset at which later parts take over.

    If two senders wrote parts with the same number, the one that later parts continue is used.
    """
    made, limit = [], None
    for _, group in itertools.groupby(reversed(parts), lambda part: part.number):
        same = list(group)
        part = next((each for each in same if each.end == limit), same[0])
        end = part.end if limit is None else min(part.end, limit)
        if part.start < end:
            made.append((part, end))
        limit = part.start if limit is None else min(limit, part.start)
    return made[::-1]


class Sender:
    """Sends the new bytes of files below `root`. Use only one sender per directory at a time."""

    def __init__(self, store: Store, root: Path) -> None:
        self._store, self._root = store, root
        self._parts: dict[str, list[Part]] = {}
        self._tried: dict[str, Part] = {}
        """Parts that may have arrived. They are sent again unchanged, so that the store never has them twice."""
        self.failed: list[tuple[str, str]] = []
        """Files that the last push could not read or send, each with the reason."""

    def forget(self, path: str) -> None:
        self._parts.pop(path, None)

    def push(self, paths: Iterable[str], stop: threading.Event) -> int:
        """Send the new bytes of these files, and return their number. Raises Stopped, and errors that affect all files."""
        self.failed = []
        with ThreadPoolExecutor(_AT_ONCE, "outlast-growing") as pool:
            return sum(pool.map(lambda path: self._try(path, stop), paths))

    def _try(self, path: str, stop: threading.Event) -> int:
        if wrong := self._store.impossible(f"{place(path)}/{0:08d}-{0}-{0:08x}{os.path.splitext(path)[1]}"):
            printable = path.encode(errors="backslashreplace").decode()
            self.failed.append((printable, f"it cannot be the name of an object: {wrong}; rename it"))
            return 0
        try:
            return self._push(path, stop)
        except FileNotFoundError:
            return 0
        except (Stopped, NoBucket, Denied, Unreachable):  # other files would fail, too
            raise
        except StoreError as error:
            self.forget(path)
            self.failed.append((path, str(error)))
            return 0
        except OSError as error:
            self.failed.append((path, f"it cannot be read: {error.strerror}"))
            return 0

    def _push(self, path: str, stop: threading.Event) -> int:
        if path not in self._parts:
            self._parts[path] = parts(self._store, path)[-_RECENT:]
        recent, sent = self._parts[path], 0
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
                recent.append(part)
                del recent[:-_RECENT]
                at, sent = part.end, sent + part.size
        return sent

    def _next(self, path: str, file: int, start: int, size: int) -> tuple[Part, bytes]:
        number = max((part.number for part in self._parts[path]), default=-1) + 1
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
        """Return the end of the last part that matches the file, or 0."""
        recent = self._parts[path]
        at = self._matching(file, size, recent)
        if at is None and len(recent) == _RECENT:
            at = self._matching(file, size, parts(self._store, path))
        return at or 0

    def _matching(self, file: int, size: int, parts: Sequence[Part]) -> int | None:
        for part, end in reversed(as_file(parts)):
            if end == part.end <= size:
                data = os.pread(file, part.size, part.start)
                if len(data) == part.size and crc32.update(data) == part.crc32:
                    return part.end
        return None


def fetch(store: Store, path: str, to: Path, stop: threading.Event | None = None) -> bool:
    """Fetch a file to `to`, atomically, unless `to` exists. Returns whether `to` exists now."""
    made = as_file(parts(store, path))
    if to.exists() or not made:
        return to.exists()
    with tree.AtomicFile(str(to)) as partial, ThreadPoolExecutor(AHEAD, "outlast-growing") as pool:

        def write(part: Part, start: int, end: int) -> None:
            if stop is not None and stop.is_set():
                raise Stopped(f"fetching {path} was stopped")
            tree.write(partial.fd, store.range(part.key, start - part.start, end - part.start), start)

        pieces = ((part, at, min(end, at + PART)) for part, end in made for at in range(part.start, end, PART))
        for _ in _ahead(pool, ((end - at, write, (part, at, end)) for part, at, end in pieces), _HELD):
            pass
        partial.finish_unless_there()
    return True


def pieces(store: Store, path: str, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """Stream a file's bytes: the current content of metrics, or all bytes ever pushed of a log or ledger."""
    every = parts(store, path)
    made = as_file(every) if path == contract.METRICS else [(part, part.end) for part in every]
    ranges = ((part, at, min(end - part.start, at + _PIECE)) for part, end in made for at in range(0, end - part.start, _PIECE))
    jobs = ((end - start, store.range, (part.key, start, end)) for part, start, end in ranges)
    yield from map(bytes, _ahead(pool, jobs, _HELD_READ))


def since(store: Store, path: str, start: int) -> bytes:
    """Return a file's current bytes from offset `start`."""
    later = [(part, max(start, part.start), end) for part, end in as_file(parts(store, path)) if end > start]
    return b"".join(bytes(store.range(part.key, at - part.start, end - part.start)) for part, at, end in later)


def _ahead(pool: ThreadPoolExecutor, jobs: Iterable[tuple[int, Callable[..., T], tuple[Any, ...]]], most: int) -> Iterator[T]:
    """Yield the results of jobs (bytes, function, arguments) in order, with at most `most` bytes in memory."""
    pending: collections.deque[tuple[int, Future[T]]] = collections.deque()
    held = 0
    for size, do, arguments in jobs:
        while pending and (held + size > most or len(pending) >= AHEAD):
            first_size, first = pending.popleft()
            held -= first_size
            yield first.result()
        pending.append((size, pool.submit(do, *arguments)))
        held += size
    while pending:
        yield pending.popleft()[1].result()


def tail(store: Store, path: str, count: int) -> list[bytes]:
    """Return a log's last `count` lines, reading no more parts than needed."""
    text = b""
    for part in reversed(parts(store, path)):
        for end in range(part.size, 0, -PART):
            text = bytes(store.range(part.key, max(0, end - PART), end)) + text
            lines = text.splitlines()
            if len(lines) > count:
                return lines[len(lines) - count :]
    return text.splitlines()[-count:] if count else []
