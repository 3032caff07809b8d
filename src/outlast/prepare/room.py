"""The size of this machine's cache: things that were used least recently go when room is needed.

What may go: shards that no process reads, and versions of data and models (`cache`) that no worker uses and no run has pinned.
OUTLAST_CACHE_SIZE limits all of these together; Python environments do not count. Whoever is about to write calls `make`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast import file_locks, units
from outlast.contract import Env
from outlast.errors import OutlastError
from outlast.workerfiles import wants

_SHARE = 0.5
"""Of the disk, what the cache may use if OUTLAST_CACHE_SIZE is not set; arbitrary."""
_SPARE = 0.05
"""Of the disk, what it leaves free then; arbitrary."""
_LEAST_SPARE = 1 << 20
"""Bytes that it leaves free in any case: files take whole blocks."""


@dataclass(frozen=True)
class Thing:
    """Something in the cache that can be removed as a whole."""

    path: Path
    size: int
    used: float
    """When it was used last, seconds since the epoch."""
    remove: Callable[[], bool]
    """Removes it unless it is in use; returns whether it did."""


def limit(cache: Path, environ: Mapping[str, str], used: int) -> int:
    """Bytes that the cache may hold, of which `used` are there: OUTLAST_CACHE_SIZE, else half of the disk; less if the disk has
    not so much left. Raises OutlastError."""
    disk = shutil.disk_usage(cache)
    if text := environ.get(Env.CACHE_SIZE):
        try:
            most, spare = units.memory(text), _LEAST_SPARE
        except ValueError as error:
            raise OutlastError(f"OUTLAST_CACHE_SIZE is {text}; it must be a size, e.g. 200GiB") from error
    else:
        most, spare = int(disk.total * _SHARE), int(disk.total * _SPARE)
    return max(0, min(most, used + disk.free - spare))


def make(
    cache: Path,
    needed: int,
    things: Sequence[Thing],
    environ: Mapping[str, str],
    keep: Callable[[Thing], int | None] = lambda _: None,
) -> int:
    """Remove things until `needed` more bytes fit below the limit; returns the bytes that are still missing.

    `things` are all that the cache holds. `keep` returns the rank of one that a reader wants, None for others: those go first,
    from the one that was used least recently on; then wanted ones, from the highest rank on. A negative rank: it stays.
    """
    with file_locks.attempted(cache / ".room", wait=True):
        total = sum(thing.size for thing in things)
        missing = total + needed - limit(cache, environ, total)
        ranked = [(keep(thing), thing) for thing in things]
        unwanted = sorted((thing for rank, thing in ranked if rank is None), key=lambda thing: thing.used)
        wanted = sorted(((rank, thing) for rank, thing in ranked if rank is not None and rank >= 0), key=lambda each: -each[0])
        for thing in [*unwanted, *(thing for _, thing in wanted)]:
            if missing <= 0:
                break
            if thing.remove():
                missing -= thing.size
        return max(0, missing)


def shards(cache: Path) -> Iterator[Thing]:
    """The shards of this machine, and those that are being fetched, which stay."""
    for path in wants.shards(cache).glob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield Thing(path, status.st_size, status.st_atime, lambda path=path: _removed(path))  # type: ignore[misc]
    for path in cache.glob("places/*/coming/*"):
        with contextlib.suppress(OSError):
            yield Thing(path, path.stat().st_size, float("inf"), lambda: False)


def _removed(path: Path) -> bool:
    """Remove a shard unless somebody reads it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if not file_locks.acquire(file.fileno()):
            return False
        os.unlink(path)
    return True
