"""Pushes what a job writes into its store, beside the training: a process of its own, so that it costs the agent nothing.

    python -m outlast.agent.upload              for as long as standard input is open: the agent holds the other end
    python -m outlast.agent.upload --rest S     once, all that is left, trying for S seconds; exit code 0 when all of it is there

Configured by the environment of the worker's agent (`contract.Env`). One pusher a directory: the others wait for its lock and
take over when it dies. Where workers share no disk, all have the same checkpoints and metrics: the pusher of rank 0's directory
pushes those (`checkpoints.first`), and every pusher what only its directory has, such as logs. What has arrived is written down
after it arrived (`.push/`), so one that is killed costs a repetition at most. A committed checkpoint is pushed at once, newest
first, everything else every `sync.every`. A store that is away is no reason to stop: the backlog is kept and pushed later. Every
line on standard output is a `Said`, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from outlast import backoff, checkpoints, contract, locks, runs, store
from outlast.checkpoints import remote
from outlast.errors import OutlastError, Superseded
from outlast.launch import rank0_files, titles
from outlast.prepare import workdir
from outlast.runs import alive
from outlast.sync import growing, sync

LOOK_S = 1.0
"""How often to look for a new checkpoint."""
OTHERS_S = 3.0
"""How long the end of a worker waits for another one that pushes the same directory; that one pushes the rest, too."""
PASSES = 3
"""How often files that cannot be pushed are tried at the end; what is wrong with them is for the user to mend."""
AGAIN_S = (2.0, 60.0)
"""First and longest pause before a store that failed is tried again."""
NICENESS = 10
"""While training runs it goes first."""
SUPERSEDED = 3
"""Exit code: a newer generation owns the output, this worker is a zombie."""
OWN = ".push"
"""Directory in the output for our own notes: lock, manifest, journals of uploads."""
_LOCAL = {OWN, contract.CHECKPOINTS, runs.PREVIOUS, runs.RUN, alive.ALIVE}
"""What is not pushed as it lies: it has a protocol of its own, or is in the store already."""


@dataclasses.dataclass(frozen=True)
class Said:
    """What a pusher says of itself."""

    pushed: float | None = None
    """When everything there was had been pushed, seconds since the epoch; None: not yet."""
    step: int = 0
    """The newest checkpoint in the store."""
    since: float | None = None
    """Since when pushing fails; None while it works."""
    error: str = ""
    """Why it fails."""
    backlog: int = 0
    """Bytes of committed checkpoints that are not in the store yet."""
    doing: str = ""
    """What is being pushed now."""


class Unpushed(store.StoreError):
    """Single files could not be pushed; everything else is in the store."""


class Pusher:
    """Pushes one output directory. `tell` is called with every change of what there is to say."""

    def __init__(
        self,
        output: Path,
        place: store.Store,
        run: str,
        owner: str,
        retention: checkpoints.Retention,
        tell: Callable[[Said], None],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ` is that of the worker whose pusher this is, if it is a worker's."""
        self.output, self._place, self._owner = output, place, owner
        self._checkpoints = remote.Checkpoints(place, run)
        self._run, self._retention, self._tell = run, retention, tell
        self._taken = 0
        self._passed = 0
        """The generation of ours after which rank 0 went on elsewhere; 0: never."""
        self._settled: set[tuple[int, int]] = set()
        """Step and generation of the checkpoints that are in the store, or need not be."""
        self._journals = output / OWN / "checkpoints"
        self._checked = False
        self._growing = growing.Sender(place, output)
        self._results = workdir.Results(output)
        self._environ = environ or {}
        self.said = Said()

    def say(self, **changes: object) -> None:
        """Tell of a change."""
        said = dataclasses.replace(self.said, **changes)  # type: ignore[arg-type]
        if said != self.said:
            self.said = said
            self._tell(said)

    def waiting(self) -> list[checkpoints.Checkpoint]:
        """The committed checkpoints that we are to push and that are not in the store yet, the newest first."""
        if not self._first():
            return []
        found = checkpoints.list_(self.output / contract.CHECKPOINTS)
        return [
            c for c in reversed(found) if c.run == self._run and not c.problem and (c.step, c.generation) not in self._settled
        ]

    def _first(self) -> bool:
        """Whether rank 0 is here, as far as we know: what it saves and reports is ours to push."""
        directory = self.output / contract.CHECKPOINTS
        return checkpoints.first(directory, self._run) and (
            self._passed == 0 or checkpoints.generation(directory, self._run) > self._passed
        )

    def push(self, stop: threading.Event, *, last: bool = False) -> None:
        """Push all that there is; but for the `last` time, results that may be unfinished wait. Raises StoreError, Stopped,
        Superseded, OSError; what has arrived stays."""
        runs.check(self._place, self._run, self._owner)
        if self._first():
            try:
                self.push_checkpoints(stop)
            except Superseded:
                # Another owner's machine is said to be superseded here. Else a worker of our world has a later generation: rank 0
                # has moved to a disk of its own, and ours is behind until a session tells us.
                runs.check(self._place, self._run, self._owner)
                self._passed = checkpoints.generation(self.output / contract.CHECKPOINTS, self._run)
        self.say(doing="output")
        self._growing.push(self._grown(), stop)
        ours = workdir.ours(self.output, self._place, self._environ)
        others = f"{contract.WORK}/"
        report = sync.push(
            self.output,
            self._place,
            self.output / OWN / "manifest",
            sync.Options(
                skip=lambda path: skipped(path) or (self._results.skipped(path) if ours else path.startswith(others)),
                check=not self._checked,
                stop=stop,
            ),
            leave=self._results.unfinished(last=last),
            expired=self._results.expired if ours else lambda _: False,
        )
        if failed := [*self._growing.failed, *report.failed]:
            path, reason = failed[0]
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise Unpushed(f"{path} could not be pushed: {reason}{more}")
        self._checked = True
        self.say(pushed=time.time(), since=None, error="", doing="", backlog=0)

    def _grown(self) -> list[str]:
        """The growing files that are ours to push."""
        found = [
            f"{place}/{path.name}"
            for place in (contract.LOGS, contract.LEDGER)
            for path in (self.output / place).glob("*")
            if os.path.isfile(path)  # to open a pipe waits for ever
        ]
        if self._first():
            found.append(contract.METRICS)
        else:  # somebody else pushes them for now
            self._growing.forget(contract.METRICS)
        return sorted(filter(growing.grows, found))

    def push_checkpoints(self, stop: threading.Event) -> None:
        """Push the committed checkpoints that are not in the store yet, and keep as many there as here."""
        generation = checkpoints.generation(self.output / contract.CHECKPOINTS, self._run)
        if generation > self._taken:
            newest = self._checkpoints.acquire(generation)
            self._taken = generation
            self._settled |= {(c.step, c.generation) for c in self._checkpoints.list_() if not c.problem}
            self.say(step=newest.step)
        if not self._taken:
            return  # nobody has trained here yet: what there is was fetched
        while waiting := self.waiting():
            checkpoint = waiting[0]
            self.say(doing=f"checkpoint of step {checkpoint.step}", backlog=sum(c.bytes for c in waiting))
            outcome = self._checkpoints.push(checkpoint, journals=self._journals, stop=stop)
            if outcome.kind == "waiting":
                raise store.StoreError(outcome.reason, retry=True)
            self._settled.add((checkpoint.step, checkpoint.generation))
            if outcome.kind == "damaged":  # it would be skipped on restore, too
                print(f"outlast | not pushed: {outcome.reason}", file=sys.stderr, flush=True)
                continue
            self.say(step=max(self.said.step, checkpoint.step))
            try:
                self._checkpoints.prune(self._retention)
            except store.StoreError as problem:  # room is wasted, nothing else
                print(f"outlast | old checkpoints stay in the store: {problem}", file=sys.stderr, flush=True)
        self._checkpoints.forget(self._journals)
        self.say(doing="", backlog=0)


def skipped(path: str) -> bool:
    """Whether a path below the output is not pushed as it lies: our own notes, files that are being written, and those that only
    grow (`growing`)."""
    first, _, rest = path.partition("/")
    name = rest.rpartition("/")[2] if rest else first
    ours = first in _LOCAL or growing.grows(path) or growing.is_part(path)
    return ours or name.startswith(".") or name.endswith(".tmp")


@contextlib.contextmanager
def locked(output: Path, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of an output directory; False when `give_up` says so before we have it."""
    (output / OWN).mkdir(parents=True, exist_ok=True)
    with open(output / OWN / "lock", "a") as file:
        while not locks.acquire(file.fileno()):
            if give_up():
                yield False
                return
            time.sleep(0.1)
        yield True


def run(pusher: Pusher, every_s: float, stop: threading.Event) -> None:
    """Push until `stop`: when a checkpoint is committed, and every `every_s`. Raises Superseded, and OutlastError for a mistake
    that no repetition mends."""
    due, failures = 0.0, 0
    while not stop.is_set():
        wanted = rank0_files.wanted(pusher.output)
        try:
            if wanted or time.monotonic() >= due or pusher.waiting():
                pusher.push(stop, last=bool(wanted))
                due = time.monotonic() + every_s
            rank0_files.give(pusher.output, wanted)
            pusher.say(since=None, error="")
            failures = 0
        except store.Stopped:
            return
        except Superseded:
            raise
        except (OutlastError, OSError) as problem:
            failed(pusher, problem)
            rank0_files.give(pusher.output, wanted, str(problem))
            until = time.monotonic() + backoff.jittered(backoff.exponential(failures, *AGAIN_S))
            while time.monotonic() < until and not rank0_files.wanted(pusher.output) and not stop.wait(LOOK_S):
                pass
            failures += 1
            due = min(due, time.monotonic())
        stop.wait(LOOK_S)


def rest(pusher: Pusher, deadline: float) -> str:
    """Push all that is left, trying until `deadline` (monotonic); the reason why it is not there, or an empty text."""
    stop = threading.Event()
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), stop.set)
    timer.daemon = True
    timer.start()
    for passes in itertools.count(1):
        try:
            pusher.push(stop, last=True)
            return ""
        except store.Stopped:
            return pusher.said.error or "the time was over before it was pushed"
        except Superseded:
            raise
        except (OutlastError, OSError) as problem:
            failed(pusher, problem)
            if isinstance(problem, Unpushed) and passes >= PASSES:
                print(f"outlast | {problem}", file=sys.stderr, flush=True)
                return ""
            retry = isinstance(problem, OSError | Unpushed) or getattr(problem, "retry", False)
            pause = backoff.exponential(passes - 1, *AGAIN_S)
            if not retry or time.monotonic() + pause > deadline:
                return pusher.said.error
            time.sleep(backoff.jittered(pause))
    raise AssertionError


def failed(pusher: Pusher, problem: Exception) -> None:
    """Take note of a failure."""
    backlog = sum(checkpoint.bytes for checkpoint in pusher.waiting())
    pusher.say(error=str(problem), since=pusher.said.since or time.time(), doing="", backlog=backlog)


def main(argv: list[str]) -> int:
    """Run a pusher; its exit code."""
    from outlast import spec

    environ = os.environ
    job = spec.load(Path(environ[contract.Env.JOB_FILE]))
    output = Path(environ[contract.Env.OUTPUT])
    final = argv[:1] == ["--rest"]
    titles.entitle("pusher")
    stop = threading.Event()
    if not final:
        os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
        threading.Thread(target=_until_closed, args=(stop,), daemon=True).start()
    deadline = time.monotonic() + (float(argv[1]) if final else 0.0)
    patience = min(deadline, time.monotonic() + OTHERS_S)
    with locked(output, lambda: stop.is_set() or (final and time.monotonic() > patience)) as ours:
        if not ours:
            return 0
        try:
            place = store.open_(environ[contract.Env.STORE])
            run_id, owner = environ[contract.Env.RUN], environ[contract.Env.OWNER]
            retention = checkpoints.Retention.parse(job.spec.checkpoint.retention)
            pusher = Pusher(output, place, run_id, owner, retention, _tell, environ=environ)
            if not final:
                run(pusher, job.spec.sync.every.total_seconds(), stop)
                return 0
            problem = rest(pusher, deadline)
        except Superseded as superseded:
            _tell(Said(error=str(superseded), since=time.time()))
            return SUPERSEDED
        except OutlastError as mistake:
            problem = str(mistake)
            _tell(Said(error=problem, since=time.time()))
    return 1 if problem else 0


def _tell(said: Said) -> None:
    with contextlib.suppress(OSError):  # the agent is gone: so shall we be
        os.write(1, json.dumps(dataclasses.asdict(said)).encode() + b"\n")


def _until_closed(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
