"""Uploads files and downloads objects, many at once, in bounded memory.

    send(store, [(path, key)], journals=directory)        -> {key: Sent}
    receive(store, [(key, size, path)])                   -> {key: crc32}

Large files are transferred in parts. A download is written to a temporary file, and renamed if it has the expected size and
checksum. `thread_pool` provides the threads and limits the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from outlast.base import crc32
from outlast.base.errors import Changed, Denied, Missing, Stopped, StoreError, Unreachable
from outlast.storage.store import Store
from outlast.storage.sync import tree
from outlast.storage.sync.index import Stat
from outlast.storage.sync.thread_pool import Job, Outcome, work

T = TypeVar("T")
SMALL = 8 << 20
"""Files larger than this many bytes are sent by `Store.upload`, and received in pieces of this size."""
_UPLOAD = 32 << 20
"""Memory that `Store.upload` needs for one file, in bytes."""


class Damaged(StoreError):
    """Received content does not have the expected checksum."""


class Sent(NamedTuple):
    """An uploaded object."""

    size: int
    crc32: int
    etag: str


class Uploaded(NamedTuple):
    sent: Sent
    stat: Stat
    """The file's stat before the read."""
    read: int
    """Start of the read, in nanoseconds since the epoch."""
    steady: bool


class Download(NamedTuple):
    """An object to download to a path."""

    key: str
    size: int
    path: str
    crc32: int = -1
    mtime: int | None = None


class Downloaded(NamedTuple):
    crc32: int
    stat: Stat


def send(
    store: Store,
    files: Iterable[tuple[Path, str]],
    *,
    journals: Path,
    progress: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> dict[str, Sent]:
    """Upload files, given as (path, key), and return the uploaded objects, keyed by `key`.

    If the process is killed during large uploads, the next call resumes them from their journals in the directory `journals`.
    `progress` is called from many threads, with the number of bytes sent since its last call. Raises the first StoreError or
    OSError, Changed if a file changes during the upload, and Stopped soon after `stop` is set.
    """
    done = {}
    for (path, key), uploaded in _results(uploads(store, files, journals=journals, progress=progress, stop=stop)):
        if not uploaded.steady:
            raise Changed(f"{path} changes while it is sent", retry=True)
        done[key] = uploaded.sent
    return done


def receive(
    store: Store,
    objects: Iterable[tuple[str, int, Path]],
    *,
    durable: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """Download objects, given as (key, size, path), to files, and return the files' crc32s, keyed by `key`.

    A file appears at its path once it is complete and, with `durable`, on the disk. `progress` is called in the same way as by
    `send`. Raises the first StoreError (including Missing and Changed) or OSError, and Stopped soon after `stop` is set.
    """
    requests = (Download(key, size, str(path)) for key, size, path in objects)
    outcomes = downloads(store, requests, durable=durable, progress=progress, stop=stop)
    return {one.key: downloaded.crc32 for one, downloaded in _results(outcomes)}


def _results(outcomes: Generator[Outcome[T], None, None]) -> Iterator[tuple[Any, T]]:
    with contextlib.closing(outcomes):
        for key, result, error in outcomes:
            if error is not None:
                raise error
            assert result is not None
            yield key, result


def uploads(
    store: Store,
    files: Iterable[tuple[Path, str]],
    *,
    journals: Path,
    snapshots: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Generator[Outcome[Uploaded], None, None]:
    """Upload files and yield the outcome of each.

    With `snapshots`, a large file that changes during its upload is copied, and the copy is uploaded instead.
    """
    enough = threading.Event()

    def job(path: Path, key: str) -> Uploaded:
        read = time.time_ns()
        data = tree.read(path, SMALL)
        if data is None:
            return _upload(store, path, key, journals, snapshots, progress, enough)
        content, stat, steady = data
        uploaded = Uploaded(Sent(len(content), crc32.update(content), store.put(key, content)), stat, read, steady)
        progress(len(content))
        return uploaded

    def jobs() -> Iterator[Job[Uploaded]]:
        for path, key in files:
            size = 0
            with contextlib.suppress(OSError):  # the job reports the error
                size = os.stat(path).st_size
            yield Job((path, key), size if size <= SMALL else _UPLOAD, partial(job, path, key))

    yield from work(jobs(), enough, stop=stop, tick=tick)


def _upload(
    store: Store, path: Path, key: str, journals: Path, snapshots: bool, progress: Callable[[int], None], stop: threading.Event
) -> Uploaded:
    """Upload a large file, while a second thread computes the checksum from the same cached pages."""
    journals.mkdir(parents=True, exist_ok=True)
    journal = journals / f"{hashlib.sha256(f'{store.url}/{key}'.encode()).hexdigest()[:32]}.upload"
    for _ in range(1 if snapshots else tree.ATTEMPTS):  # a file that changed once will change again
        read, stat = time.time_ns(), tree.stat_of(path)
        failed = threading.Event()
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as other:
            crc = other.submit(crc32.of, file.fileno(), stat.size, stop=failed)
            try:
                etag = store.upload(path, key, journal=journal, progress=progress, stop=stop)
            except Changed:
                failed.set()
                continue
            except BaseException:
                failed.set()
                raise
            if tree.stat_of(path) == stat:
                return Uploaded(Sent(stat.size, crc.result(), etag), stat, read, True)
    if not snapshots:
        raise Changed(f"{path} changes while it is sent", retry=True)
    with tempfile.TemporaryDirectory(dir=journals) as directory:
        copy = Path(directory) / "copy"
        read, stat = time.time_ns(), tree.stat_of(path)
        size, crc_sent = tree.copy(path, copy, stat.size)
        # If the file still begins with these bytes, it has only grown, so the copy does not mix old and new bytes.
        with path.open("rb", buffering=0) as file:
            steady = crc32.of(file.fileno(), size) == crc_sent
        etag = store.upload(copy, key, progress=progress, stop=stop)
    return Uploaded(Sent(size, crc_sent, etag), stat._replace(size=size, ctime=0), read, steady)


def downloads(
    store: Store,
    requests: Iterable[Download],
    *,
    durable: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Generator[Outcome[Downloaded], None, None]:
    """Download objects and yield the outcome of each."""
    enough = threading.Event()
    begun: list[_Pieces] = []

    def small(one: Download) -> Downloaded:
        data, entry = store.read(one.key)
        if entry.size != one.size:
            raise _replaced(store, one, entry.size)
        if one.crc32 not in (-1, crc := crc32.update(data)):
            raise _damaged(store, one, crc)
        with tree.AtomicFile(one.path) as partial:
            tree.write(partial.fd, data, 0)
            stat = partial.finish(one.mtime, durable=durable)
        progress(one.size)
        return Downloaded(crc, stat)

    def jobs() -> Iterator[Job[Downloaded | None]]:
        for one in requests:
            if one.size <= SMALL:
                yield Job(one, one.size, partial(small, one))
                continue
            pieces = _Pieces(store, one, durable, progress, enough)
            begun[:] = [other for other in begun if not other.over] + [pieces]
            for start in range(0, one.size, SMALL):
                yield Job(one, SMALL, partial(pieces.fetch, start))

    try:
        with contextlib.closing(work(jobs(), enough, stop=stop, tick=tick)) as outcomes:
            for outcome in outcomes:
                if outcome.result is not None or outcome.error is not None:
                    yield outcome  # type: ignore[misc]
    finally:
        for pieces in begun:
            pieces.give_up()


@dataclass(eq=False)
class _Pieces:
    """A large object that is downloaded in pieces. The last piece completes the file, and the first error ends the download."""

    store: Store
    request: Download
    durable: bool
    progress: Callable[[int], None]
    enough: threading.Event

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._file: tree.AtomicFile | None = None
        self._etag = ""
        self._crcs: dict[int, int] = {}
        self.over = False
        """True once the file is complete, or given up."""

    def fetch(self, start: int) -> Downloaded | None:
        """Download the piece at `start`. Returns the result if this was the last piece to arrive, otherwise None."""
        try:
            with self._lock:
                if self.over:
                    return None
                file = os.dup(self._opened().fd)  # `give_up` may close the file meanwhile
            try:
                crc = self._write_piece(file, start)
            finally:
                os.close(file)
            with self._lock:
                self._crcs[start] = crc
                return self._end() if not self.over and len(self._crcs) * SMALL >= self.request.size else None
        except BaseException:
            if self.give_up():
                raise
            return None

    def give_up(self) -> bool:
        """Remove the file unless it is complete. Returns False if the download was over already."""
        with self._lock:
            was_over, self.over = self.over, True
            if self._file is not None:
                self._file.close()
            return not was_over

    def _opened(self) -> tree.AtomicFile:
        if self.enough.is_set():
            raise Stopped(f"the download of {self.request.key} was stopped")
        if self._file is None:
            if self.request.crc32 < 0:  # otherwise, the crc32 shows whether all pieces are from one version
                entry = self.store.head(self.request.key)
                if entry.size != self.request.size:
                    raise _replaced(self.store, self.request, entry.size)
                self._etag = entry.etag
            self._file = tree.AtomicFile(self.request.path)
            os.truncate(self._file.fd, self.request.size)
        return self._file

    def _write_piece(self, file: int, start: int) -> int:
        end = min(start + SMALL, self.request.size)
        try:
            data = self.store.range(self.request.key, start, end)
        except (Denied, Missing, Unreachable):
            raise
        except StoreError:  # stores report a range beyond the end in many ways
            if (entry := self.store.head(self.request.key)).size != self.request.size:
                raise _replaced(self.store, self.request, entry.size) from None
            raise
        tree.write(file, data, start)
        self.progress(end - start)
        return crc32.update(data)

    def _end(self) -> Downloaded:
        assert self._file is not None
        one, crc = self.request, 0
        for start in sorted(self._crcs):
            crc = crc32.combine(crc, self._crcs[start], min(SMALL, one.size - start))
        if one.crc32 not in (-1, crc):
            raise _damaged(self.store, one, crc)
        if self._etag and self.store.head(one.key).etag != self._etag:
            raise Changed(f"{self.store.url}/{one.key} was replaced while it was received", retry=True)
        stat = self._file.finish(one.mtime, durable=self.durable)
        self._file.close()
        self.over = True
        return Downloaded(crc, stat)


def _replaced(store: Store, one: Download, size: int) -> Changed:
    return Changed(f"{store.url}/{one.key} has {size} bytes instead of {one.size}: it was replaced meanwhile", retry=True)


def _damaged(store: Store, one: Download, crc: int) -> Damaged:
    return Damaged(f"{store.url}/{one.key} has crc32 {crc} instead of {one.crc32}; it was replaced, or is damaged")
