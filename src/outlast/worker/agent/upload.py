"""The upload process, which uploads a job's output to its store during training. Started by `agent.upload_supervisor`.

    python -m outlast upload              upload until the agent closes standard input
    python -m outlast upload --rest S     upload all that remains, retrying for S seconds; exit code 0 if all is uploaded;
                                          --ended means that the operator has ended the run

Only one process at a time uploads a directory: the others wait for its lock, and one takes over when it dies. If workers share no
disk, the process for rank 0's directory uploads checkpoints and metrics (`checkpoints.first`), and each process uploads the
other files in its own directory. Committed checkpoints are uploaded at once, newest first. The ledger is uploaded after each
event, and everything else at the job's interval. Since `.push/` records completed uploads, the successor of a killed
process repeats at most one. Each line on standard output is a `Report` as JSON.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outlast.base import backoff, file_locks, files
from outlast.base.errors import OutlastError, Superseded
from outlast.job import contract, ledger
from outlast.job.report import goodput, incidents
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store
from outlast.storage.runs.output import OWN, skipped
from outlast.storage.sync import growing_files, push_and_pull
from outlast.worker.agent.upload_supervisor import SUPERSEDED
from outlast.worker.launch import os_calls, script_files
from outlast.worker.prepare import compile_cache, workdir

POLL_INTERVAL_S = 1.0
EVENTS_S, STEPS_S = 3.0, 120.0
"""Minimum intervals in seconds between ledger uploads (two requests each): with new events, and with new steps alone."""
LOCK_TIMEOUT_S = 3.0
"""Seconds that a flush waits for another process that uploads the same directory. That process will upload the rest."""
MAX_PASSES = 3
"""Maximum number of passes in a flush if only some files fail. Only the user can fix such failures."""
COUNT_S, COUNT_SHARE = 10.0, 0.02
"""Minimum interval in seconds between goodput computations, and the maximum share of the time that they take."""
RETRY_S = (2.0, 60.0)


@dataclasses.dataclass(frozen=True)
class Report:
    pushed: float | None = None
    """Time of the last complete upload, in seconds since the epoch; None before the first."""
    step: int = 0
    """Step of the newest checkpoint in the store."""
    since: float | None = None
    """When uploads began to fail, in seconds since the epoch; None while they succeed."""
    error: str = ""
    backlog: int = 0
    """Total size in bytes of the committed checkpoints that the store lacks."""
    doing: str = ""
    seconds: float | None = None
    """Duration in seconds of the last checkpoint upload; None before the first."""
    uploads: int = 0
    """Number of checkpoints that this process has uploaded, in a total of `uploads_s` seconds."""
    uploads_s: float = 0.0
    goodput: float | None = None
    """The run's goodput so far; None before the first step, and in processes that do not run beside rank 0."""
    lost: Mapping[str, float] | None = None
    """Seconds of training lost, keyed by cause (`incidents.CAUSES`). `lost_steps` counts steps whose result was lost."""
    lost_steps: int = 0


class SomeFailed(store.StoreError):
    """Raised if some files could not be uploaded but all others were."""


class Uploader:
    """Uploads one output directory, and calls `publish` with each new report."""

    def __init__(
        self,
        output: Path,
        place: store.Store,
        run: str,
        owner: str,
        retention: checkpoints.Retention,
        publish: Callable[[Report], None],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ` is the worker's environment, if this process runs for a worker."""
        self.output, self._place, self._owner = output, place, owner
        self._checkpoints = in_store.Checkpoints(place, run)
        self._run, self._retention, self._publish = run, retention, publish
        self._acquired = 0
        """Newest generation for which this process may write checkpoints to the store."""
        self._left_behind = 0
        """Newest generation on this disk when rank 0 moved to another disk; 0 if rank 0 has not moved."""
        self._uploaded: set[tuple[int, int]] = set()
        """Step and generation of each checkpoint that needs no upload, since it is in the store or damaged."""
        self._ways_back: list[tuple[int, int]] = []
        """The result of `checkpoints.ways_back` for which checkpoints were last withdrawn from the store."""
        self._journals = output / OWN / "checkpoints"
        self._checked = False
        self._growing = growing_files.Sender(place, output)
        self._results = workdir.Results(output)
        self._index = output / OWN / "manifest"
        self._environ = environ or {}
        self.compiled: compile_cache.Cache | None = None
        self._read: dict[str, int] = {}
        self._unsent, self._sent_at = "", 0.0
        """The kind of pending ledger lines ("event", "steps" or ""), and the time of the last ledger upload."""
        self._have_ledgers, self._count_at = False, 0.0
        """Whether all earlier ledgers are on this disk, and when the goodput is computed next."""
        self.ended: float | None = None
        """When training ended, in seconds since the epoch; None during training."""
        self.run_ended = False
        """True if the run itself has ended, False if this worker has only left it."""
        self.report = Report()

    def update(self, **changes: object) -> None:
        report = dataclasses.replace(self.report, **changes)  # type: ignore[arg-type]
        if report != self.report:
            self.report = report
            self._publish(report)

    def waiting(self) -> list[checkpoints.Checkpoint]:
        """Return the committed checkpoints that this process must upload, newest first."""
        if not self._first():
            return []
        here = checkpoints.list_(self.output / contract.CHECKPOINTS)
        return [
            c for c in reversed(here) if c.run == self._run and not c.problem and (c.step, c.generation) not in self._uploaded
        ]

    def _first(self) -> bool:
        """Return whether rank 0 appears to write here, so that we upload its checkpoints and metrics."""
        directory = self.output / contract.CHECKPOINTS
        return checkpoints.first(directory, self._run) and (
            self._left_behind == 0 or checkpoints.generation(directory, self._run) > self._left_behind
        )

    def upload(self, stop: threading.Event, *, last: bool = False) -> None:
        """Upload everything, but unfinished files only if `last` is set. Raises StoreError, Stopped, Superseded and OSError."""
        runs.check(self._place, self._run, self._owner)
        if not self._index.exists():  # the first pass uploads the job file and logs before the first checkpoint
            with contextlib.suppress(SomeFailed, OSError):  # raised again below
                self._upload_output(stop, last=last)
        if self._first():
            try:
                self.upload_checkpoints(stop)
            except Superseded:
                # If another owner has the run, `check` raises Superseded. Otherwise a worker of our world has a later generation:
                # rank 0 has moved to another disk, and ours is outdated until a session writes to it again.
                runs.check(self._place, self._run, self._owner)
                self._left_behind = checkpoints.generation(self.output / contract.CHECKPOINTS, self._run)
        self._upload_output(stop, last=last)
        self._checked = True
        self.update(pushed=time.time(), since=None, error="", doing="", backlog=0)
        self._upload_compiled(stop)

    def _upload_output(self, stop: threading.Event, *, last: bool) -> None:
        """Upload everything except checkpoints. If the output's disk is full, keep the index in the state directory."""
        try:
            self._push_output(stop, last=last)
        except (OutlastError, OSError) as problem:
            if isinstance(problem, store.StoreError) or not isinstance(problem.__cause__ or problem, OSError):
                raise
            state = self._environ.get(contract.Env.STATE)
            if not state or self._index.is_relative_to(state):
                raise
            self._index = Path(state) / OWN / "manifest"
            self._push_output(stop, last=last)

    def _push_output(self, stop: threading.Event, *, last: bool) -> None:
        self.update(doing="output")
        self._growing.push(self._grown(), stop)
        is_rank0 = workdir.is_rank0(self.output, self._place, self._environ)
        metrics = () if self._first() else (f"{contract.TENSORBOARD}/metrics/",)  # rank 0 continues in another file

        def skip(path: str) -> bool:
            foreign = self._results.skipped(path) if is_rank0 else path.startswith(f"{contract.WORK}/")
            return foreign or skipped(path) or path.startswith(metrics)

        report = push_and_pull.push(
            self.output,
            self._place,
            self._index,
            push_and_pull.Options(skip=skip, check=not self._checked, stop=stop),
            leave=self._results.unfinished(last=last),
            expired=self._results.expired if is_rank0 else lambda _: False,
        )
        if failed := [*self._growing.failed, *report.failed]:
            path, reason = failed[0]
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise SomeFailed(f"{path} could not be pushed: {reason}{more}")

    def upload_ledger(self, stop: threading.Event, now: float) -> None:
        """Upload this worker's new ledger lines if an upload is due. Call `upload` first; both raise the same exceptions."""
        ledgers = [path for path in self._grown() if path.startswith(f"{contract.LEDGER}/")]
        for path in ledgers:
            with contextlib.suppress(OSError), (self.output / path).open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    self._unsent = "steps" if b'"kind": "step"' in line and self._unsent != "event" else "event"
                self._read[path] = file.tell()
        if not self._unsent or not self._checked or now - self._sent_at < {"event": EVENTS_S, "steps": STEPS_S}[self._unsent]:
            return
        runs.check(self._place, self._run, self._owner)
        self._growing.push(ledgers, stop)
        self._sent_at, self._unsent = now, ""

    def count(self, now: float, stop: threading.Event) -> None:
        """Compute the run's goodput for the operator, if due. Failures are ignored, since uploads do not need the result."""
        if not (first := self._first()):
            self._have_ledgers = False
        if contract.Env.MEMBER not in self._environ or now < self._count_at or not first:
            return
        if self.ended and not self.run_ended:
            return  # this worker leaves, and the run continues
        self._count_at = now + COUNT_S
        own, all_ = self.output / contract.LEDGER, self.output / OWN / contract.LEDGER
        with contextlib.suppress(OutlastError, OSError):
            if not self._have_ledgers or self.ended:
                all_.mkdir(exist_ok=True)
                with ThreadPoolExecutor(growing_files.AHEAD) as pool:
                    for path in filter(lambda path: path.startswith(f"{contract.LEDGER}/"), growing_files.files(self._place)):
                        with (all_ / Path(path).name).open("wb") as file:
                            file.writelines(
                                itertools.takewhile(lambda _: not stop.is_set(), growing_files.pieces(self._place, path, pool))
                            )
                        if stop.is_set():
                            return
                self._have_ledgers = True
            account = goodput.buckets(ledger.read(own, all_), None if self.ended else time.time())
            self._count_at = now + max(COUNT_S, (time.monotonic() - now) / COUNT_SHARE)
            if account.steps_kept:
                lost = {cause: round(seconds, 3) for cause, seconds in incidents.seconds_by_cause(account.incidents).items()}
                self.update(goodput=round(account.goodput, 6), lost=lost, lost_steps=account.steps_replayed)

    def _upload_compiled(self, stop: threading.Event) -> None:
        """Upload compiled code, after the output. Failures are only logged, since the code can be compiled again."""
        if not self.compiled:
            return
        before = time.time() - compile_cache.SETTLED_S if self.ended is None else self.ended - compile_cache.KILLED_S
        try:
            self.compiled.push(stop, before=before)
        except (OutlastError, OSError) as problem:
            print(f"outlast | compiled code could not be uploaded completely: {problem}", file=sys.stderr, flush=True)

    def _grown(self) -> list[str]:
        paths = [
            f"{place}/{path.name}"
            for place in (contract.LOGS, contract.LEDGER)
            for path in (self.output / place).glob("*")
            if os.path.isfile(path)  # opening a pipe would block forever
        ]
        if self._first():
            paths.append(contract.METRICS)
        else:  # currently uploaded by another worker
            self._growing.forget(contract.METRICS)
        return sorted(filter(growing_files.grows, paths))

    def upload_checkpoints(self, stop: threading.Event) -> None:
        """Upload the committed checkpoints that the store lacks, and prune the store according to the job's retention."""
        generation = checkpoints.generation(self.output / contract.CHECKPOINTS, self._run)
        if generation > self._acquired:
            newest = self._checkpoints.acquire(generation)
            self._acquired, self._ways_back = generation, []
            self._uploaded |= {(c.step, c.generation) for c in self._checkpoints.list_() if not c.problem}
            self.update(step=newest.step)
        if not self._acquired:
            return  # this disk has only fetched checkpoints
        if (ways := checkpoints.ways_back(self.output / contract.CHECKPOINTS, self._run)) != self._ways_back:
            self._checkpoints.withdraw(ways)
            self._ways_back = ways
        while waiting := self.waiting():
            checkpoint = self._checkpoints.next_(waiting, self._retention)
            self.update(doing=f"checkpoint of step {checkpoint.step}", backlog=sum(c.bytes for c in waiting))
            self._growing.push([contract.METRICS], stop)  # first, for a machine that resumes from this checkpoint
            begun = time.monotonic()
            outcome = self._checkpoints.push(checkpoint, journals=self._journals, stop=stop)
            if outcome.kind == "waiting":
                raise store.StoreError(outcome.reason, retry=True)
            self._uploaded.add((checkpoint.step, checkpoint.generation))
            if outcome.kind == "damaged":  # a restore would skip it, too
                print(f"outlast | not pushed: {outcome.reason}", file=sys.stderr, flush=True)
                continue
            seconds, past = round(time.monotonic() - begun, 3), self.report
            self.update(
                step=max(past.step, checkpoint.step),
                seconds=seconds,
                uploads=past.uploads + 1,
                uploads_s=past.uploads_s + seconds,
            )
            try:
                self._checkpoints.prune(self._retention)
            except store.StoreError as problem:  # only wastes space
                print(f"outlast | old checkpoints stay in the store: {problem}", file=sys.stderr, flush=True)
        self._checkpoints.forget(self._journals)
        self.update(doing="", backlog=0)


@contextlib.contextmanager
def locked(output: Path, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Hold an output directory's lock and yield True, or yield False if `give_up()` returns true first."""
    (output / OWN).mkdir(parents=True, exist_ok=True)
    with open(output / OWN / "lock", "a") as file:
        while not file_locks.acquire(file.fileno()):
            if give_up():
                yield False
                return
            time.sleep(0.1)
        yield True


def run(uploader: Uploader, interval_s: float, stop: threading.Event) -> None:
    """Upload until `stop` is set: checkpoints as they are committed, and everything else at each interval. Raises Superseded."""
    due, failures = 0.0, 0
    while not stop.is_set():
        requested = script_files.requested(uploader.output)
        try:
            if requested or time.monotonic() >= due or uploader.waiting():
                uploader.upload(stop, last=bool(requested))
                due = time.monotonic() + interval_s
            uploader.upload_ledger(stop, time.monotonic())
            script_files.report(uploader.output, requested)
            uploader.update(since=None, error="")
            failures = 0
            uploader.count(time.monotonic(), stop)
        except store.Stopped:
            return
        except Superseded:
            raise
        except (OutlastError, OSError) as problem:
            failed(uploader, problem)
            with contextlib.suppress(OSError):  # a full disk: the request remains
                script_files.report(uploader.output, requested, str(problem))
            until = time.monotonic() + backoff.jittered(backoff.exponential(failures, *RETRY_S))
            while time.monotonic() < until and not script_files.requested(uploader.output) and not stop.wait(POLL_INTERVAL_S):
                pass
            failures += 1
            due = min(due, time.monotonic())
        stop.wait(POLL_INTERVAL_S)


def flush(uploader: Uploader, deadline: float) -> str:
    """Upload all remaining output by `deadline` (monotonic). Returns an error message; empty even if a few files keep failing."""
    stop = threading.Event()
    uploader.ended = time.time()
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), stop.set)
    timer.daemon = True
    timer.start()
    for passes in itertools.count(1):
        try:
            uploader.upload(stop, last=True)
            uploader.count(time.monotonic(), stop)
            return ""
        except store.Stopped:
            return uploader.report.error or "the timeout expired before it was uploaded"
        except Superseded:
            raise
        except (OutlastError, OSError) as problem:
            failed(uploader, problem)
            if isinstance(problem, SomeFailed) and passes >= MAX_PASSES:
                print(f"outlast | {problem}", file=sys.stderr, flush=True)
                return ""
            retry = isinstance(problem, OSError | SomeFailed) or getattr(problem, "retry", False)
            pause = backoff.exponential(passes - 1, *RETRY_S)
            if not retry or time.monotonic() + pause > deadline:
                return uploader.report.error
            time.sleep(backoff.jittered(pause))
    raise AssertionError


def failed(uploader: Uploader, problem: Exception) -> None:
    backlog = sum(checkpoint.bytes for checkpoint in uploader.waiting())
    uploader.update(error=str(problem), since=uploader.report.since or time.time(), doing="", backlog=backlog)


def main(argv: list[str]) -> int:
    from outlast.job import spec

    environ = os.environ
    job = spec.load(Path(environ[contract.Env.JOB_FILE]))
    output = Path(environ[contract.Env.OUTPUT])
    final = argv[:1] == ["--rest"]
    os_calls.entitle("upload")
    stop = threading.Event()
    if not final:
        threading.Thread(target=_until_closed, args=(stop,), daemon=True).start()
    deadline = time.monotonic() + (float(argv[1]) if final else 0.0)
    patience = min(deadline, time.monotonic() + LOCK_TIMEOUT_S)
    with locked(output, lambda: stop.is_set() or (final and time.monotonic() > patience)) as acquired:
        if not acquired:
            return 0
        try:
            if not (file := output / contract.JOB_FILE).exists():
                files.replace(file, spec.dump(spec.without_secrets(job)))
            place = store.open_(environ[contract.Env.STORE])
            run_id, owner = environ[contract.Env.RUN], environ[contract.Env.OWNER]
            retention = checkpoints.Retention.parse(job.spec.checkpoint.variables())
            uploader = Uploader(output, place, run_id, owner, retention, _print, environ=environ)
            uploader.run_ended = "--ended" in argv
            if job.spec.compile.cache:
                uploader.compiled = compile_cache.Cache.of(environ)
            if not final:
                run(uploader, job.spec.sync.every.total_seconds(), stop)
                return 0
            problem = flush(uploader, deadline)
        except Superseded as superseded:
            _print(Report(error=str(superseded), since=time.time()))
            return SUPERSEDED
        except OutlastError as mistake:
            problem = str(mistake)
            _print(Report(error=problem, since=time.time()))
    return 1 if problem else 0


def _print(report: Report) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, so this process ends soon
        os.write(1, json.dumps(dataclasses.asdict(report)).encode() + b"\n")


def _until_closed(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()
