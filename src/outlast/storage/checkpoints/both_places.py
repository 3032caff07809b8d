"""Finds a run's checkpoints on this machine's disk and in a store, and fetches those to train from or to evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError, StoreError
from outlast.job import contract
from outlast.storage import runs, store
from outlast.storage.checkpoints import in_store, on_disk, retention
from outlast.storage.checkpoints.retention import Metric

if TYPE_CHECKING:
    from outlast.job.backend import Backend

Fetch = Callable[[in_store.Checkpoint, Path], on_disk.Checkpoint]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is on this machine, in the store, or in both places."""

    step: int
    here: on_disk.Checkpoint | None = None
    there: in_store.Checkpoint | None = None

    @property
    def where(self) -> str:
        """Where the checkpoint is: `here`, `store` or `both`."""
        return "both" if self.here and self.there else "here" if self.here else "store"

    @property
    def generation(self) -> int:
        """The generation that saved the checkpoint."""
        readable = self.here if self.here and not self.here.problem else self.there or self.here
        return readable.generation if readable else 0

    @property
    def metric(self) -> Metric | None:
        """The checkpoint's metric, if any."""
        return (self.here and self.here.metric) or (self.there and self.there.metric) or None

    @property
    def problem(self) -> str:
        """Why COMMIT cannot be read; empty if it can."""
        here = f"here: {self.here.problem}" if self.here and self.here.problem else ""
        there = f"in the store: {self.there.problem}" if self.there and self.there.problem else ""
        return "; ".join(filter(None, (here, there)))

    def facts(self) -> dict[str, Any]:
        """Return the fields of COMMIT; all None if neither copy is readable."""
        readable = self.here if self.here and not self.here.problem else self.there.commit if self.there else None
        facts = {name: getattr(readable, name, None) for name in ("run", "generation", "world_size", "time")}
        return {
            **facts,
            "bytes": getattr(self.here if readable is self.here else self.there, "bytes", None) if readable else None,
        }

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in bytes, keyed by name."""
        if self.here:
            return {path.name: path.stat().st_size for path in sorted(self.here.path.iterdir())}
        files = self.there.commit.files if self.there and self.there.commit else {}
        return {name: file["size"] for name, file in sorted(files.items())}

    def plain(self, places: Places, ranks: Mapping[int, int]) -> dict[str, Any]:
        """Return the checkpoint as plain data. `ranks` comes from `Places.ranks`."""
        root = places.there.store.url if places.there else ""
        url = f"{root}/{contract.CHECKPOINTS}/{self.there.place.key}" if self.there else None
        path = str(self.here.path) if self.here else None
        good = {"metric": self.metric.value, "by": self.metric.by} if self.metric else {"metric": None, "by": None}
        facts = {**self.facts(), **good, "best": ranks.get(self.step)}
        return {"step": self.step, **facts, "where": self.where, "path": path, "url": url, "problem": self.problem}


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a run's checkpoints are: in a local directory, in a store, or in both."""

    run: str
    directory: Path | None
    there: in_store.Checkpoints | None

    def list_(self, say: Callable[[str], None]) -> list[Saved]:
        """Return all checkpoints in order of step. If the store is unreachable, tells `say` and returns the local ones."""
        here = on_disk.list_(self.directory) if self.directory else []
        there: list[in_store.Checkpoint] = []
        if self.there:
            try:
                there = self.there.list_()
            except StoreError as problem:
                if not self.directory:
                    raise
                say(f"checkpoints in the store are not shown: {problem}")
        found = [Saved(c.step, here=c) for c in here]
        for c in there:
            twins = (s for s in found if s.step == c.step and s.here and (s.here.problem or s.here.generation == c.generation))
            twin = next((s for s in twins if s.here and s.here.run in (self.run, "")), None)
            if twin:
                found.remove(twin)
            found.append(Saved(c.step, here=twin.here if twin else None, there=c))
        return sorted(found, key=lambda saved: (saved.step, saved.where))

    def ranks(self, candidates: Sequence[Saved]) -> dict[int, int]:
        """Return the rank of each checkpoint that has a metric, keyed by step. Rank 1 is the best."""
        own = (saved for saved in candidates if not saved.here or saved.here.run in (self.run, ""))
        return {saved.step: rank for rank, saved in enumerate(retention.ranked(own), 1)}

    def fetched(self, stored: in_store.Checkpoint, directory: Path, **options: Any) -> on_disk.Checkpoint:
        """Fetch a checkpoint of the store to `directory`. `options` are those of `in_store.Checkpoints.fetch`."""
        assert self.there is not None
        return self.there.fetch(stored, directory, **options)

    @contextlib.contextmanager
    def undamaged(
        self, candidates: Sequence[Saved], say: Callable[[str], None], fetch: Fetch | None = None
    ) -> Iterator[on_disk.Checkpoint]:
        """Yield the last undamaged candidate on this machine, protected from removal. Tells `say` about damaged ones.

        `fetch`, by default `fetched`, fetches a candidate from the store. Raises OutlastError if none is undamaged.
        """
        problems: list[str] = []
        copies = [(saved.step, copy) for saved in reversed(candidates) for copy in (saved.here, saved.there) if copy]
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as held:
            for step, copy in copies:
                try:
                    found = copy if isinstance(copy, on_disk.Checkpoint) else (fetch or self.fetched)(copy, Path(directory))
                    held.enter_context(on_disk.reading(found.path))
                    problem = on_disk.verify(found.path)
                except in_store.Damaged as error:
                    problem = str(error)
                except FileNotFoundError:
                    problems.append(f"step {step} was removed meanwhile")
                    continue
                if problem:
                    problems.append(f"step {step} is damaged: {problem}")
                    continue
                if problems:
                    say(f"{'; '.join(problems)}; step {step} is read{'' if found is copy else ' from the store'} instead")
                yield found
                return
        if problems:
            raise OutlastError(f"{'; '.join(problems)}; look at all checkpoints with: outlast checkpoints verify")
        raise NotFound("there is no checkpoint of this job, neither on this machine nor in a store")


def of(place: Backend, name: str, url: str | None = None) -> Places:
    """Return the places of a job's checkpoints. `url` overrides the URL of the job's store. Raises NotFound."""
    status, output = place.status(name), place.output(name)
    directory = output / contract.CHECKPOINTS if isinstance(output, Path) else None
    url = url or (status.store.url if status.store else None)
    if url is None:
        if directory is None:
            where = status.output or "wherever its script writes"
            raise NotFound(f"the checkpoints of {name} are in its pods only ({where}); give the job an output in a store")
        return Places(status.run, directory, None)
    there = store.open_(url)
    written = runs.read(there) if directory is None else None
    run = written.run if written else status.run
    return Places(run, directory, in_store.Checkpoints(there, run))


def chosen(candidates: Sequence[Saved], step: int | None, *, best: bool = False) -> Sequence[Saved]:
    """Return the best candidate if `best` is set, else the candidates at `step`, or all if `step` is None. Raises NotFound."""
    if best and step is not None:
        raise OutlastError(f"the best checkpoint and that of step {step} are two; name one of them")
    if best:
        return [retention.named([saved for saved in candidates if not saved.problem], "best")]
    if step is None:
        return candidates
    if found := [saved for saved in candidates if saved.step == step]:
        return found
    raise NotFound(f"no checkpoint of step {step}; there are: {steps(candidates)}")


def steps(checkpoints: Sequence[Saved | in_store.Checkpoint]) -> str:
    """Return the checkpoints' steps as text."""
    return ", ".join(str(each.step) for each in checkpoints) or "none"


def restore(output: Path, place: store.Store, run: str, say: Callable[[str], None]) -> None:
    """Fetch the newest valid checkpoint of `run` to `output`. Raises StoreError.

    If the store is unreachable, a valid local checkpoint is enough.
    """
    directory = output / contract.CHECKPOINTS
    directory.mkdir(parents=True, exist_ok=True)
    local = (c for c in reversed(on_disk.list_(directory)) if c.run == run and not c.problem)
    here = next((c.step for c in local if on_disk.verify(c.path) is None), 0)
    try:
        in_store.Checkpoints(place, run).restore(directory, say=say, above=here)
    except store.Unreachable as problem:
        if not here:
            raise
        say(f"goes on from step {here} of this machine: {problem}")


def evaluated(output: Path, place: store.Store | None, run: str, args: Sequence[str]) -> list[str]:
    """Fetch the checkpoint that an evaluation's arguments request, and return the arguments with its step as the value.

    `--checkpoint=best` requests the best checkpoint on this machine or in the store. Raises NotFound, Damaged and
    store.StoreError.
    """
    requested = [each for each in args if each.startswith(contract.EVALUATED)]
    if not requested:
        return [*args]
    directory = output / contract.CHECKPOINTS
    if not place:  # on a volume, an earlier version of the job may have begun the run
        run = on_disk.owner(directory) or run
    here = {c.step: c for c in on_disk.list_(directory) if c.run == run and not c.problem}
    stored = in_store.Checkpoints(place, run) if place else None
    remote_steps = {c.step: c for c in stored.list_() if not c.problem} if stored else {}
    committed: list[retention.Committed] = [*here.values(), *(c for c in remote_steps.values() if c.step not in here)]
    step = retention.named(committed, requested[-1].removeprefix(contract.EVALUATED)).step
    if stored and step in remote_steps and not (step in here and on_disk.verify(here[step].path) is None):
        size = units.human_bytes(remote_steps[step].bytes)
        print(f"outlast | fetching the checkpoint of step {step} ({size}) from {stored.store.url}", file=sys.stderr, flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        stored.fetch(remote_steps[step], directory)
    return [*(each for each in args if each not in requested), f"{contract.EVALUATED}{step}"]
