"""Fetches shards from a store into this machine's cache, for training.

    <cache>/places/<digest of the URL>/manifest.json                      the last manifest fetched
    <cache>/places/<digest of the URL>/files/<digest of manifest>/<name>  small files, e.g. tokenizer.json

`prepare.data_cache_eviction` describes the rest of the cache. One process on a machine fetches a shard while the others wait.
Threads fetch announced shards and protect them from removal until they are read. A shard that is needed at once is fetched even
if the cache then exceeds its limit. A waiting process signals that it is alive, since an unreachable store is not a hang. This
module imports the clients of stores, so it is imported only for data in a store.
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
from outlast.data import shard_format
from outlast.data.shard_format import Manifest, Shard
from outlast.storage import store
from outlast.storage.store import Store
from outlast.storage.sync import transfer
from outlast.worker.hangs import deadlocks
from outlast.worker.prepare import data_cache, data_cache_eviction

log = logging.getLogger("outlast")
T = TypeVar("T")

MANIFEST = "manifest.json"
_THREADS = 4
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
_WARN_S, _WARN_AGAIN_S = 10.0, 60.0
"""Seconds of waiting before the first warning and between warnings."""
_STORE_S = 20.0
"""Seconds of retries before the store counts as unreachable."""
_TRIES, _TRY_S = 4, 0.5
"""Number of attempts if a shard is damaged or the disk is full, and seconds between attempts, in which other processes may drop
shards."""
_PAUSE_S = 5.0
"""Seconds between attempts to read ahead if the store is unreachable or the cache is full."""
_LEAVE_S = 5.0
"""Seconds to wait for unfinished downloads at exit."""
_REST = "see that nothing writes there, or prepare the data again and start a new run"


class Held:
    """Protects a shard from removal while this object is referenced."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.locked = file_locks.acquire(self.fd, share=True)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Damaged(OutlastError):
    """A shard has a wrong checksum."""


class Fetched:
    remote = True

    def __init__(self, url: str, window: int, patience_s: float) -> None:
        self.name, self.keeps, self._patience_s = url, window, patience_s
        self._cache = data_cache_eviction.cache(os.environ).absolute()
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
        """Reset the state, at the start and in a forked process."""
        self._store: Store | None = None
        self._ahead_held: dict[str, Held] = {}
        """The announced shards in the cache, keyed by sha256."""
        self.ahead: deque[tuple[Shard, bool]] = deque()
        """The announced shards that are not in the cache, and whether they are needed at once."""
        self.announced = threading.Event()
        """An event that is set, and then replaced, whenever shards are announced."""
        self._lock, self._threads = threading.Lock(), 0
        """The number of threads that fetch ahead. Each ends once no announced shard is left."""
        self._failed: Exception | None = None
        """An unexpected error in a thread that fetches ahead, raised by the next reader of a shard."""

    def manifest(self) -> Manifest:
        """Return the store's manifest or, if the store is unreachable, the last one fetched."""
        path, new = self._home / MANIFEST, files.beside(self._home / MANIFEST)

        def fetch() -> Manifest:
            try:
                self._download(MANIFEST, new)
                manifest = shard_format.parse(new.read_bytes(), self.name)
                new.replace(path)
            except StoreError as error:
                if not error.retry or not path.exists():
                    raise
                log.warning("outlast: %s; going on with what is in this machine's cache", error)
                manifest = shard_format.parse(path.read_bytes(), self.name)
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
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise OutlastError(f"{name!r} is not the name of a file beside the shards of {self.name}; correct it")
        path = self._home / "files" / _digest((self._home / MANIFEST).read_bytes()) / name
        if not path.exists():
            self._patiently(name, lambda: self._download(name, path))
        return path

    def hold(self, shard: Shard) -> tuple[Path, Held]:
        return self._path(shard), self._patiently(shard.file, lambda: self._held(shard) or self._fetch(shard, True))

    def announce(self, shards: Sequence[Shard], now: int) -> None:
        self.keeps, held = max(self.keeps, now), self._ahead_held
        for name in set(held) - {shard.sha256 for shard in shards}:
            held.pop(name, None)
        with self._lock:
            self.ahead = deque((shard, rank < now) for rank, shard in enumerate(shards) if shard.sha256 not in held)
            more = max(0, min(_THREADS, len(self.ahead)) - self._threads)
            self._threads += more
            self.announced.set()
            self.announced = threading.Event()
        for _ in range(more):
            threading.Thread(target=_read_ahead, args=(weakref.ref(self),), name="outlast-shards", daemon=True).start()

    def fetch_ahead(self) -> float | None:
        """Fetch an announced shard. Returns the seconds to pause before the next call, or None if no shard is left."""
        with self._lock:
            if not (ahead := self.ahead):
                self._threads -= 1
                return None
            shard, now = ahead.popleft()
        try:
            if (held := self._held(shard) or self._fetch(shard, now)) is not None:
                self._ahead_held[shard.sha256] = held
                return 0.0
            pause = _LONGEST_POLL_S
        except Exception as error:
            if not isinstance(error, (OutlastError, OSError)):  # a reader of the shard gets these errors, too, and reports them
                self._failed = error
            pause = _PAUSE_S
        ahead.append((shard, now))
        return pause

    def _path(self, shard: Shard) -> Path:
        return self._cache / "shards" / shard.sha256

    def _held(self, shard: Shard) -> Held | None:
        try:
            held = Held(self._path(shard))
        except FileNotFoundError:
            return None
        status = os.fstat(held.fd)
        if not held.locked or not status.st_nlink or status.st_size != shard.bytes:  # being removed; truncated by a power failure
            return None
        with contextlib.suppress(PermissionError):  # another user owns the file
            os.utime(held.fd, ns=(time.time_ns(), status.st_mtime_ns))
        return held

    def _fetch(self, shard: Shard, now: bool) -> Held | None:
        """Fetch a shard, or return None if another process does. Raises NoRoom if the cache is full, unless the shard is needed
        `now`."""
        if self._failed is not None:
            raise self._failed
        with data_cache_eviction.claimed(self._cache, shard.sha256, shard.bytes, data_cache.things, os.environ) as (
            path,
            missing,
        ):
            if path is None:
                return None
            if missing and not now:
                raise NoRoom(f"the cache {self._cache} is full")
            for name in reversed(list(self._ahead_held)) if missing else ():  # drop the shards needed last first
                self._ahead_held.pop(name, None)
                if not data_cache_eviction.make(self._cache, 0, data_cache.things, os.environ):
                    break
            self._download(shard.file, path, shard.bytes)
            if (actual := unpack.checksum(path)) != shard.sha256:
                sums = f"its sha256 is {actual[:12]}..., {MANIFEST} says {shard.sha256[:12]}..."
                raise Damaged(f"{shard.file} of {self.name} is damaged: {sums}; {_REST}")
            path.chmod(0o444)
            held = Held(path)
            path.replace(self._path(shard))
            return held

    def _download(self, key: str, path: Path, size: int | None = None) -> Path:
        """Download the object `key` to `path`. Only shards have a `size`. Raises StoreError, OSError, OutlastError."""
        global _used
        if _forked:  # a store's client hangs in a fork of a process that has used a client
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
        """Repeat `attempt` until it returns a result. It returns None while another process fetches the object. Raises
        OutlastError if the store is still unreachable after `patience` seconds, or if other errors do not pass."""
        begun, warn_at = time.monotonic(), time.monotonic() + _WARN_S
        pause, tries = _POLL_S, 0
        with deadlocks.watch().alive():
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
                if time.monotonic() >= warn_at:
                    warn_at, waited = time.monotonic() + _WARN_AGAIN_S, time.monotonic() - begun
                    log.warning(
                        "outlast: waiting for %s of %s, for %s so far: %s", what, self.name, units.human_seconds(waited), why
                    )
                time.sleep(pause)
                pause = min(_LONGEST_POLL_S, pause * 1.5)

    def _problem(self, what: str, error: Exception) -> tuple[str, bool]:
        """Return a description of an error, and whether the error is transient."""
        if isinstance(error, Missing):
            remedy = "prepare data there (outlast data prepare), or correct the URL" if what == MANIFEST else _REST
            return f"{self.name} has no {what}; {remedy}", False
        if isinstance(error, Changed):
            return f"{what} of {self.name} is not what {MANIFEST} says: {error}; {_REST}", False
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room, or let OUTLAST_CACHE name a directory of a larger disk"
            used = units.human_bytes(sum(thing.size for thing in data_cache.things(self._cache)))
            return f"the disk of the cache {self._cache} is full, and the cache uses {used} of it; {remedy}", True
        if isinstance(error, OSError):
            return f"{what} cannot be cached: {error}", False
        return str(error), isinstance(error, Damaged) or (isinstance(error, StoreError) and error.retry)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _read_ahead(reference: weakref.ref[Fetched]) -> None:
    while not _leaving.is_set() and (place := reference()) is not None:
        announced = place.announced
        if (pause := place.fetch_ahead()) is None:
            return
        del place  # so that it may be collected during the pause
        announced.wait(pause)


_all: weakref.WeakSet[Fetched] = weakref.WeakSet()
_used = _forked = False
"""Whether this process has used a store, and whether it was forked from one that had."""
_leaving = threading.Event()
_under_way: set[Path] = set()


def _leave() -> None:
    """Wait for downloads at exit, since no thread may use a store's client while the interpreter shuts down."""
    _leaving.set()
    deadline = time.monotonic() + _LEAVE_S
    while _under_way and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _begin_in_fork() -> None:
    global _forked
    _forked = _forked or _used
    _under_way.clear()  # the threads of these downloads do not exist in the fork
    for place in list(_all):
        place.begin()


atexit.register(_leave)
os.register_at_fork(after_in_child=_begin_in_fork)


def main(argv: list[str]) -> None:
    """Run `_download` for a forked process. `argv` is URL KEY PATH [SIZE]. An error is pickled to standard output."""
    try:
        Fetched(argv[0], 1, 0.0)._download(argv[1], Path(argv[2]), *map(int, argv[3:]))
    except (OutlastError, OSError) as problem:
        sys.stdout.buffer.write(pickle.dumps(problem))
