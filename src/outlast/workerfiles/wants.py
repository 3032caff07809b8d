"""The files by which training asks for shards of a store, and a process apart brings them into this machine's cache.

    <cache>/shards/<sha256>                       a shard, whole and checked; whoever reads it holds its shared lock
    <cache>/places/<name>-<digest of the URL>/    one place of a store
        lock                                      held by the fetcher of this place
        manifest.json                             as it was when somebody asked last
        files/<digest of the manifest>/<name>     small files, e.g. tokenizer.json
        wants/<reader>.json                       what a reader needs now and next (`Want`)
        wants/<reader>.lock                       held by the reader as long as it lives
        said.json                                 what the fetcher says (`Said`)
        coming/                                   what it is fetching
        log                                       its output

`training.fetched` is the reader, `prepare.fetcher` the fetcher. Files are replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast import file_locks, files
from outlast.contract import Env

MANIFEST = "manifest.json"
FETCHER = "outlast.prepare.fetcher"
"""The module that is run as `python -m outlast.prepare.fetcher URL`."""


def cache(environ: Mapping[str, str]) -> Path:
    """The cache directory of this machine."""
    if given := environ.get(Env.CACHE):
        return Path(given).expanduser()
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "outlast"


def named(sha256: str) -> bool:
    """Whether a shard has a checksum, by which the cache can name it."""
    return re.fullmatch(r"[0-9a-f]{64}", sha256) is not None


def plain(name: str) -> bool:
    """Whether a name is one of a file beside the shards, and no path to elsewhere."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None


def shards(cache: Path) -> Path:
    """The directory of all shards of this machine."""
    return cache / "shards"


@dataclasses.dataclass(frozen=True)
class Place:
    """One place of a store, in the cache of this machine."""

    url: str
    cache: Path

    @property
    def home(self) -> Path:
        """Its directory."""
        url = self.url.rstrip("/")
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", url.rpartition("/")[2])[:40]
        return self.cache / "places" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def shard(self, sha256: str) -> Path:
        """The path of a shard once it is here."""
        return shards(self.cache) / sha256

    def manifest(self) -> bytes:
        """The manifest in the cache; empty if there is none."""
        try:
            return (self.home / MANIFEST).read_bytes()
        except FileNotFoundError:
            return b""

    def file(self, name: str) -> Path:
        """The path of a small file that belongs to the manifest in the cache."""
        return self.home / "files" / hashlib.sha256(self.manifest()).hexdigest()[:16] / name

    def said(self) -> Said:
        """What the fetcher says."""
        return heard(self.home)

    def say(self, said: Said) -> None:
        """Replace what the fetcher says."""
        files.replace(self.home / "said.json", json.dumps(dataclasses.asdict(said)))


@dataclasses.dataclass(frozen=True)
class Want:
    """What a reader wants."""

    shards: Sequence[Sequence[str | int]] = ()
    """(file, bytes, sha256) of each, in the order of their use."""
    now: int = 0
    """How many of them it reads already: they are fetched even if the cache becomes larger than its limit."""
    files: Sequence[str] = ()
    """Names of small files."""


@dataclasses.dataclass
class Said:
    """What a fetcher says to its readers."""

    pid: int = 0
    readers: list[str] = dataclasses.field(default_factory=list)
    """The readers whose wants it knows; for others, what it says may be old."""
    looked: list[str] = dataclasses.field(default_factory=list)
    """The readers for which it has read the manifest."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a shard (by its sha256), a small file or the manifest (by name) cannot be had: an error message."""
    away: str = ""
    """Why the store cannot be reached at present; the fetcher keeps trying."""
    full: str = ""
    """Why the fetcher does not read ahead."""


def heard(home: Path) -> Said:
    """What the fetcher of the place with this directory says."""
    try:
        return Said(**json.loads((home / "said.json").read_text()))
    except (OSError, ValueError, TypeError):
        return Said()


class Reader:
    """One reader of a place: its wants are heard as long as this object lives, and no longer than its process."""

    def __init__(self, place: Place) -> None:
        directory = place.home / "wants"
        directory.mkdir(parents=True, exist_ok=True)
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._pid = os.getpid()
        self._file, self._lock = directory / f"{self.name}.json", directory / f"{self.name}.lock"
        files.replace(self._file, json.dumps(dataclasses.asdict(Want())))
        held = None
        while held is None or not self._lock.exists():  # else the fetcher has found it unlocked just now
            if held is not None:
                os.close(held)
            held = file_locks.shared(self._lock)
        self._held = held

    def want(self, want: Want) -> None:
        """Replace what this reader wants."""
        files.replace(self._file, json.dumps(dataclasses.asdict(want)))

    def __del__(self) -> None:
        if (held := getattr(self, "_held", None)) is not None:
            os.close(held)
            if self._pid == os.getpid():  # else this is a fork's copy
                self._file.unlink(missing_ok=True)
                self._lock.unlink(missing_ok=True)


def readers(home: Path) -> dict[str, Want]:
    """What the living readers of the place with this directory want, by name; removes the files of dead ones."""
    found = {}
    for lock in sorted((home / "wants").glob("*.lock")):
        file = lock.with_suffix(".json")
        if file_locks.free(lock):
            lock.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            continue
        try:
            found[lock.stem] = Want(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # its reader is leaving
            continue
    return found
