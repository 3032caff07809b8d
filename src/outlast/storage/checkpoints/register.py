"""Keeps a run's register in a store: which generation may commit, and which checkpoints are committed.

Nothing else in the store has several writers. `Swapped` is one object, `checkpoints/latest`, replaced by compare-and-swap.
`Named` is for stores without compare-and-swap (`rclone serve s3`, directories): a set of names below `checkpoints/latest.<run>/`,
each written by one generation and never rewritten. With both, a committed checkpoint stays committed until it expires or is
withdrawn, a generation commits nothing once a later one has begun, and a writer that dies or loses a response may start over. See
docs/decisions/0007-commits-in-a-store.md and 0069-the-way-back.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from outlast.base.errors import Changed, Exists, Missing, Superseded, Unreachable
from outlast.job import contract
from outlast.storage import runs
from outlast.storage.checkpoints import register_rules
from outlast.storage.checkpoints.register_rules import Latest, Names, Place
from outlast.storage.store import Store

LATEST = f"{contract.CHECKPOINTS}/latest"
_ATTEMPTS = 50
"""Number of lost races after which contention is reported. The value is arbitrary."""


class Register(Protocol):
    """A register of either kind. All methods may raise StoreError."""

    def acquire(self, generation: int) -> Latest:
        """Begin `generation`, so that earlier ones can no longer commit. Raises Superseded if a later generation has begun."""

    def add(self, place: Place, generation: int, instead: Place | None = None) -> Latest:
        """Commit a checkpoint, in place of the damaged one `instead` if given, and return the new register. Raises Superseded.

        A checkpoint is not added if it is `register_rules.refused`, or if another one is registered at its step.
        """

    def drop(self, places: Sequence[Place], *, withdrawn: bool = False) -> Latest | None:
        """Remove those of `places` that are obsolete (with `withdrawn`, all of them), and return the new register."""


def open_(store: Store, run: str) -> Register:
    """Return a run's register, of the kind that the store supports."""
    return Swapped(store, run) if store.conditional() else Named(store, run)


def read(store: Store, run: str) -> Latest | None:
    """Read a run's register, or rebuild it from the run's checkpoints without writing it. Returns None if the run has neither."""
    latest, _ = _object(store)
    if latest:
        return latest if latest.run == run else None
    return Named(store, run).names().latest or register_rules.rebuilt(run, finished(store, run))


def finished(store: Store, run: str) -> list[Place]:
    """Return the run's checkpoints that have a COMMIT, and thus all their files."""
    places = []
    for entry in store.entries(contract.CHECKPOINTS):
        key = entry.key.removeprefix(f"{contract.CHECKPOINTS}/")
        place = Place.parse(key, run)
        if place and key == f"{place.key}/{contract.COMMIT}":
            places.append(place)
    return places


def _object(store: Store) -> tuple[Latest | None, str]:
    """Return the content of `checkpoints/latest` (None if damaged), and its etag (empty if missing)."""
    try:
        text, entry = store.read(LATEST)
    except Missing:
        return None, ""
    try:
        return Latest.parse(text), entry.etag
    except ValueError:
        return None, entry.etag


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A register in one object."""

    store: Store
    run: str

    def acquire(self, generation: int) -> Latest:
        """Begin `generation`, even if the register is another run's, as long as this run owns `run.json`; see `Register`."""
        for _ in range(_ATTEMPTS):
            current, etag = _object(self.store)
            latest = current
            if latest is None or latest.run != self.run:
                runs.check(self.store, self.run)
                lost = Named(self.store, self.run).names().latest
                latest = lost or register_rules.rebuilt(self.run, finished(self.store, self.run)) or Latest(self.run, 0)
            if reason := register_rules.superseded(latest, self.run, generation):
                raise Superseded(reason)
            if latest is current and latest.generation == generation:
                return latest
            if self._swap(new := register_rules.acquired(latest, generation, finished(self.store, self.run)), etag):
                return new
        raise self._contended()

    def add(self, place: Place, generation: int, instead: Place | None = None) -> Latest:
        for _ in range(_ATTEMPTS):
            latest, etag = _object(self.store)
            if latest and latest.run == self.run and latest.at(place.step) == place:
                return latest  # an earlier attempt may have succeeded although its response was lost
            if reason := register_rules.superseded(latest, self.run, generation):
                raise Superseded(reason)
            if latest is None or latest.generation < generation:  # the register was removed or damaged
                self.acquire(generation)
                continue
            if register_rules.refused(latest, place) or latest.at(place.step) not in (None, instead):
                return latest
            if self._swap(new := latest.added(place), etag):
                return new
        raise self._contended()

    def drop(self, places: Sequence[Place], *, withdrawn: bool = False) -> Latest | None:
        for _ in range(_ATTEMPTS):
            latest, etag = _object(self.store)
            if latest is None or latest.run != self.run:
                return None
            new = latest.without([place for place in places if withdrawn or register_rules.obsolete(latest, place)])
            if new == latest or self._swap(new, etag):
                return new
        raise self._contended()

    def _swap(self, new: Latest, etag: str) -> bool:
        text = new.text(time.time())
        try:
            if etag:
                self.store.replace(LATEST, text, etag)
            else:
                self.store.create(LATEST, text)
        except (Changed, Exists):
            return False
        return True

    def _contended(self) -> Unreachable:
        return Unreachable(f"{self.store.url}/{LATEST} changes whenever we would change it; is more than one job writing there?")


@dataclasses.dataclass(frozen=True)
class Named:
    """A register in a set of names.

    A generation announces itself before it reads, and reads again after proposing a commit, so that of two racing generations at
    least one notices the other.
    """

    store: Store
    run: str

    @property
    def _below(self) -> str:
        return f"{LATEST}.{self.run}"

    def names(self) -> Names:
        """Read the register."""
        for _ in range(_ATTEMPTS):
            names = self.store.names(self._below)
            content = Names.read(names, self.run)
            # Listings are not atomic: one without an owner may have missed the old owner, before the new one was written.
            if content.latest or not content.announced or names == self.store.names(self._below):
                return content
        return content

    def acquire(self, generation: int) -> Latest:
        """Begin `generation`, and commit the previous generation's proposals, which it may have reported as committed."""
        content = self.names()
        if content.latest and content.latest.generation == generation == content.announced:
            return content.latest
        runs.check(self.store, self.run)
        self._write(register_rules.announcement(generation))
        content = self.names()
        self._check(content, generation)
        if content.latest and content.latest.generation == generation:
            return content.latest
        latest, etag = (content.latest, "") if content.latest else _object(self.store)
        if latest is None or latest.run != self.run:
            latest = register_rules.rebuilt(self.run, finished(self.store, self.run)) or Latest(self.run, 0)
        latest = register_rules.completed(latest, content.proposed)
        if reason := register_rules.superseded(latest, self.run, generation):
            raise Superseded(reason)
        for place in latest.places:
            self._write(register_rules.commitment(generation, place))
        if etag:  # written when the store still supported compare-and-swap; readers would use it
            self.store.delete([LATEST])
        self._write(register_rules.ownership(generation))
        self._check(self.names(), generation)
        # Names of the previous owner stay until the next generation begins, for listings in progress.
        old = [name for name in self.store.names(self._below) if (register_rules.generation_of(name) or 0) < latest.generation]
        self.store.delete([f"{self._below}/{name}" for name in old])
        return dataclasses.replace(latest, generation=generation)

    def add(self, place: Place, generation: int, instead: Place | None = None) -> Latest:
        for proposed in (True, False):
            latest = self._open(place, generation)
            if register_rules.refused(latest, place) or latest.at(place.step) not in (None, instead):
                return latest
            self._write(register_rules.commitment(generation, place, proposed=proposed))
        if instead:
            self._forget(generation, [instead])
        return latest.added(place)

    def _open(self, place: Place, generation: int) -> Latest:
        """Read the register before committing `place`. Raises Superseded if `generation` may not commit it."""
        content = self.names()
        if content.latest and content.latest.at(place.step) == place:
            return content.latest
        self._check(content, generation)
        if content.latest is None or content.latest.generation < generation:  # the register was removed
            return self.acquire(generation)
        return content.latest

    def drop(self, places: Sequence[Place], *, withdrawn: bool = False) -> Latest | None:
        latest = self.names().latest
        if latest is None:
            return None
        dropped = [place for place in places if withdrawn or register_rules.obsolete(latest, place)]
        self._forget(latest.generation, dropped)
        return latest.without(dropped)

    def _forget(self, generation: int, places: Sequence[Place]) -> None:
        names = [
            register_rules.commitment(generation, place, proposed=proposed) for place in places for proposed in (True, False)
        ]
        self.store.delete([f"{self._below}/{name}" for name in names])

    def _check(self, content: Names, generation: int) -> None:
        if reason := register_rules.superseded(Latest(self.run, content.announced), self.run, generation):
            raise Superseded(reason)

    def _write(self, name: str) -> None:
        self.store.put(f"{self._below}/{name}", b"{}\n")
