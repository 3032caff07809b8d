"""Brings shards of one place of a store into this machine's cache: `python -m outlast.prepare.fetcher URL`.

Started by training processes when they need it (`training.fetched`), one per machine and place; it ends when none of them is
left. It fetches what readers need now, then what they need next, in that order, checks sizes and sha256, and renames: a shard
under its name is whole. Reading ahead stays below the limit of the cache; what is needed now may exceed it. Credentials and
endpoints come from the environment. `workerfiles.wants` describes the files by which it talks with the readers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from outlast import backoff, file_locks, files, store, units, unpack
from outlast.data import shards as prepared
from outlast.errors import Changed, Missing, OutlastError, StoreError
from outlast.prepare import cache, room
from outlast.store import Store
from outlast.sync import transfer
from outlast.workerfiles import wants
from outlast.workerfiles.wants import Place, Said, Want

_POLL_S = 0.1
_IDLE_S = 10.0
"""It ends when there was no reader for this long; arbitrary. Restarted training finds it alive."""
_TRIES = 3
"""Downloads of a shard whose checksum is wrong before it is refused."""
_STORE_S = 20.0
"""How long a request is repeated before readers are told that the store is away."""
_LONGEST_PAUSE_S = 15.0
_FULL_S = 1.0
"""Pause after the disk was full."""
_VERSIONS_S = 30.0
_REST = "see that nothing writes there, or prepare the data again and start a new run"


class Fetcher:
    """Fetches for the readers of one place."""

    def __init__(self, place: Place, environ: Mapping[str, str]) -> None:
        self._place, self._environ = place, environ
        self._store: Store | None = None
        self._said = Said(os.getpid())
        self._readers: dict[str, Want] = {}
        self._ranks: dict[str, int] = {}
        """Of every shard that a reader of this machine wants."""
        self._tried: Counter[str] = Counter()
        self._failed = 0
        """Attempts since the store answered last."""
        self._pause_until = 0.0
        self._coming: dict[str, int] = {}
        """The bytes of each shard that is being downloaded."""
        self._versions: tuple[float, list[room.Thing]] = float("-inf"), []
        """The versions of data in the cache, and when they were looked up."""

    def run(self) -> None:
        """Fetch until no reader is left."""
        shutil.rmtree(self._place.home / "coming", ignore_errors=True)  # of a fetcher that was killed
        wants.shards(self._place.cache).mkdir(parents=True, exist_ok=True)
        self._place.say(self._said)
        seen = time.monotonic()
        while time.monotonic() - seen < _IDLE_S:
            self._attend()
            if self._readers:
                seen = time.monotonic()
            if time.monotonic() >= self._pause_until:
                self._fetch()
            time.sleep(_POLL_S)

    def _attend(self) -> None:
        """Serve what is small, also while shards are fetched."""
        self._hear()
        if time.monotonic() >= self._pause_until:
            self._look()

    def _hear(self) -> None:
        """Read what everybody wants, and say who was heard."""
        self._readers = wants.readers(self._place.home)
        said = self._said
        if set(self._readers) - set(said.readers):  # a new reader is a new attempt at what was refused
            said.refused.clear()
            self._tried.clear()
        said.looked = [name for name in said.looked if name in self._readers]
        self._tell(readers=list(self._readers))

    def _tell(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self._said, name, value)
        if (now := repr(self._said)) != self._written:
            self._written = now
            self._place.say(self._said)

    _written = ""

    def _look(self) -> None:
        """Read the manifest for new readers, and the small files that are wanted."""
        new = [name for name in self._readers if name not in self._said.looked]
        if new and wants.MANIFEST not in self._said.refused:
            with self._answering(wants.MANIFEST):
                text = self._open().get(wants.MANIFEST)
                prepared.parse(text, self._place.url)
                if text != self._place.manifest():
                    files.replace(self._place.home / wants.MANIFEST, text, durable=True)
                self._tell(looked=[*self._said.looked, *new])
        for name in {name for want in self._readers.values() for name in want.files if wants.plain(name)}:
            path = self._place.file(name)
            if self._said.looked and not path.exists() and name not in self._said.refused:
                with self._answering(name):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    files.replace(path, self._open().get(name), durable=True)

    def _open(self) -> Store:
        if self._store is None:
            self._store = store.open_(self._place.url, timeout_s=min(_STORE_S, backoff.timeout_from_environment()))
        return self._store

    @contextlib.contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Turn errors of the block into what readers are told about `what`."""
        try:
            yield
        except (OutlastError, OSError) as error:
            self._troubled(what, what, error)
        else:
            self._answered()

    def _answered(self) -> None:
        self._failed = 0
        self._tell(away="")

    def _refuse(self, what: str, why: str) -> None:
        print(why, flush=True)
        self._tell(refused={**self._said.refused, what: why})

    def _troubled(self, what: str, name: str, error: BaseException) -> None:
        """Refuse what cannot be had; try again after a pause where that can help."""
        if isinstance(error, Missing):
            remedy = "prepare data there (outlast data prepare), or correct the URL" if what == wants.MANIFEST else _REST
            self._refuse(what, f"{self._place.url} has no {name}; {remedy}")
        elif isinstance(error, Changed):
            self._refuse(what, f"{name} of {self._place.url} is not what {wants.MANIFEST} says: {error}; {_REST}")
        elif isinstance(error, StoreError) and error.retry:
            print(error, flush=True)
            self._pause_until = time.monotonic() + backoff.jittered(backoff.exponential(self._failed, 1.0, _LONGEST_PAUSE_S))
            self._failed += 1
            self._tell(away=str(error))
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and self._ranks.get(what, -1) >= 0:
            self._pause_until = time.monotonic() + _FULL_S  # what is read ahead can wait until something may go
            self._tell(full=f"the disk of the cache {self._place.cache} is full")
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            used = units.human_bytes(sum(thing.size for thing in self._things()))
            self._refuse(
                what, f"the disk of the cache {self._place.cache} is full, of which the cache has {used}; make room, or let "
                "OUTLAST_CACHE name a directory of a larger disk"
            )  # fmt: skip
        else:
            self._refuse(what, str(error) if isinstance(error, OutlastError) else f"{name} cannot be cached: {error}")

    # Shards

    def _fetch(self) -> None:
        """Fetch what is missing, the most urgent first, until all is here or the store is in trouble."""
        if next(self._missing(), None) is None:
            return
        try:
            objects = self._open()
        except OutlastError as error:
            for file, _, sha256 in self._missing():
                self._troubled(sha256, file, error)
            return
        with contextlib.closing(transfer.downloads(objects, self._next(), durable=True, tick=self._attend)) as outcomes:
            for one, downloaded, wrong in outcomes:
                sha256 = os.path.basename(one.path)
                self._coming.pop(sha256)
                if downloaded is not None:
                    self._arrived(one.key, sha256)
                elif wrong is not None:
                    self._troubled(sha256, one.key, wrong)
                if self._said.away or time.monotonic() < self._pause_until:
                    break
        self._coming.clear()

    def _missing(self) -> Iterator[tuple[str, int, str]]:
        """(file, bytes, sha256) of the shards to fetch, the most urgent first."""
        rows: dict[str, tuple[int, int, str, int]] = {}
        for want in self._readers.values():
            for rank, (file, size, sha256) in enumerate(want.shards):
                if not wants.named(str(sha256)) or not wants.plain(str(file)):
                    continue  # no reader asks for that
                found = (int(rank >= want.now), rank, str(file), int(size))
                rows[str(sha256)] = min(found, rows.get(str(sha256), found))
        self._ranks = {sha256: rank if later else -1 for sha256, (later, rank, *_) in rows.items()}
        for sha256, (_, _, file, size) in sorted(rows.items(), key=lambda row: row[1]):
            here = self._place.shard(sha256).exists()
            if not here and sha256 not in self._coming and sha256 not in self._said.refused:
                yield file, size, sha256

    def _next(self) -> Iterator[transfer.Wanted]:
        """What to download next, asked for whenever there is capacity: what is wanted may have changed meanwhile."""
        while (row := next(self._missing(), None)) is not None and self._room(row[2], row[1]):
            file, size, sha256 = row
            self._coming[sha256] = size
            yield transfer.Wanted(file, size, str(self._place.home / "coming" / sha256))

    def _things(self) -> list[room.Thing]:
        """All that the cache holds; versions of data as of some seconds ago, since they have many files."""
        if time.monotonic() - self._versions[0] > _VERSIONS_S:
            self._versions = time.monotonic(), list(cache.things(self._place.cache))
        versions = [thing for thing in self._versions[1] if thing.path.exists()]
        ours = self._place.home / "coming"  # parts of what `_coming` counts
        return [*(thing for thing in room.shards(self._place.cache) if thing.path.parent != ours), *versions]

    def _room(self, sha256: str, size: int) -> bool:
        """Make room for a shard; returns whether to fetch it now."""
        others = self._others()
        urgent, rank = self._ranks[sha256] < 0, self._ranks[sha256]

        def keep(thing: room.Thing) -> int | None:
            wanted = self._ranks.get(thing.path.name, others.get(thing.path.name))
            return wanted if wanted is None or urgent or wanted > rank else -1

        needed = size + sum(self._coming.values())
        missing = room.make(self._place.cache, needed, self._things(), self._environ, keep)
        said = f"the cache {self._place.cache} is full: {units.human_bytes(missing)} more than OUTLAST_CACHE_SIZE are in use"
        self._tell(full=said if missing else "")
        return urgent or not missing

    def _others(self) -> dict[str, int]:
        """Ranks of the shards that readers of other places want."""
        found: dict[str, int] = {}
        for home in self._place.cache.glob("places/*"):
            if home != self._place.home:
                for want in wants.readers(home).values():
                    found |= {str(sha256): rank if rank >= want.now else -1 for rank, (*_, sha256) in enumerate(want.shards)}
        return found

    def _arrived(self, file: str, sha256: str) -> None:
        """Check a shard that has come, and give it its name."""
        path = self._place.home / "coming" / sha256
        if (found := unpack.checksum(path)) == sha256:
            path.chmod(0o444)
            path.replace(self._place.shard(sha256))
            self._answered()
            return
        path.unlink()
        self._tried[sha256] += 1
        sums = f"its sha256 is {found[:12]}..., {wants.MANIFEST} says {sha256[:12]}..."
        why = f"{file} of {self._place.url} is damaged: {sums}; {_REST}"
        print(why, flush=True)
        if self._tried[sha256] >= _TRIES:
            self._refuse(sha256, why)


def main() -> None:
    """Fetch for the place that the command line names, unless another process does."""
    place = Place(sys.argv[1], wants.cache(os.environ))
    place.home.mkdir(parents=True, exist_ok=True)
    with file_locks.attempted(place.home / "lock") as ours:
        if ours:
            Fetcher(place, os.environ).run()


if __name__ == "__main__":
    main()
