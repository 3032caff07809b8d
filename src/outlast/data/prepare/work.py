"""Units of work done by an engine: each result is a note written last, so a killed run continues with what is missing.

Engines are processes of this machine, here, or Spark (`spark`).

Below the target is `.prepare/`, with the lock, the plan's digest, a note per finished unit, and what units hand to a later stage.
When the manifest is written it goes. Processes are not forked from ours: tokenizers and PyAV have threads. They end when we do,
even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from outlast.base import file_locks, files, memory
from outlast.base.errors import AlreadyRunning, OutlastError, Stopped
from outlast.data import place, shards
from outlast.data.prepare import plan

PRIVATE = ".prepare"
_OURS = r"(train|val)(-\d+)?\.(bin|safetensors)|tokenizer\.json|meta\.pkl"
"""Names of files that an unfinished run leaves beside PRIVATE."""
_PARTIAL = re.compile(rf"\.({_OURS}|{re.escape(shards.MANIFEST)}|encode-\d+\.\w+|\w+-\d+\.json|plan)(\.\w+)?\.partial")
"""Names of files, there and in PRIVATE, that were never renamed: see `files.beside`."""
_PRELOADED = [f"outlast.data.prepare.{module}" for module in ("images", "jsonl", "text", "video")] + ["tokenizers"]
_NOT_OURS = ("lost+found",)
"""What a new, empty volume contains."""
_PROCESS = 64 << 20
"""Bytes that a process needs beside its samples: measured, with a tokenizer or decoders imported; some for what it reads."""
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
    """What to do with each unit of a stage: `do`, then its note, last. It is pickled to whoever does the unit.

    Two may do a unit at once; what they write is the same, and renamed when it is whole.
    """

    do: Callable[[_U], Note]
    stage: str
    private: Path
    plan: str
    """The digest of the plan; a task of another plan adds nothing."""

    def __call__(self, unit: _U) -> Note:
        """The note of a unit, which is done if nobody has done it. Raises what `do` raises."""
        if (there := self.note(unit)) is not None:
            return there
        self.check()
        token = _attempt.set(self)
        try:
            made = self.do(unit)
        finally:
            _attempt.reset(token)
        self.check()
        files.replace(self._path(unit), json.dumps(made), durable=False)
        return made

    def notes(self, units: Sequence[_U]) -> dict[int, Note]:
        """The notes of the units that are done, by number; on a network, files that are not there are not asked for."""
        there = set(os.listdir(self.private))
        found = ((unit.number, self.note(unit)) for unit in units if self._path(unit).name in there)
        return {number: note for number, note in found if note is not None}

    def note(self, unit: _U) -> Note | None:
        """The note of a unit, if it is done."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self._path(unit).read_bytes()))
        return None

    def _path(self, unit: _U) -> Path:
        return self.private / f"{self.stage}-{unit.number:06d}.json"

    def check(self) -> None:
        """Raises OutlastError when a run with another plan has begun."""
        noted = self.private / "plan"
        if not noted.exists() or noted.read_text() != self.plan:
            raise OutlastError(f"another `outlast data prepare` has begun to write to {self.private.parent}; this one ends")


_attempt: ContextVar[Task[Any] | None] = ContextVar("attempt", default=None)


def check_attempt() -> None:
    """To be called between opening a file of a unit, under a name from `files.beside`, and renaming it.

    Raises OutlastError for one left behind by a run with another plan. A new run first removes the old plan, then such files: so
    either we see that here, or the file is gone when we rename it, and nothing old replaces anything new.
    """
    if attempt := _attempt.get():
        attempt.check()


class Engine(Protocol):
    """Does the units of a stage."""

    def done(
        self, task: Task[_U], units: Sequence[_U], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, Note]:
        """The note of each unit by its number.

        Calls `check` a few times per second, which raises Stopped, and `finished` with the bytes of units done since the last
        call. Raises what the task raises, and OutlastError when who does it is killed.
        """


def _quiet(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Request:
    """What to prepare, where, and with how many processes; the settings of a kind are apart."""

    source: Path
    to: Path
    processes: int = 1
    """How many on this machine; 0: as many as cores and memory allow (`fitting`)."""
    progress: Callable[[str, int, int], None] = _quiet
    """Called with the stage, bytes done and bytes in all."""
    there: shards.Manifest | None = None
    """The dataset that the store holds in which `to` will be put."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the run soon after it is set; another one continues."""
    unit: int = plan.UNIT
    """Bytes of text in a unit; tests make it small."""
    engine: Engine | None = None
    """Who does the units; None: that many processes of this machine."""


def cores() -> int:
    """How many processes can run at once here: our cores, and the quota of our cgroup, if any."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def fitting(request: Request, each: int) -> Request:
    """The request with a number of processes, where it says none: one per core, or fewer where less memory is free than they need
    with `each` bytes of samples in each. Their number changes no byte of the result."""
    if request.processes:
        return request
    machine = memory.Machine()
    room = machine.headroom // (_PROCESS + each) if machine.machine() else cores()
    return dataclasses.replace(request, processes=max(1, min(cores(), room)))


def before(request: Request, kind: str, settings: Mapping[str, Any], source: Mapping[str, Any]) -> shards.Manifest | None:
    """The dataset, if it is there already and was made of the same with the same settings.

    Raises OutlastError if the target holds something else.
    """
    to = request.to
    if request.there or (to / shards.MANIFEST).exists():
        there = request.there or shards.read(to)
        if (there.kind, dict(there.settings)) != (kind, dict(settings)) or there.source.get("listing") != source.get("listing"):
            raise OutlastError(f"{there.place} holds another dataset, or one made with other settings; write to a new place")
        shutil.rmtree(to / PRIVATE, ignore_errors=True)
        return there
    if to.exists() and not to.is_dir():
        raise OutlastError(f"{to} is a file; write to a new directory")
    if to.is_dir() and not (to / PRIVATE).exists() and any(path.name not in _NOT_OURS for path in to.iterdir()):
        raise OutlastError(f"{to} holds other files; write to a new or an empty directory")
    return None


class Place:
    """The target while it is made. Use `opened`."""

    def __init__(self, request: Request, private: Path, digest: str) -> None:
        self.request = request
        self.private = private
        self._digest = digest

    def results(self, stage: str, do: Callable[[_U], Note], units: Sequence[_U]) -> list[Note]:
        """What `do` returns for each unit, in their order; units that an earlier run has done are not done again.

        `do` is pickled, so it is a function of a module or a `functools.partial` of one. What it writes must be whole when it
        returns, and may be written twice, even at once. Raises what it raises, Stopped, and OutlastError when a process is
        killed.
        """
        task = Task(do, stage, self.private, self._digest)
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
        """Raises Stopped when the run is to end."""
        if self.request.stop.is_set():
            raise Stopped("preparing was stopped; the same command goes on from here")

    def alone(self, do: Callable[..., Any], *args: Any) -> Any:
        """The result of a call in a process of its own, whose threads are as many as our processes."""
        with pool(1, threads=self.request.processes) as executor:
            future = executor.submit(do, *args)
            while not future.done():
                self.check()
                wait([future], timeout=0.2)
            return _result(future)

    def finish(self, manifest: shards.Manifest) -> shards.Manifest:
        """Write the manifest and remove the notes: the dataset is whole."""
        for name, part in manifest.parts.items():
            if not (part.tokens if manifest.kind == "text" else part.samples):
                raise plan.BadSource(
                    f"{name} would be empty: {_EMPTY.get(name, '')}nothing of {self.request.source} falls into it"
                )
        shards.write(self.request.to, manifest)
        _remove_partial(self.request.to)
        shutil.rmtree(self.private, ignore_errors=True)  # a lost executor may just write there; the next run removes the rest
        return shards.read(self.request.to)


_EMPTY = {plan.VAL: "give more data or a larger --val, or --val 0 for none; ", plan.TRAIN: "give more data or a smaller --val; "}


class Processes:
    """The engine of this machine; at most two units per process are in flight."""

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
        """Results in the order in which they come."""
        if self._processes <= 1 or len(units) <= 1:
            for unit in units:
                check()
                yield unit, task(unit)
            return
        with pool(min(self._processes, len(units))) as executor:
            flying: dict[Future[Note], _U] = {}
            rest = iter(units)
            while True:
                check()
                for unit in itertools.islice(rest, 2 * self._processes - len(flying)):
                    flying[executor.submit(task, unit)] = unit
                if not flying:
                    return
                ended, _ = wait(flying, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in ended:
                    unit = flying.pop(future)
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
    """Processes that end with us. They are forked from a server without threads that has imported what they need."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *_PRELOADED])
    executor = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(threads,))
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in list((executor._processes or {}).values()):  # what they do is not needed, and may take long
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int) -> None:
    """In a new process: leave Ctrl-C to our parent, end when it ends, and use that many threads."""
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
def opened(request: Request, settings: Mapping[str, Any], found: Iterable[plan.File]) -> Iterator[Place]:
    """The target, locked. What an earlier run has left there is used if settings and source are the same, else it is removed.

    Raises OutlastError when it cannot be written, or its disk is full.
    """
    private = request.to / PRIVATE
    try:
        private.mkdir(parents=True, exist_ok=True)
        with file_locks.attempted(private / "lock") as ours:
            if not ours:
                raise AlreadyRunning(
                    f"another `outlast data prepare` writes to {request.to}; wait for it, or choose another directory"
                )
            if (request.to / shards.MANIFEST).exists():
                raise AlreadyRunning(f"another `outlast data prepare` has just written {request.to}; run the same command again")
            yield Place(request, private, _cleaned(request, settings, found))
    except OSError as problem:
        raise place.unwritable(problem, request.to, "the dataset") from problem


def _cleaned(request: Request, settings: Mapping[str, Any], found: Iterable[plan.File]) -> str:
    """Remove what an earlier run has left, unless it had the same settings and source; the digest of these."""
    private = request.to / PRIVATE
    names = [[file.name, file.size, file.changed] for file in found]
    about = json.dumps([dict(settings), str(request.source.absolute()), names], sort_keys=True)
    digest = hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()
    noted = private / "plan"
    another = not noted.exists() or noted.read_text() != digest
    if another:
        noted.unlink(missing_ok=True)  # first: see `check_attempt`
    for directory in (request.to, private):
        _remove_partial(directory)
    if another:
        stale = [path for path in request.to.iterdir() if re.fullmatch(_OURS, path.name)]
        for path in [*stale, *(path for path in private.iterdir() if path.name != "lock")]:
            path.unlink(missing_ok=True)
        files.replace(noted, digest, durable=True)
    return digest


def _remove_partial(directory: Path) -> None:
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)
