"""Manages this machine's cache directory: its size limit, and the eviction of its entries.

    <cache>/shards/<sha256>             a complete, verified shard, on which its readers hold a shared lock
    <cache>/coming/<sha256>.<bytes>/    the directory for a shard during its fetch, locked by the fetching process

The least recently used entries are evicted first, but never those that are in use or pinned. OUTLAST_CACHE_SIZE limits the total
size, without Python environments. Call `make` before writing, or `claimed` for a shard.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast.base import file_locks, units
from outlast.base.errors import OutlastError
from outlast.job.contract import Env

log = logging.getLogger("outlast")

_STILL_S = 60.0
"""Seconds without a write after which another process fetches the shard, too. Longer than a store's retries take."""
_SHARE = 0.5
"""Share of the disk that the cache may use without OUTLAST_CACHE_SIZE. Arbitrary."""
_SPARE = 0.05
"""Share of the disk that the cache leaves free without OUTLAST_CACHE_SIZE. Arbitrary."""
_LEAST_SPARE = 1 << 20
"""Bytes that the cache always leaves free, since files take whole blocks."""


@dataclass(frozen=True)
class Thing:
    """An evictable entry in the cache."""

    path: Path
    size: int
    used: float
    remove: Callable[[], bool]
    """Removes the entry unless it is in use, and returns whether it was removed."""


def cache(environ: Mapping[str, str]) -> Path:
    """Return this machine's cache directory."""
    if given := environ.get(Env.CACHE):
        return Path(given).expanduser()
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "outlast"


def limit(cache: Path, environ: Mapping[str, str], used: int) -> int:
    """Return the size limit in bytes: OUTLAST_CACHE_SIZE or half of the disk, but less on a full disk. Raises OutlastError."""
    disk = shutil.disk_usage(cache)
    if text := environ.get(Env.CACHE_SIZE):
        try:
            most, spare = units.memory(text.removesuffix("B")), _LEAST_SPARE
        except ValueError as error:
            raise OutlastError(f"OUTLAST_CACHE_SIZE is {text}; it must be a size, e.g. 200GiB") from error
    else:
        most, spare = int(disk.total * _SHARE), int(disk.total * _SPARE)
    return max(0, min(most, used + disk.free - spare))


Things = Callable[[Path], Sequence[Thing]]
"""Lists all entries in a cache, excluding fetches in progress."""


def make(cache: Path, needed: int, things: Things, environ: Mapping[str, str]) -> int:
    """Evict entries until `needed` more bytes fit. Returns the number of bytes that still do not fit."""
    with file_locks.attempted(cache / ".room", wait=True):
        return _evict(cache, needed, things, environ)


@contextlib.contextmanager
def claimed(cache: Path, sha256: str, size: int, things: Things, environ: Mapping[str, str]) -> Iterator[tuple[Path | None, int]]:
    """Make room for a shard, and keep other processes from fetching it meanwhile. Yields the path for the shard (None if another
    process is fetching it, or has just fetched it), and the number of bytes that do not fit. A process that has not written for
    `_STILL_S` is ignored."""
    with contextlib.ExitStack() as claim:
        with file_locks.attempted(cache / ".room", wait=True):  # so that no process removes the directory before it is locked
            home = cache / "coming" / f"{sha256}.{size}"
            home.mkdir(parents=True, exist_ok=True)
            acquired = claim.enter_context(file_locks.attempted(home)) or _still(home)
            acquired = acquired and not any(thing.path.name == sha256 and thing.size == size for thing in shards(cache))
            missing = _evict(cache, 0, things, environ) if acquired else 0
        # A unique name, since a thread from an earlier attempt may still be writing.
        path = home / uuid.uuid4().hex
        try:
            yield path if acquired else None, missing
        finally:
            path.unlink(missing_ok=True)  # a partial or damaged file, which the next attempt would not reuse


def _still(home: Path) -> bool:
    """Return whether the process that fetches a shard has stopped writing, e.g. because of SIGSTOP."""
    newest = home.stat().st_mtime
    for path in home.iterdir():
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    if still := time.time() - newest > _STILL_S:
        log.warning("outlast: the process that fetches %s has not written for %.0f s: it is fetched again", home.name, _STILL_S)
    return still


def _evict(cache: Path, needed: int, things: Things, environ: Mapping[str, str]) -> int:
    needed += _coming(cache)  # first: a shard that arrives meanwhile counts twice rather than not at all
    entries = things(cache)
    total = sum(thing.size for thing in entries)
    missing = total + needed - limit(cache, environ, total)
    for thing in sorted(entries, key=lambda thing: thing.used):
        if missing <= 0:
            break
        if thing.remove():
            missing -= thing.size
    return max(0, missing)


def _coming(cache: Path) -> int:
    """Return the total size in bytes of fetches in progress, and remove what killed processes have left behind."""
    size = 0
    for home in cache.glob("coming/*"):
        if not (match := re.fullmatch(r"[0-9a-f]+\.(\d+)", home.name)):
            continue
        if file_locks.free(home):
            shutil.rmtree(home, ignore_errors=True)
        else:
            size += int(match[1])
    return size


def shards(cache: Path) -> Iterator[Thing]:
    for path in cache.glob("shards/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield Thing(path, status.st_size, status.st_atime, functools.partial(_remove, path))


def _remove(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if not file_locks.acquire(file.fileno()):
            return False
        os.unlink(path)
    return True
