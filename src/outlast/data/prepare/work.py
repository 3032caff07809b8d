"""Units of work done by processes: each result is a note written last, so a killed run continues with what is missing.

Below the target is `.prepare/`, with the lock, the plan's digest, a note per finished unit, and what units hand to a later stage.
When the manifest is written it goes. Processes are not forked from ours: tokenizers and PyAV have threads. They end when we do,
even by SIGKILL.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from outlast import file_locks, files
from outlast.data import place, shards
from outlast.data.prepare import plan
from outlast.errors import AlreadyRunning, OutlastError, Stopped

PRIVATE = ".prepare"
_OURS = re.compile(r"\.?(train|val)(-\d+)?\.(bin|safetensors)(\.partial)?|tokenizer\.json|meta\.pkl")
"""Names of files that an unfinished run leaves beside PRIVATE."""
_PRELOADED = [f"outlast.data.prepare.{module}" for module in ("images", "jsonl", "text", "video")] + ["tokenizers"]
_NOT_OURS = ("lost+found",)
"""What a new, empty volume contains."""
Note = dict[str, Any]
_U = TypeVar("_U", bound="Work")


class Work(Protocol):
    """A unit of work."""

    @property
    def number(self) -> int: ...

    @property
    def bytes(self) -> int: ...


def _quiet(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Request:
    """What to prepare, where, and with how many processes; the settings of a kind are apart."""

    source: Path
    to: Path
    processes: int = 1
    progress: Callable[[str, int, int], None] = _quiet
    """Called with the stage, bytes done and bytes in all."""
    there: shards.Manifest | None = None
    """The dataset that the store holds in which `to` will be put."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the run soon after it is set; another one continues."""
    unit: int = plan.UNIT
    """Bytes of text in a unit; tests make it small."""


def cores() -> int:
    """How many processes can run at once here: our cores, and the quota of our cgroup, if any."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


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

    def __init__(self, request: Request, private: Path) -> None:
        self.request = request
        self.private = private

    def results(self, stage: str, do: Callable[[_U], Note], units: Sequence[_U]) -> list[Note]:
        """What `do` returns for each unit, in their order; units that an earlier run has done are not done again.

        `do` is pickled, so it is a function of a module or a `functools.partial` of one. What it writes must be whole when it
        returns, and may be written twice. Raises what it raises, Stopped, and OutlastError when a process is killed.
        """
        notes: dict[int, Note] = {}
        for unit in units:
            with contextlib.suppress(FileNotFoundError, ValueError):
                notes[unit.number] = json.loads(self._note(stage, unit.number).read_bytes())
        missing = [unit for unit in units if unit.number not in notes]
        total = sum(unit.bytes for unit in units)
        done = total - sum(unit.bytes for unit in missing)
        self.request.progress(stage, done, total)
        for unit, note in self._done(do, missing):
            files.replace(self._note(stage, unit.number), json.dumps(note), durable=False)
            notes[unit.number] = note
            done += unit.bytes
            self.request.progress(stage, done, total)
        return [notes[unit.number] for unit in units]

    def _note(self, stage: str, number: int) -> Path:
        return self.private / f"{stage}-{number:06d}.json"

    def _done(self, do: Callable[[_U], Note], units: Sequence[_U]) -> Iterator[tuple[_U, Note]]:
        """Results in the order in which they come; at most two units per process are in flight."""
        if self.request.processes <= 1 or len(units) <= 1:
            for unit in units:
                self._check()
                yield unit, do(unit)
            return
        with pool(min(self.request.processes, len(units))) as executor:
            flying: dict[Future[Note], _U] = {}
            rest = iter(units)
            while True:
                self._check()
                for unit in itertools.islice(rest, 2 * self.request.processes - len(flying)):
                    flying[executor.submit(do, unit)] = unit
                if not flying:
                    return
                finished, _ = wait(flying, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    unit = flying.pop(future)
                    yield unit, _result(future)

    def _check(self) -> None:
        if self.request.stop.is_set():
            raise Stopped("preparing was stopped; the same command goes on from here")

    def alone(self, do: Callable[..., Any], *args: Any) -> Any:
        """The result of a call in a process of its own, whose threads are as many as our processes."""
        with pool(1, threads=self.request.processes) as executor:
            future = executor.submit(do, *args)
            while not future.done():
                self._check()
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
        shutil.rmtree(self.private)
        return shards.read(self.request.to)


_EMPTY = {plan.VAL: "give more data or a larger --val, or --val 0 for none; ", plan.TRAIN: "give more data or a smaller --val; "}


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
            _cleaned(request, settings, found)
            yield Place(request, private)
    except OSError as problem:
        raise place.unwritable(problem, request.to, "the dataset") from problem


def _cleaned(request: Request, settings: Mapping[str, Any], found: Iterable[plan.File]) -> None:
    """Remove what an earlier run has left, unless it had the same settings and source."""
    private = request.to / PRIVATE
    names = [[file.name, file.size, file.changed] for file in found]
    about = json.dumps([dict(settings), str(request.source.absolute()), names], sort_keys=True)
    digest = hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()
    noted = private / "plan"
    if not noted.exists() or noted.read_text() != digest:
        stale = [path for path in request.to.iterdir() if _OURS.fullmatch(path.name)]
        for path in [*stale, *(path for path in private.iterdir() if path.name != "lock")]:
            path.unlink()
        files.replace(noted, digest, durable=True)
