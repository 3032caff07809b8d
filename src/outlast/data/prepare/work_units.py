"""Units of work, run by an engine: processes on this machine (`Processes`) or Spark (`spark`).

A unit's note is written last, so after a kill the next run continues with the units that have no note. Everything is written to
`.prepare/DIGEST/` below the target, where the digest is that of the source and the settings, so a process of another run, which
Spark may have lost, cannot disturb this one. At the end the files are moved to the target, and the manifest is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from outlast.base import file_locks, files, machine_memory
from outlast.base.errors import AlreadyRunning, OutlastError, Stopped
from outlast.data import dataset_directory, shard_format
from outlast.data.prepare import source_files as plan

PRIVATE = ".prepare"
_PRELOADED = [f"outlast.data.prepare.{module}" for module in ("images", "jsonl", "text", "video")] + ["tokenizers"]
_PROCESS = 64 << 20
"""Memory in bytes that a process needs besides its samples, as measured with a tokenizer or decoders imported."""
Note = dict[str, Any]


class Work(Protocol):
    """A unit of work."""

    @property
    def number(self) -> int: ...

    @property
    def bytes(self) -> int: ...


_U = TypeVar("_U", bound=Work)


@dataclass(frozen=True)
class Task(Generic[_U]):
    """Runs the units of a stage: calls `do` for a unit, then writes the unit's note. Two processes may run the same unit at once,
    because they write the same bytes to separate temporary files and rename these when they are complete."""

    do: Callable[[_U], Note]
    stage: str
    private: Path

    def __call__(self, unit: _U) -> Note:
        """Run a unit unless it has a note, and return the note. Raises the exceptions of `do`."""
        if (existing := self.note(unit)) is not None:
            return existing
        made = self.do(unit)
        files.replace(self._path(unit), json.dumps(made), durable=False)
        return made

    def notes(self, units: Sequence[_U]) -> dict[int, Note]:
        """Return the notes of finished units, keyed by unit number. Lists the directory first, to save requests to a network
        disk."""
        names = set(os.listdir(self.private))
        notes = ((unit.number, self.note(unit)) for unit in units if self._path(unit).name in names)
        return {number: note for number, note in notes if note is not None}

    def note(self, unit: _U) -> Note | None:
        """Return a unit's note, or None if the unit is not done."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self._path(unit).read_bytes()))
        return None

    def _path(self, unit: _U) -> Path:
        return self.private / f"{self.stage}-{unit.number:06d}.json"


class Engine(Protocol):
    """Runs a stage's units in processes or on Spark."""

    def done(
        self, task: Task[_U], units: Sequence[_U], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, Note]:
        """Run the units, and return their notes, keyed by unit number.

        Calls `check`, which may raise Stopped, a few times per second, and `finished` with the bytes done since its last call.
        Raises the task's exceptions, and OutlastError if a process is killed.
        """


@dataclass(frozen=True)
class Request:
    """A run's source, target and processes. Each kind of dataset has additional settings."""

    source: Path
    to: Path
    processes: int = 1
    """Number of processes on this machine; 0 means as many as fit (`fitting`)."""
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    """Called with the stage, the bytes done and the total bytes."""
    uploaded: shard_format.Manifest | None = None
    """The existing dataset in the store to which `to` will be uploaded, if any."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set this event to stop the run; the next run continues where this run stopped."""
    unit: int = plan.UNIT
    """Size of a unit's text in bytes; small in tests."""
    engine: Engine | None = None
    """If None, `processes` on this machine run the units."""


def cores() -> int:
    """Return the number of cores that this process may use, limited by its cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def fitting(request: Request, each: int) -> Request:
    """Set `processes`, if it is 0, to one per core, or fewer if memory is too small for `each` bytes of samples per process."""
    if request.processes:
        return request
    machine = machine_memory.Machine()
    room = machine.headroom // (_PROCESS + each) if machine.machine() else cores()
    return dataclasses.replace(request, processes=max(1, min(cores(), room)))


def existing(request: Request, kind: str, settings: Mapping[str, Any], source: Mapping[str, Any]) -> shard_format.Manifest | None:
    """Return the manifest of the existing dataset; None if there is no dataset yet. Raises OutlastError if the target contains
    other files, or if the source or the settings have changed."""
    to = request.to
    if request.uploaded or (to / shard_format.MANIFEST).exists():
        made = request.uploaded or shard_format.read(to)
        if (made.kind, dict(made.settings)) != (kind, dict(settings)) or made.source.get("listing") != source.get("listing"):
            raise OutlastError(f"{made.place} holds another dataset, or one made with other settings; write to a new place")
        return made
    if to.exists() and not to.is_dir():
        raise OutlastError(f"{to} is a file; write to a new directory")
    if to.is_dir() and not (to / PRIVATE).exists() and any(path.name not in dataset_directory.EMPTY for path in to.iterdir()):
        raise OutlastError(f"{to} holds other files; write to a new or an empty directory")
    return None


class Place:
    """The target directory during a run, created by `opened`. All files are written to `private` until `finish` moves them."""

    def __init__(self, request: Request, private: Path) -> None:
        self.request, self.private = request, private

    def results(self, stage: str, do: Callable[[_U], Note], units: Sequence[_U]) -> list[Note]:
        """Return the results of `do` for the units, in order. Units that an earlier run has finished are not run again.

        `do` must be picklable. The files that it writes must be complete when it returns; two processes may write them at the
        same time. Raises the exceptions of `do`, Stopped, and OutlastError if a process is killed.
        """
        task = Task(do, stage, self.private)
        notes = task.notes(units)
        missing = [unit for unit in units if unit.number not in notes]
        total = sum(unit.bytes for unit in units)
        done = total - sum(unit.bytes for unit in missing)

        def finished(count: int) -> None:
            nonlocal done
            done += count
            self.request.progress(stage, done, total)

        finished(0)
        if missing:
            engine = self.request.engine or Processes(self.request.processes)
            notes |= engine.done(task, missing, self.check, finished)
        return [notes[unit.number] for unit in units]

    def check(self) -> None:
        """Raise Stopped if the run was stopped."""
        if self.request.stop.is_set():
            raise Stopped("preparing was stopped; the same command goes on from here")

    def in_subprocess(self, do: Callable[..., Any], *args: Any) -> Any:
        """Call `do` in a separate process with `request.processes` threads, and return the result."""
        with pool(1, threads=self.request.processes) as executor:
            future = executor.submit(do, *args)
            while not future.done():
                self.check()
                wait([future], timeout=0.2)
            return _result(future)

    def finish(self, manifest: shard_format.Manifest) -> shard_format.Manifest:
        """Move the files to the target, write the manifest, which makes the dataset complete, and remove the notes. Raises
        BadSource for an empty part."""
        for name, part in manifest.parts.items():
            if not (part.tokens if manifest.kind == "text" else part.samples):
                raise plan.BadSource(
                    f"{name} would be empty: {_EMPTY.get(name, '')}nothing of {self.request.source} falls into it"
                )
        shards = [shard.file for part in manifest.parts.values() for shard in part.shards]
        for name in (*shards, shard_format.TOKENIZER, shard_format.META):
            with contextlib.suppress(FileNotFoundError):  # not every kind has them all; a killed run may have moved some
                (self.private / name).replace(self.request.to / name)
        shard_format.write(self.request.to, manifest)
        shutil.rmtree(self.private.parent, ignore_errors=True)  # a lost executor may still write there
        return shard_format.read(self.request.to)


_EMPTY = {plan.VAL: "give more data or a larger --val, or --val 0 for none; ", plan.TRAIN: "give more data or a smaller --val; "}


class Processes:
    """Runs units in processes on this machine, with at most two units per process in flight."""

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def done(
        self, task: Task[_U], units: Sequence[_U], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, Note]:
        notes: dict[int, Note] = {}
        for unit, note in self._each(task, units, check):
            notes[unit.number] = note
            finished(unit.bytes)
        return notes

    def _each(self, task: Task[_U], units: Sequence[_U], check: Callable[[], None]) -> Iterator[tuple[_U, Note]]:
        if self._processes <= 1 or len(units) <= 1:
            for unit in units:
                check()
                yield unit, task(unit)
            return
        with pool(min(self._processes, len(units))) as executor:
            in_flight: dict[Future[Note], _U] = {}
            rest = iter(units)
            while True:
                check()
                for unit in itertools.islice(rest, 2 * self._processes - len(in_flight)):
                    in_flight[executor.submit(task, unit)] = unit
                if not in_flight:
                    return
                ended, _ = wait(in_flight, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in ended:
                    unit = in_flight.pop(future)
                    yield unit, _result(future)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise OutlastError(
            "a process that prepared data was killed, probably for lack of memory; run the same command with fewer --processes"
        ) from error


@contextlib.contextmanager
def pool(processes: int, *, threads: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes. They are forked from a server process, which has imported the heavy modules and, unlike this
    process, has no threads."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *_PRELOADED])
    executor = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(threads,))
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in list((executor._processes or {}).values()):  # their results are not needed
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int) -> None:
    """Initialise a process of the pool, so that it ignores Ctrl-C, which its parent handles, and exits when its parent does."""
    import multiprocessing
    import signal
    from multiprocessing.connection import wait as wait_for

    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent

    def end() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


@contextlib.contextmanager
def opened(request: Request, settings: Mapping[str, Any], sources: Iterable[plan.File]) -> Iterator[Place]:
    """Lock the target, remove an earlier run's results if the settings or the source have changed, and yield the target's
    `Place`. Raises AlreadyRunning, and OutlastError if the target cannot be written."""
    names = [[file.name, file.size, file.changed] for file in sources]
    about = json.dumps([dict(settings), str(request.source.absolute()), names], sort_keys=True)
    directory = request.to / PRIVATE
    private = directory / hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file_locks.attempted(directory / "lock") as locked:
            if not locked:
                raise AlreadyRunning(
                    f"another `outlast data prepare` writes to {request.to}; wait for it, or choose another directory"
                )
            if (request.to / shard_format.MANIFEST).exists():
                raise AlreadyRunning(f"another `outlast data prepare` has just written {request.to}; run the same command again")
            for other in directory.iterdir():
                if other.name not in ("lock", private.name):
                    shutil.rmtree(other, ignore_errors=True)  # processes of a stopped run may still write there
            private.mkdir(exist_ok=True)
            yield Place(request, private)
    except OSError as problem:
        raise dataset_directory.unwritable(problem, request.to, "the dataset") from problem
