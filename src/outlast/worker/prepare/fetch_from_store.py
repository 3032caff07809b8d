"""Fetches a tree of files from a store, with all files in the same version, for `data_cache` and `code_placement`.

    listing = look(url, "data[0].from")         list the objects in the store now
    consistent(listing, into, ...)              fetch those that are missing here, again if the store changes in the meantime

A file gets its final name only once it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from outlast.base import units
from outlast.base.errors import Changed, Missing, OutlastError, StoreError
from outlast.data import dataset_directory
from outlast.storage import store
from outlast.storage.store import Entry, Store
from outlast.storage.sync import push_and_pull, thread_pool

PROGRESS_S = 5.0
_ATTEMPTS = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Listing:
    """A listing of a place in a store: all objects below a prefix, or one object."""

    url: str
    field: str
    """The job file's field with this URL, such as `data[0].from`."""
    place: Store
    """The store to which the entries' keys are relative."""
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The place's name in messages."""
        return f"{self.field} ({self.url})"

    @cached_property
    def version(self) -> str:
        """A digest of the files' names, sizes and etags."""
        rows = sorted([entry.key, entry.size, entry.etag] for entry in self.entries)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def look(url: str, field: str) -> Listing:
    """List the objects at `url`, the value of the job file's `field`. Raises StoreError, and OutlastError if the list is empty or
    incomplete, or if the names cannot form a directory tree."""
    place, name = store.open_(url), f"{field} ({url})"
    found = [entry for entry in place.entries() if entry.key and entry.key != push_and_pull.MANIFEST]
    above = {entry.key[:at] for entry in found for at, letter in enumerate(entry.key) if letter == "/"}
    # Web consoles create a directory as an empty object `directory/`. A listing drops the slash, and `head` finds nothing.
    empty = (thread_pool.Job(entry, 0, partial(place.head, entry.key)) for entry in found if not entry.size)
    with contextlib.closing(thread_pool.work(empty, threading.Event())) as outcomes:
        absent = {entry.key: error for entry, _, error in outcomes if error}
    for error in absent.values():
        if not isinstance(error, Missing):
            raise error
    entries = tuple(entry for entry in found if entry.size or entry.key not in above | absent.keys())
    if not entries and "/" in place.url.partition("://")[2]:
        parent, _, key = place.url.rpartition("/")
        place = store.open_(parent)
        with contextlib.suppress(Missing):
            entries = (place.head(key),)
    if not entries:
        raise OutlastError(f"{name} is empty; put files there, or correct the URL")
    keys = {entry.key for entry in entries}
    if dataset_directory.COMING in keys and not keys & {dataset_directory.MARKER, dataset_directory.MANIFEST}:
        raise OutlastError(
            f"{name} is not complete: outlast data get or prepare has not finished there; wait for it, or run it again"
        )
    if both := keys & above:
        raise OutlastError(f"{name} has both a file and a directory {min(both)}; rename one of them")
    return Listing(url, field, place, entries)


def consistent(
    listing: Listing,
    into: Callable[[Listing], Path],
    *,
    begins: Callable[[Listing, Sequence[Entry]], None] = lambda *_: None,
    say: Say,
    stop: threading.Event,
) -> Listing:
    """Fetch a listing to the directory that `into(listing)` returns, and return the listing that was fetched. If files change in
    the meantime, list and fetch the place again, so that all files have the same version. `begins` is called first, with the
    listing and the files that the directory lacks or has in another size."""
    problem: StoreError | None
    for attempt in range(_ATTEMPTS):
        tree, problem = into(listing), None
        missing = [entry for entry in listing.entries if _size(tree / entry.key) != entry.size]
        begins(listing, missing)
        if not missing:
            if not attempt:
                say(f"{listing.name} is here already")
            return listing
        try:
            _receive(listing, missing, tree, say, stop)
        except (Missing, Changed) as error:
            problem = error
        now = look(listing.url, listing.field)
        if now.version == listing.version:
            if problem:
                raise problem
            return listing
        say(f"{listing.name} has changed while it was fetched; fetching again")
        listing = now
    raise StoreError(f"{listing.name} changes faster than it can be fetched; copy it to a separate place", retry=True)


def _receive(listing: Listing, missing: Sequence[Entry], tree: Path, say: Say, stop: threading.Event) -> None:
    """Fetch the missing files to `tree`. Raises StoreError and OSError."""
    for directory in {tree, *((tree / entry.key).parent for entry in missing)}:
        directory.mkdir(parents=True, exist_ok=True)
    needed, free = sum(entry.size for entry in missing), shutil.disk_usage(tree).free
    if needed > free:
        sizes = f"needs {units.human_bytes(needed)}, the disk of {tree} has {units.human_bytes(free)} left"
        raise OutlastError(f"{listing.name} {sizes}; make room there, or let OUTLAST_CACHE name a directory of a larger disk")
    say(f"fetching {listing.name}: {units.count(len(missing), 'file')}, {units.human_bytes(needed)}")
    meter = Meter(listing.name, needed, say=say)
    places = [(entry.key, entry.size, tree / entry.key) for entry in missing]
    push_and_pull.receive(listing.place, places, progress=meter.advance, stop=stop)
    meter.end()


class Meter:
    """Reports a fetch's progress every few seconds. Called from many threads."""

    def __init__(self, name: str, total: int = 0, *, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._say, self._clock = name, total, say, clock
        self._done = 0
        self._begun = self._reported = clock()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Count received bytes."""
        with self._lock:
            self._done += count
        self.reached(self._done, self._total)

    def reached(self, done: int, total: int) -> None:
        """Record that `done` of `total` bytes (0 if unknown) were received."""
        if (now := self._clock()) - self._reported >= PROGRESS_S:
            self._reported = now
            of = f" of {units.human_bytes(total)}" if total else ""
            rate = units.human_bytes(done / (now - self._begun))
            self._say(f"fetching {self._name}: {units.human_bytes(done)}{of}, {rate}/s")

    def end(self) -> None:
        seconds = self._clock() - self._begun
        self._say(f"fetched {self._name}: {units.human_bytes(self._total)} in {units.human_seconds(seconds)}")


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1
