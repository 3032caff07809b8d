"""The cache for data and models from stores, shared by all workers and jobs on this machine.

    <cache>/data/<name>-<digest of the URL>/     one place in a store, or one file on a web server (`Web`)
        lock                                     held during a fetch
        <version>/tree/                          the files at one point in time
        <version>/listing.json                   their total size; written last, to mark the version complete
        <version>/listing.partial                the same during a fetch
        <version>/lock                           a shared lock, held by the workers that are using this version
        <version>/runs/                          paths of the pins for runs that use this version

A version's name is the hash of the store's listing, so a version never changes, and a killed fetch resumes. A run records its
first version (its *pin*), so a restarted worker gets the same data even if the store has changed. A version without a pin or
users is removed once a newer one has been fetched, or if the cache needs the space (`data_cache_eviction`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outlast.base import file_locks, files, units
from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.storage import store
from outlast.storage.store import Entry
from outlast.worker.prepare import data_cache_eviction, fetch_from_store
from outlast.worker.prepare.fetch_from_store import Listing, Say

_ELSEWHERE = "correct its permissions, or let OUTLAST_CACHE name another directory"
_LISTING, _PARTIAL = "listing.json", "listing.partial"


def writable(environ: Mapping[str, str]) -> Path:
    """Return the cache directory, creating it if it is missing. Raises OutlastError if it is not writable."""
    directory = data_cache_eviction.cache(environ)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OutlastError(f"the cache {directory} cannot be created: {problem.strerror}; {_ELSEWHERE}") from problem
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OutlastError(f"the cache {directory} cannot be written to; {_ELSEWHERE}")
    return directory


@dataclass
class Version:
    """A version of a place in a store, protected from removal until it is closed."""

    tree: Path
    version: str
    _lock: int

    def close(self) -> None:
        os.close(self._lock)


def has_pin(url: str, pins: Path) -> bool:
    """Return whether a run has pinned a version of a place."""
    return bool(_pinned(_pin(url, pins)))


def _pin(url: str, pins: Path) -> Path:
    same = url if spec.web(url) else store.normalised(url)
    return pins / f"{hashlib.sha256(same.encode()).hexdigest()[:16]}.json"


class Source:
    """The cache for one place in a store. `pins` is a directory that the run's workers on this machine share."""

    def __init__(self, cache: Path, url: str, *, field: str, pins: Path, say: Say, stop: threading.Event | None = None) -> None:
        self._url, self._field, self._pin = url, field, _pin(url, pins)
        self._place = f"{field} ({url})"
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", url.rstrip("/").rpartition("/")[2])[:40]
        self._cache = cache
        self._home = cache / "data" / f"{name}-{self._pin.stem}"
        self._say, self._stop = say, stop or threading.Event()

    def acquire(self) -> Version:
        """Return this run's version, fetching it if it is missing, and protect it from removal until it is closed. Raises
        OSError, and OutlastError if the store fails or no longer has the version."""
        if version := self._lock_version(_pinned(self._pin)):  # without a request to the store
            return version
        waiting = f"waiting for another worker that fetches {self._place}"
        with file_locks.exclusive(self._home / "lock", waiting=lambda: self._say(waiting), stop=self._stop):
            pinned = _pinned(self._pin)
            if version := self._lock_version(pinned):
                return version
            fetched = self._fetch(pinned)
            self._pin.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._pin, json.dumps({"url": self._url, "version": fetched}), durable=True)
            version = self._lock_version(fetched)
            assert version is not None
            self._sweep()
            return version

    def _fetch(self, pinned: str) -> str:
        """Fetch the store's current version, and return its name. Raises OutlastError if the run has pinned another version."""
        listing = fetch_from_store.look(self._url, self._field)
        if pinned in ("", listing.version):
            listing = fetch_from_store.consistent(listing, self._tree, begins=self._begin, say=self._say, stop=self._stop)
        if pinned not in ("", listing.version):
            raise OutlastError(
                f"{self._place} has changed since this run began, and this machine has no copy of the old files; "
                "put the old files back, or start from the beginning with --fresh"
            )
        self._finish(listing)
        return listing.version

    def _lock_version(self, version: str) -> Version | None:
        """Lock a complete version and register our pin in its `runs/`. Returns None if the version is missing."""
        directory = self._home / version
        if not version or not (directory / _LISTING).is_file():
            return None
        with contextlib.suppress(FileNotFoundError):  # the version is being removed
            lock = file_locks.shared(directory / "lock")
            if lock is not None and (directory / _LISTING).is_file():
                with contextlib.suppress(PermissionError):  # the lock file belongs to another user
                    os.utime(lock)
                note = directory / "runs" / hashlib.sha256(str(self._pin).encode()).hexdigest()[:16]
                if not note.is_file():
                    note.parent.mkdir(exist_ok=True)
                    files.replace(note, str(self._pin))
                return Version(directory / "tree", version, lock)
            if lock is not None:
                os.close(lock)
        return None

    def _tree(self, listing: Listing) -> Path:
        return self._home / listing.version / "tree"

    def _begin(self, listing: Listing, missing: Sequence[Entry]) -> None:
        """Mark a version that lacks files as incomplete, and make room for them."""
        directory = self._home / listing.version
        directory.mkdir(parents=True, exist_ok=True)
        if missing or not (directory / _LISTING).is_file():
            files.replace(directory / _PARTIAL, json.dumps({"url": listing.url, "size": listing.size}))
            (directory / _LISTING).unlink(missing_ok=True)
            self._make_room(sum(entry.size for entry in missing))

    def _make_room(self, needed: int) -> None:
        if missing := data_cache_eviction.make(self._cache, needed, things, os.environ):
            more = f"{units.human_bytes(missing)} more than OUTLAST_CACHE_SIZE"
            self._say(f"{self._place} makes the cache {self._cache} larger than it should be: {more} are in use")

    def _finish(self, listing: Listing) -> None:
        directory = self._home / listing.version
        if (directory / _LISTING).is_file():
            return
        tree = directory / "tree"
        expected = {str(tree / entry.key): entry for entry in listing.entries}
        for parent, _, names in os.walk(tree):
            for name in names:
                path = os.path.join(parent, name)
                if entry := expected.get(path):
                    os.chmod(path, 0o444)
                    os.utime(path, (entry.modified, entry.modified))
                else:  # left by a killed fetch
                    os.unlink(path)
        files.flush(directory)
        (directory / _PARTIAL).replace(directory / _LISTING)
        files.sync(directory)

    def _sweep(self) -> None:
        """Remove the versions that no run has locked or pinned, and leftovers of abandoned fetches."""
        pinned = _pinned(self._pin)
        for directory in self._home.iterdir():
            if directory.is_dir() and directory.name != pinned:
                _remove_locked(directory)


def things(cache: Path) -> list[data_cache_eviction.Thing]:
    """Return all of the cache's evictable entries: shards, and complete and partial versions."""
    entries = list(data_cache_eviction.shards(cache))
    for directory in cache.glob("data/*/*/"):
        with contextlib.suppress(OSError):
            listing = directory / _LISTING if (directory / _LISTING).is_file() else directory / _PARTIAL
            lock = directory / "lock"  # missing if the version has never been complete
            used = (lock if lock.exists() else directory).stat().st_mtime
            entries.append(data_cache_eviction.Thing(directory, _size(listing), used, partial(_remove, directory)))
    return entries


@functools.lru_cache
def _size(listing: Path) -> int:
    """Return a version's size in bytes. The result is cached, since it never changes, and old listings are long."""
    content = files.mapping(listing)
    return int(content.get("size") or sum(row[1] for row in content.get("files", ())))


def _remove(directory: Path) -> bool:
    with file_locks.attempted(directory.parent / "lock") as acquired:  # otherwise a fetch is running there
        return acquired and _remove_locked(directory)


def _remove_locked(directory: Path) -> bool:
    """Remove a version unless it is in use or pinned. Returns whether it was removed. The caller holds the place's lock."""
    with file_locks.attempted(directory / "lock") as acquired:  # held until the end, so that no worker starts using it
        notes = (directory / "runs").glob("*")
        if not acquired or any(_pinned(Path(files.text(note))) == directory.name for note in notes):
            return False
        for marker in (_LISTING, _PARTIAL):
            (directory / marker).unlink(missing_ok=True)  # first, since a version without a listing does not exist
        shutil.rmtree(directory, ignore_errors=True)
        return True


class Web(Source):
    """The cache for one file on a web server, with a single version named after its checksum. Archives are unpacked."""

    def _fetch(self, pinned: str) -> str:
        from outlast.data import named_datasets, obtain

        dataset = named_datasets.of_url(self._url)
        directory = self._home / dataset.remotes[0].sha256[:32]
        tree, meter = directory / "tree", fetch_from_store.Meter(f"{self._field} ({dataset.name})", say=self._say)
        obtain.get(dataset, tree, obtain.How(self._say, progress=meter.reached, stop=self._stop))
        size = 0
        for parent, _, names in os.walk(tree):
            for path in (os.path.join(parent, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o444)
                size += os.lstat(path).st_size
        files.replace(directory / _LISTING, json.dumps({"url": self._url, "size": size}), durable=True)
        self._make_room(0)  # the size was unknown before
        return directory.name


def _pinned(pin: Path) -> str:
    return str(files.mapping(pin).get("version", ""))
