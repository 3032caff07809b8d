"""Shards of a store, for training: fetched into this machine's cache, and read from there.

    <cache>/places/<digest of the URL>/manifest.json                      as it was when somebody asked last
    <cache>/places/<digest of the URL>/files/<digest of that>/<name>      small files, e.g. tokenizer.json

`prepare.room` has the rest of the cache: one process of a machine fetches a shard, the others wait for it. Who needs a shard now
fetches it, and may exceed the limit of the cache; threads fetch what is announced (`want`) and hold it until it has been read.
Waiting is a sign of life: a store that is away is no hang. This is the only module of training that imports stores, and it is
imported only for data in one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outlast.base import backoff, file_locks, files, units, unpack
from outlast.base.errors import Changed, Missing, NoRoom, OutlastError, StoreError
from outlast.data import shards as prepared
from outlast.data.shards import Manifest, Shard
from outlast.storage import store
from outlast.storage.store import Store
from outlast.storage.sync import transfer
from outlast.worker.hangs import stall
from outlast.worker.prepare import cache, room

log = logging.getLogger("outlast")
T = TypeVar("T")

MANIFEST = "manifest.json"
_THREADS = 4
"""Shards that a process fetches ahead at a time; arbitrary."""
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
_TELL_S, _AGAIN_S = 10.0, 60.0
"""A wait of this long is reported, and reported again after so long."""
_STORE_S = 20.0
"""How long a request is repeated before the store counts as away."""
_TRIES, _TRY_S = 4, 0.5
"""Attempts at what is damaged or finds the disk full, and the pause between them: others then give up what they read ahead."""
_PAUSE_S = 5.0
"""Pause in reading ahead when the store is away or the cache is full."""
_LEAVE_S = 5.0
"""How long the end of the process waits for what is being fetched."""
_REST = "see that nothing writes there, or prepare the data again and start a new run"


class Held:
    """Protects a shard from removal as long as this object is referenced."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.ours = file_locks.acquire(self.fd, share=True)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Damaged(OutlastError):
    """A shard is not what its checksum says."""


class Fetched:
    """Shards in a store."""

    remote = True

    def __init__(self, url: str, window: int, patience_s: float) -> None:
        self.name, self.keeps, self._patience_s = url, window, patience_s
        self._cache = room.cache(os.environ).absolute()
        self._home = self._cache / "places" / _digest(url.rstrip("/").encode())
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            (self._cache / "shards").mkdir(exist_ok=True)
        except OSError as error:
            raise OutlastError(
                f"the cache {self._cache} cannot be written: {error.strerror}; correct its permissions, or let "
                "OUTLAST_CACHE name another directory"
            ) from error
        self.begin()
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fetched, (self.name, self.keeps, self._patience_s)

    def begin(self) -> None:
        """Begin as a new reader: at the start, and in a process that was forked."""
        self._store: Store | None = None
        self._kept: dict[str, Held] = {}
        """The announced shards that are here, by their sha256."""
        self.ahead: deque[tuple[Shard, bool]] = deque()
        """The announced shards that are not here, and whether they are needed now."""
        self.announced = threading.Event()
        """Set, and replaced, when other shards are announced."""
        self._lock, self._threads = threading.Lock(), 0
        """The threads that fetch ahead; one ends only while nothing is announced."""
        self._failed: Exception | None = None
        """A mistake that a thread met which fetches ahead: whoever needs a shard raises it."""

    def manifest(self) -> Manifest:
        """The manifest as it is in the store now; if the store cannot be reached, the last one seen."""
        path, new = self._home / MANIFEST, files.beside(self._home / MANIFEST)

        def fetch() -> Manifest:
            try:
                self._download(MANIFEST, new)
                manifest = prepared.parse(new.read_bytes(), self.name)
                new.replace(path)
            except StoreError as error:
                if not error.retry or not path.exists():
                    raise
                log.warning("outlast: %s; going on with what is in this machine's cache", error)
                manifest = prepared.parse(path.read_bytes(), self.name)
            finally:
                new.unlink(missing_ok=True)
            return manifest

        manifest = self._patiently(MANIFEST, fetch)
        for shard in (shard for part in manifest.parts.values() for shard in part.shards):
            if not re.fullmatch(r"[0-9a-f]{64}", shard.sha256):
                raise OutlastError(
                    f"{shard.file} of {self.name} has the sha256 {shard.sha256[:70]!r}, which is none; prepare the data again"
                )
        return manifest

    def file(self, name: str) -> Path:
        """A small file in the cache."""
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise OutlastError(f"{name!r} is not the name of a file beside the shards of {self.name}; correct it")
        path = self._home / "files" / _digest((self._home / MANIFEST).read_bytes()) / name
        if not path.exists():
            self._patiently(name, lambda: self._download(name, path))
        return path

    def hold(self, shard: Shard) -> tuple[Path, Held]:
        """A shard in the cache, and what protects it there. Waits for it to arrive."""
        return self._path(shard), self._patiently(shard.file, lambda: self._held(shard) or self._fetch(shard, True))

    def want(self, shards: Sequence[Shard], now: int) -> None:
        """Announce the shards that are read next, the first `now` of them at once."""
        self.keeps, kept = max(self.keeps, now), self._kept
        for name in set(kept) - {shard.sha256 for shard in shards}:
            kept.pop(name, None)
        with self._lock:
            self.ahead = deque((shard, rank < now) for rank, shard in enumerate(shards) if shard.sha256 not in kept)
            more = max(0, min(_THREADS, len(self.ahead)) - self._threads)
            self._threads += more
            self.announced.set()
            self.announced = threading.Event()
        for _ in range(more):
            threading.Thread(target=_read_ahead, args=(weakref.ref(self),), name="outlast-shards", daemon=True).start()

    def fetch_ahead(self) -> float | None:
        """Fetch an announced shard; returns the pause before the next one, in seconds, None when none is left."""
        with self._lock:
            if not (ahead := self.ahead):
                self._threads -= 1
                return None
            shard, now = ahead.popleft()
        try:
            if (held := self._held(shard) or self._fetch(shard, now)) is not None:
                self._kept[shard.sha256] = held
                return 0.0
            pause = _LONGEST_POLL_S
        except Exception as error:
            if not isinstance(error, (OutlastError, OSError)):  # who needs the shard meets those as well, and says so
                self._failed = error
            pause = _PAUSE_S
        ahead.append((shard, now))
        return pause

    def _path(self, shard: Shard) -> Path:
        return self._cache / "shards" / shard.sha256

    def _held(self, shard: Shard) -> Held | None:
        """A shard that is in the cache; None if it is not."""
        try:
            held = Held(self._path(shard))
        except FileNotFoundError:
            return None
        status = os.fstat(held.fd)
        if not held.ours or not status.st_nlink or status.st_size != shard.bytes:  # being removed; cut off by a power failure
            return None
        with contextlib.suppress(PermissionError):  # it belongs to another user
            os.utime(held.fd, ns=(time.time_ns(), status.st_mtime_ns))
        return held

    def _fetch(self, shard: Shard, now: bool) -> Held | None:
        """Fetch a shard; None if another process does. Raises NoRoom if it is not needed now and the cache is full."""
        if self._failed is not None:
            raise self._failed
        with room.claimed(self._cache, shard.sha256, shard.bytes, cache.things, os.environ) as (path, missing):
            if path is None:
                return None
            if missing and not now:
                raise NoRoom(f"the cache {self._cache} is full")
            for name in reversed(list(self._kept)) if missing else ():  # what is read last gives way first
                self._kept.pop(name, None)
                if not room.make(self._cache, 0, cache.things, os.environ):
                    break
            self._download(shard.file, path, shard.bytes)
            if (found := unpack.checksum(path)) != shard.sha256:
                sums = f"its sha256 is {found[:12]}..., {MANIFEST} says {shard.sha256[:12]}..."
                raise Damaged(f"{shard.file} of {self.name} is damaged: {sums}; {_REST}")
            path.chmod(0o444)
            held = Held(path)
            path.replace(self._path(shard))
            return held

    def _download(self, key: str, path: Path, size: int | None = None) -> Path:
        """An object of the store as a file; `size` is that of a shard. Raises StoreError, OSError."""
        global _used
        if _forked:  # a store's client waits for ever in a fork of a process that has used it
            argv = [self.name, key, str(path), *([] if size is None else [str(size)])]
            command = [sys.executable, "-m", "outlast", "shard", *argv]
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            if done.returncode:
                how = f"the process that fetches it ended with {done.returncode}; see what it said, and the machine's memory"
                raise OutlastError(f"{key} of {self.name} cannot be fetched: {how}")
            if done.stdout:
                raise pickle.loads(done.stdout)
            return path
        _used = True
        timeout_s = min(_STORE_S, backoff.timeout_from_environment())
        _under_way.add(path)
        try:
            if _leaving.is_set():
                raise OutlastError("this process ends")
            self._store = self._store or store.open_(self.name, timeout_s=timeout_s)
            if size is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.replace(path, self._store.get(key), durable=True)
            else:
                transfer.receive(self._store, [(key, size, path)], durable=True, stop=_leaving)
        finally:
            _under_way.discard(path)
        return path

    def _patiently(self, what: str, attempt: Callable[[], T | None]) -> T:
        """The result of `attempt`, repeated while another process fetches (None) or the store is away. Raises OutlastError for
        what cannot be had, or not after `patience`."""
        begun, tell = time.monotonic(), time.monotonic() + _TELL_S
        pause, tries = _POLL_S, 0
        with stall.watch().alive():
            while True:
                why = "another process fetches it"
                try:
                    if (result := attempt()) is not None:
                        return result
                except (OutlastError, OSError) as error:
                    why, passes = self._problem(what, error)
                    away = isinstance(error, StoreError)
                    pause, tries = _TRY_S, tries + (not away)
                    if away and passes and (waited := time.monotonic() - begun) >= self._patience_s:
                        why += (
                            f"; waited {units.human_seconds(waited)} for {what} of {self.name}; "
                            "see that the store can be reached, and start again: the run goes on where it was"
                        )
                        passes = False
                    if not passes or tries == _TRIES:
                        raise OutlastError(why) from error
                if time.monotonic() >= tell:
                    tell, waited = time.monotonic() + _AGAIN_S, time.monotonic() - begun
                    log.warning(
                        "outlast: waiting for %s of %s, for %s so far: %s", what, self.name, units.human_seconds(waited), why
                    )
                time.sleep(pause)
                pause = min(_LONGEST_POLL_S, pause * 1.5)

    def _problem(self, what: str, error: Exception) -> tuple[str, bool]:
        """The meaning of an error, and whether it may pass."""
        if isinstance(error, Missing):
            remedy = "prepare data there (outlast data prepare), or correct the URL" if what == MANIFEST else _REST
            return f"{self.name} has no {what}; {remedy}", False
        if isinstance(error, Changed):
            return f"{what} of {self.name} is not what {MANIFEST} says: {error}; {_REST}", False
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room, or let OUTLAST_CACHE name a directory of a larger disk"
            used = units.human_bytes(sum(thing.size for thing in cache.things(self._cache)))
            return f"the disk of the cache {self._cache} is full, of which the cache has {used}; {remedy}", True
        if isinstance(error, OSError):
            return f"{what} cannot be cached: {error}", False
        return str(error), isinstance(error, Damaged) or (isinstance(error, StoreError) and error.retry)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _read_ahead(known: weakref.ref[Fetched]) -> None:
    """Fetch what a place has announced, until all of it is here."""
    while not _leaving.is_set() and (place := known()) is not None:
        announced = place.announced
        if (pause := place.fetch_ahead()) is None:
            return
        del place  # which may be gone before the pause is over
        announced.wait(pause)


_all: weakref.WeakSet[Fetched] = weakref.WeakSet()
_used = _forked = False
"""Whether this process has used a store; whether it is the fork of one that had."""
_leaving = threading.Event()
_under_way: set[Path] = set()
"""Files that are being downloaded."""


def _leave() -> None:
    """At the end of the process: no thread may be in a store's client when Python goes away."""
    _leaving.set()
    deadline = time.monotonic() + _LEAVE_S
    while _under_way and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _begin_in_fork() -> None:
    global _forked
    _forked = _forked or _used
    _under_way.clear()  # by threads that are not here: the end need not wait for them
    for place in list(_all):
        place.begin()


atexit.register(_leave)
os.register_at_fork(after_in_child=_begin_in_fork)


def main(argv: list[str]) -> None:
    """URL KEY PATH [SIZE]: do what `_download` does, for a process that was forked. An error is pickled to standard output."""
    try:
        Fetched(argv[0], 1, 0.0)._download(argv[1], Path(argv[2]), *map(int, argv[3:]))
    except (OutlastError, OSError) as problem:
        sys.stdout.buffer.write(pickle.dumps(problem))
