"""Shards of a store, for training: asked for by files, fetched by a process apart (`prepare.fetcher`), read from the cache.

Training imports no store. The first reader that needs something starts the fetcher of its place, whatever has started training;
there is one per machine and place, which ends when no reader is left. If it is killed, the next look starts another. Waiting is a
sign of life: a store that cannot be reached is no hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import outlast
from outlast import file_locks, units
from outlast.contract import Env
from outlast.data import shards as prepared
from outlast.data.shards import Manifest, Shard
from outlast.errors import OutlastError
from outlast.hangs import stall
from outlast.workerfiles import wants

log = logging.getLogger("outlast")

_POLL_S = 0.02
_LONGEST_POLL_S = 0.2
_TELL_S, _AGAIN_S = 10.0, 60.0
"""A wait of this long is reported, and reported again after so long."""
_STARTS = 5
"""Fetchers started in vain before we give up."""
_START_S = 5.0
"""How long a fetcher may take to start."""


class Fetched:
    """Shards in a store."""

    remote = True

    def __init__(self, url: str, window: int, patience_s: float) -> None:
        self.name, self.keeps = url, window
        self._place = wants.Place(url, wants.cache(os.environ))
        try:
            self._place.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutlastError(
                f"the cache {self._place.cache} cannot be written: {error.strerror}; correct its permissions, or let "
                "OUTLAST_CACHE name another directory"
            ) from error
        self._patience_s = patience_s
        self._reader: wants.Reader | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin as another reader: at the start, and in a process that was forked or got this by pickle."""
        self._ahead: list[Shard] = []
        self._files: list[str] = []
        self._now, self._pid = 0, os.getpid()

    def manifest(self) -> Manifest:
        """The manifest as it is in the store now; if the store cannot be reached, the last one seen."""
        for said in self._waiting("its manifest"):
            if self._known.name in said.looked:
                break
            if said.away and (self._place.manifest()):
                log.warning("outlast: %s; going on with what is in this machine's cache", said.away)
                break
            self._refused(said, wants.MANIFEST)
        manifest = prepared.parse(self._place.manifest(), self.name)
        for shard in (shard for part in manifest.parts.values() for shard in part.shards):
            if not wants.named(shard.sha256):
                raise OutlastError(
                    f"{shard.file} of {self.name} has the sha256 {shard.sha256[:70]!r}, which is none; prepare the data again"
                )
        return manifest

    def hold(self, shard: Shard) -> tuple[Path, int | None]:
        """A shard in the cache, with its shared lock."""
        if (held := self._held(shard)) is None:
            self._want(first=shard)
            for said in self._waiting(shard.file):
                if (held := self._held(shard)) is not None:
                    break
                self._refused(said, shard.sha256)
            self._want()
        assert held is not None
        return self._place.shard(shard.sha256), held

    def file(self, name: str) -> Path:
        """A small file in the cache."""
        if not wants.plain(name):
            raise OutlastError(f"{name!r} is not the name of a file beside the shards of {self.name}; correct it")
        path = self._place.file(name)
        if not path.exists():
            self._files.append(name)
            self._want()
            for said in self._waiting(name):
                if path.exists():
                    break
                self._refused(said, name)
        return path

    def want(self, shards: Sequence[Shard], now: int) -> None:
        """Announce the shards that are read next, the first `now` of them at once."""
        self._ahead, self.keeps = list(shards), max(self.keeps, now)
        self._now = now
        self._want()
        if any(not self._place.shard(shard.sha256).exists() for shard in shards):
            self._ensure_fetcher()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    @property
    def _known(self) -> wants.Reader:
        """This process as a reader."""
        if self._pid != os.getpid():
            self._reader = None
            self._forget()
        if self._reader is None:
            self._reader = wants.Reader(self._place)
        return self._reader

    def _want(self, first: Shard | None = None) -> None:
        known = self._known  # first: a fork begins without what its parent wants
        ordered = [first, *(shard for shard in self._ahead if shard != first)] if first else self._ahead
        rows = [(shard.file, shard.bytes, shard.sha256) for shard in ordered]
        known.want(wants.Want(rows, self._now + bool(first), self._files))

    def _held(self, shard: Shard) -> int | None:
        """The shared lock of a shard; None if it is not in the cache."""
        path = self._place.shard(shard.sha256)
        try:
            held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if file_locks.acquire(held, share=True) and (status := os.fstat(held)).st_nlink:  # else it is being removed
            if status.st_size == shard.bytes:
                with contextlib.suppress(PermissionError):  # it belongs to another user
                    os.utime(held, ns=(time.time_ns(), status.st_mtime_ns))
                return held
            path.unlink(missing_ok=True)  # cut off by a power failure
        os.close(held)
        return None

    def _refused(self, said: wants.Said, what: str) -> None:
        if what in said.refused:
            raise OutlastError(said.refused[what])

    def _waiting(self, what: str) -> Iterator[wants.Said]:
        """What the fetcher says, again and again, until the caller has what it waits for. Raises OutlastError after too long."""
        begun = tell = time.monotonic()
        pause, watch, self._starts, self._started = _POLL_S, stall.watch(), 0, float("-inf")
        reader = self._known
        while True:
            self._ensure_fetcher()
            said = self._place.said()
            yield said if reader.name in said.readers else wants.Said()
            time.sleep(pause)
            watch.alive()
            pause, waited = min(_LONGEST_POLL_S, pause * 1.5), time.monotonic() - begun
            if said.away and waited >= self._patience_s:
                raise OutlastError(
                    f"{said.away}; waited {units.human_seconds(waited)} for {what} of {self.name}; "
                    "see that the store can be reached, and start again: the run goes on where it was"
                )
            if waited >= _TELL_S and time.monotonic() >= tell:
                tell = time.monotonic() + _AGAIN_S
                why = said.away or said.full or "it is being fetched"
                log.warning("outlast: waiting for %s of %s, for %s so far: %s", what, self.name, units.human_seconds(waited), why)

    def _ensure_fetcher(self) -> None:
        """Start the fetcher of this place unless there is one."""
        lock = self._place.home / "lock"
        if not file_locks.free(lock):
            self._starts = 0
            return
        with file_locks.attempted(self._place.home / "starting") as ours:
            if not ours or time.monotonic() - self._started < _START_S:
                return
            if self._starts >= _STARTS:
                raise OutlastError(f"shards of {self.name} cannot be fetched: {self._last_words()}")
            self._starts, self._started = self._starts + 1, time.monotonic()
            _start(self._place)

    _starts, _started = 0, float("-inf")

    def _last_words(self) -> str:
        """The last line that a fetcher printed."""
        try:
            lines = (self._place.home / "log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "the process that fetches ends at once, and does not say why"


def _start(place: wants.Place) -> None:
    """Start a fetcher in a session of its own; it is no child of ours, so it is not waited for."""
    above = str(Path(outlast.__file__).parents[1])
    path = os.pathsep.join(filter(None, [above, os.environ.get("PYTHONPATH", "")]))
    with (place.home / "log").open("wb") as output:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", sys.executable, "-m", wants.FETCHER, place.url],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, Env.CACHE: str(place.cache.absolute())},
            check=True,
        )
