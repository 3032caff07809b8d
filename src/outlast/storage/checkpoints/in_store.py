"""Commits, fetches, verifies and prunes a run's checkpoints in a store.

Below the run's prefix, the store contains

    checkpoints/latest                                the register: the owner and the committed checkpoints (`register`)
    checkpoints/step-00001200/<run>-g4-5f3a9c01/      the files that generation 4 saved, and COMMIT (`commit_to_store`)
    checkpoints/step-00001200/READING-<id>            the lease of a process that reads a checkpoint of this step

Whichever process dies and whichever response is lost, every checkpoint in the register is complete and has one writer. A
generation commits nothing once its successor has begun. The newest step in the register decreases only if checkpoints with wrong
state are withdrawn: WITHDRAWN then replaces their COMMIT. The last two checkpoints and all that are being read are kept. See
docs/decisions/0007-commits-in-a-store.md and 0069-the-way-back.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from outlast.base import units
from outlast.base.errors import Denied, OutlastError, StoreError, Superseded
from outlast.job import contract
from outlast.storage.checkpoints import on_disk, register, register_rules
from outlast.storage.checkpoints.commit_to_store import WITHDRAWN, Damaged, DamagedHere, Parts, Progress
from outlast.storage.checkpoints.register_rules import Latest, Place
from outlast.storage.checkpoints.retention import Metric, Retention, withdrawn
from outlast.storage.store import Entry, Store

__all__ = ["Checkpoint", "Checkpoints", "Damaged", "Outcome"]

_READING = "READING-"
_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint in a store."""

    place: Place
    commit: on_disk.Commit | None = None
    problem: str = ""
    """Why COMMIT cannot be read; empty if it can."""

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def generation(self) -> int:
        return self.place.generation

    @property
    def metric(self) -> Metric | None:
        return self.commit.metric if self.commit else self.place.metric

    @property
    def time(self) -> float:
        """Time of the commit, in seconds since the epoch; 0 if unknown."""
        return self.commit.time if self.commit else 0.0

    @property
    def bytes(self) -> int:
        """Total size of the files; 0 if unknown."""
        return self.commit.size if self.commit else 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a push."""

    kind: Literal["committed", "there", "expired", "waiting", "damaged"]
    """The kinds mean: committed, already in the store, too old to keep, waiting for another machine's files, damaged locally."""
    reason: str
    missing: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """True if no later push is needed."""
        return self.kind in ("committed", "there", "expired")


class Checkpoints:
    """The checkpoints of `run` in `store`. The constructor sends no request."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run
        self._generation: int | None = None
        self._commits: dict[Place, on_disk.Commit] = {}

    @functools.cached_property
    def _register(self) -> register.Register:
        return register.open_(self.store, self.run)

    def _parts(self, place: Place) -> Parts:
        return Parts(self.store, self.run, place)

    def acquire(self, generation: int) -> Latest:
        """Fence off earlier generations, and return the register.

        Call this before a push, and before choosing a checkpoint to resume from, so that none is committed after the choice.
        Raises StoreError, and Superseded if a later generation has begun or another run owns the prefix.
        """
        latest = self._register.acquire(generation)
        self._generation = generation
        return latest

    def list_(self) -> list[Checkpoint]:
        """Return the committed checkpoints in order of step, including those with an unreadable COMMIT."""
        latest = register.read(self.store, self.run)
        if latest is None:
            return []
        with ThreadPoolExecutor(_AT_ONCE, "outlast-list") as pool:
            checkpoints = list(pool.map(self._read, latest.places))
        # If an obsolete checkpoint has no COMMIT, it is being removed.
        return [c for c in checkpoints if c.commit or not register_rules.obsolete(latest, c.place)]

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint with a readable COMMIT, or None."""
        latest = register.read(self.store, self.run)
        checkpoints = (self._read(place) for place in reversed(latest.places if latest else ()))
        return next((checkpoint for checkpoint in checkpoints if not checkpoint.problem), None)

    def _read(self, place: Place) -> Checkpoint:
        try:
            return Checkpoint(place, self._parts(place).read_commit())
        except Damaged as problem:
            return Checkpoint(place, problem=str(problem))

    # Pushing

    def push(
        self,
        local: on_disk.Checkpoint,
        *,
        journals: Path,
        progress: Progress = lambda _: None,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Upload a local checkpoint and commit it in the store. Call `acquire` first.

        Files already in the store are not sent again. If a checkpoint is spread over several machines, each pushes its own files,
        and the last machine commits. `journals` is a directory for the journals of unfinished uploads. Raises Superseded,
        Stopped, OSError and StoreError. After an error, the next call resumes the push.
        """
        if self._generation is None:
            raise ValueError("acquire() comes before push()")
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(on_disk.reading(local.path))
                commit = on_disk.read(local.path)
            except FileNotFoundError:
                return Outcome("expired", f"{local.path.name} has been removed here meanwhile")
            except ValueError as error:
                return Outcome("damaged", f"{local.path.name} is damaged here: {contract.COMMIT} cannot be read: {error}")
            if commit.run != self.run:
                raise OutlastError(f"{local.path} is of run {commit.run or '(unnamed)'}, not of run {self.run}")
            place = Place.of(commit)
            self._commits[place] = commit
            latest, instead = self._fenced(), None
            if latest and (reason := register_rules.refused(latest, place)):
                return Outcome("expired", reason)
            # Verify another writer's checkpoint at that step: the run may have skipped it as damaged and saved the step again.
            if latest and (existing := latest.at(place.step)):
                if self._parts(existing).problem(deep=existing != place) is None:
                    return _present(place)
                instead = existing
            try:
                missing = self._parts(place).send(local.path, commit, journals=journals, progress=progress, stop=stop)
            except DamagedHere as problem:
                return Outcome("damaged", str(problem))
            if missing:
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                return Outcome("waiting", f"{local.path.name} waits for {missing[0]}{more}, which another machine has", missing)
            self._fenced()  # optional, but superseded processes then leave fewer objects behind
            self._parts(place).commit(commit)
            latest = self._register.add(place, self._generation, instead)
        if latest.at(place.step) == place:
            return Outcome("committed", f"step {place.step} is in the store")
        reason = register_rules.refused(latest, place)
        return Outcome("expired", reason) if reason else _present(place)

    def _fenced(self) -> Latest | None:
        latest = register.read(self.store, self.run)
        if reason := register_rules.superseded(latest, self.run, self._generation or 0):
            raise Superseded(reason)
        return latest

    def next_(self, waiting: Sequence[on_disk.Checkpoint], retention: Retention) -> on_disk.Checkpoint:
        """Return the checkpoint in `waiting` to push next, as `register_rules.pressing` chooses it."""
        latest = self._fenced() if retention.best and len(waiting) > 1 else None
        return register_rules.pressing(self._counted(latest, retention) if latest else (), waiting, retention)

    def _counted(self, latest: Latest, retention: Retention) -> list[Checkpoint]:
        known = [Checkpoint(place, self._commits.get(place)) for place in latest.places]
        counted = [self._read(c.place) if not c.commit and retention.needs_commit(c) else c for c in known]
        self._commits = {c.place: c.commit for c in counted if c.commit}
        return counted

    def forget(self, journals: Path) -> None:
        """Abort unfinished uploads. Call this once there is nothing left to push.

        `journals` must contain only the journals of checkpoints.
        """
        for journal in sorted(journals.glob("*.upload")):
            self.store.forget(journal)

    # Reading

    def verify(
        self,
        checkpoint: Checkpoint,
        *,
        deep: bool = False,
        progress: Progress = lambda _: None,
        stop: threading.Event | None = None,
    ) -> str | None:
        """Verify the sizes of a checkpoint's files and, with `deep`, their checksums. Returns the first problem, or None."""
        return self._parts(checkpoint.place).problem(deep=deep, progress=progress, stop=stop)

    def fetch(
        self, checkpoint: Checkpoint, directory: Path, *, progress: Progress = lambda _: None, stop: threading.Event | None = None
    ) -> on_disk.Checkpoint:
        """Fetch a checkpoint to `directory`, verify it, and make it durable.

        If `directory` already contains a valid checkpoint at the same step from the same or a later generation, that one is
        returned instead. Raises Damaged if the stored checkpoint differs from its COMMIT or was removed. After Stopped, OSError
        or StoreError, the next call fetches only the missing files.
        """
        parts = self._parts(checkpoint.place)
        if here := _valid_here(directory, checkpoint, self.run):
            return here
        with on_disk.fetching(directory, checkpoint.step) as path:
            if here := _valid_here(directory, checkpoint, self.run):  # another process has fetched it while we waited
                with contextlib.suppress(OSError):
                    path.rmdir()
                return here
            with self.reading(checkpoint.place):
                try:
                    commit = parts.read_commit()
                    parts.receive(path, commit, progress=progress, stop=stop)
                except Damaged as problem:
                    raise Damaged(f"{parts.url}: {problem}") from problem
            return on_disk.place(path, commit)

    def restore(
        self,
        directory: Path,
        *,
        say: Callable[[str], None],
        above: int = 0,
        progress: Progress = lambda _: None,
        stop: threading.Event | None = None,
    ) -> on_disk.Checkpoint | None:
        """Fetch the newest valid checkpoint at a step above `above`, or return None if there is none.

        Raises Stopped, OSError and StoreError.
        """
        skipped: set[Place] = set()
        # List again each time, because another machine may have committed a checkpoint.
        ways = on_disk.ways_back(directory, self.run)
        while newer := [
            c for c in self.list_() if c.step > above and c.place not in skipped and not withdrawn(c.generation, c.step, ways)
        ]:
            newest = newer[-1]
            try:
                if newest.problem:
                    raise Damaged(f"{self._parts(newest.place).url}: {newest.problem}")
                say(f"fetching the checkpoint of step {newest.step} ({units.human_bytes(newest.bytes)}) from {self.store.url}")
                return self.fetch(newest, directory, progress=progress, stop=stop)
            except Damaged as problem:
                say(f"the checkpoint of step {newest.step} is skipped: {problem}")
                skipped.add(newest.place)
        return None

    @contextlib.contextmanager
    def reading(self, place: Place) -> Iterator[None]:
        """Protect a checkpoint from removal with a lease. Raises Damaged if its removal has begun.

        A remover updates the register before it lists leases, and a reader writes its lease before it reads the register, so at
        least one notices the other.
        """
        key = f"{contract.CHECKPOINTS}/{contract.checkpoint_name(place.step)}/{_READING}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.store.put(key, b"")
        except Denied:  # read-only access: rely on the checksums
            yield
            return
        done = threading.Event()

        def renew() -> None:
            while not done.wait(register_rules.RENEW_S):
                with contextlib.suppress(StoreError):
                    self.store.put(key, b"")

        thread = threading.Thread(target=renew, name="outlast-reading", daemon=True)
        thread.start()
        try:
            latest = register.read(self.store, self.run)
            if latest is None or latest.at(place.step) != place:
                raise Damaged(f"{self._parts(place).url} is no longer kept")
            yield
        finally:
            done.set()
            thread.join()
            with contextlib.suppress(StoreError):
                self.store.delete([key])

    # Removing

    def withdraw(self, ways_back: Sequence[tuple[int, int]]) -> None:
        """Remove from the register the checkpoints that no longer count because the run went back. Their files are kept."""
        latest = register.read(self.store, self.run)
        places = [each for each in latest.places if withdrawn(each.generation, each.step, ways_back)] if latest else []
        for place in places:
            self._parts(place).withdraw()
        if places:
            self._register.drop(places, withdrawn=True)

    def prune(self, retention: Retention, *, dry_run: bool = False) -> list[Place]:
        """Remove expired checkpoints and the files that dead writers left behind. Raises StoreError.

        Returns the expired checkpoints. With `dry_run`, nothing is removed.
        """
        latest = register.read(self.store, self.run)
        if latest is None:
            return []
        counted = self._counted(latest, retention)
        expired = [c.place for c in retention.expired(counted) if not self._being_read(self._below(c.step))]
        if not dry_run:
            if expired:
                latest = self._register.drop(expired) or latest
            self._sweep(latest)
        return expired

    def _sweep(self, latest: Latest) -> None:
        """Delete files of checkpoints that can never be added to the register again."""
        for name in self.store.names(contract.CHECKPOINTS):
            step = on_disk.step_of(name)
            if step is None or latest.at(step) or len(latest.places) < 2 or step > latest.places[-2].step:
                continue
            entries = self._below(step)
            if self._being_read(entries):
                continue
            dead: dict[Place, list[str]] = {}
            for entry in entries:
                place = Place.parse(entry.key.removeprefix(f"{contract.CHECKPOINTS}/"), self.run)
                if place and register_rules.obsolete(latest, place):
                    dead.setdefault(place, []).append(entry.key)
            for place, keys in dead.items():
                if self._parts(place).key(WITHDRAWN) not in keys:
                    self._parts(place).delete(keys)
            self.store.delete([entry.key for entry in entries if _READING in entry.key])

    def _below(self, step: int) -> list[Entry]:
        return list(self.store.entries(f"{contract.CHECKPOINTS}/{contract.checkpoint_name(step)}"))

    def _being_read(self, entries: Iterable[Entry]) -> bool:
        renewed = [entry.modified for entry in entries if entry.key.rpartition("/")[2].startswith(_READING)]
        if not renewed:
            return False
        clock = f"{contract.CHECKPOINTS}/clock"
        self.store.put(clock, b"")
        return register_rules.being_read(renewed, self.store.head(clock).modified)


def _present(place: Place) -> Outcome:
    return Outcome("there", f"step {place.step} is in the store")


def _valid_here(directory: Path, stored: Checkpoint, run: str) -> on_disk.Checkpoint | None:
    own = (c for c in on_disk.list_(directory) if c.run == run and not c.problem)
    same = (c for c in own if c.step == stored.step and c.generation >= stored.generation)
    return next((c for c in same if on_disk.verify(c.path) is None), None)
