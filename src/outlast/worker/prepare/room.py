"""This machine's cache: where it is, how large it may be, and what goes when room is needed.

    <cache>/shards/<sha256>             a shard, whole and checked; whoever reads it holds its shared lock
    <cache>/coming/<sha256>.<bytes>/    what a shard is fetched into; locked by the process that fetches it

What may go, from what was used least recently on: shards that no process reads, and versions of data and models (`cache`) that no
worker uses and no run has pinned. OUTLAST_CACHE_SIZE limits all of these together; Python environments do not count. Whoever is
about to write calls `make`, or `claimed` for a shard.
"""

from __future__ import annotations

import contextlib
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
"""A shard to which nothing is written for so long is fetched by another process, too; longer than a store is tried."""
_SHARE = 0.5
"""The part of the disk that the cache may use if OUTLAST_CACHE_SIZE is not set; arbitrary."""
_SPARE = 0.05
"""The part of the disk that it leaves free then; arbitrary."""
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


def cache(environ: Mapping[str, str]) -> Path:
    """The cache directory of this machine."""
    if given := environ.get(Env.CACHE):
        return Path(given).expanduser()
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "outlast"


def limit(cache: Path, environ: Mapping[str, str], used: int) -> int:
    """Bytes that the cache may hold, of which `used` are there: OUTLAST_CACHE_SIZE, else half of the disk; less if the disk has
    not so much left. Raises OutlastError."""
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
"""All that a cache holds, but for what is being fetched."""


def make(cache: Path, needed: int, things: Things, environ: Mapping[str, str]) -> int:
    """Remove things until `needed` more bytes fit below the limit; returns the bytes that are still missing."""
    with file_locks.attempted(cache / ".room", wait=True):
        return _made(cache, needed, things, environ)


@contextlib.contextmanager
def claimed(cache: Path, sha256: str, size: int, things: Things, environ: Mapping[str, str]) -> Iterator[tuple[Path | None, int]]:
    """Make room for a shard, and let no other process fetch it meanwhile. Yields where to write it, and the bytes that are still
    missing; None if another process fetches it, or just has. One that has not written for `_STILL_S` is not waited for."""
    with contextlib.ExitStack() as claim:
        with file_locks.attempted(cache / ".room", wait=True):  # so that nobody takes what is not locked yet for a leftover
            home = cache / "coming" / f"{sha256}.{size}"
            home.mkdir(parents=True, exist_ok=True)
            ours = claim.enter_context(file_locks.attempted(home)) or _still(home)
            ours = ours and not any(thing.path.name == sha256 and thing.size == size for thing in shards(cache))
            missing = _made(cache, 0, things, environ) if ours else 0
        # A name of its own: a thread that an earlier attempt has left behind may still write.
        path = home / uuid.uuid4().hex
        try:
            yield path if ours else None, missing
        finally:
            path.unlink(missing_ok=True)  # what is damaged, or half: the next attempt would add another one


def _still(home: Path) -> bool:
    """Whether the process that fetches a shard stands still, e.g. was stopped: others fetch it, too."""
    newest = home.stat().st_mtime
    for path in home.iterdir():
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    if still := time.time() - newest > _STILL_S:
        log.warning("outlast: the process that fetches %s has not written for %.0f s: it is fetched again", home.name, _STILL_S)
    return still


def _made(cache: Path, needed: int, things: Things, environ: Mapping[str, str]) -> int:
    needed += _coming(cache)  # first: what arrives meanwhile counts twice, and not never
    found = things(cache)
    total = sum(thing.size for thing in found)
    missing = total + needed - limit(cache, environ, total)
    for thing in sorted(found, key=lambda thing: thing.used):
        if missing <= 0:
            break
        if thing.remove():
            missing -= thing.size
    return max(0, missing)


def _coming(cache: Path) -> int:
    """The bytes of the shards that are being fetched; removes what processes that were killed have left."""
    size = 0
    for home in cache.glob("coming/*"):
        if not (ours := re.fullmatch(r"[0-9a-f]+\.(\d+)", home.name)):
            continue
        if file_locks.free(home):
            shutil.rmtree(home, ignore_errors=True)
        else:
            size += int(ours[1])
    return size


def shards(cache: Path) -> Iterator[Thing]:
    """The shards of this machine."""
    for path in cache.glob("shards/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield Thing(path, status.st_size, status.st_atime, lambda path=path: _removed(path))  # type: ignore[misc]


def _removed(path: Path) -> bool:
    """Remove a shard unless somebody reads it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if not file_locks.acquire(file.fileno()):
            return False
        os.unlink(path)
    return True
