"""The backend for jobs on this machine: it starts a launcher for each job, reads job statuses, and writes the user's requests.

    <state>/jobs/<name>/      see `local.state_dir`
    <output>/<name>/          checkpoints, logs, ledger; the files of earlier runs are in `previous/<time>/`

Requests are files, so they survive the launcher, and no command waits for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outlast.base import file_locks, files
from outlast.base.errors import AlreadyRunning, NotFound, OutlastError
from outlast.job import contract, faults, ledger, spec
from outlast.job.backend import not_ended
from outlast.job.logs import LogLine
from outlast.job.spec import substitution
from outlast.job.status import JobStatus, State
from outlast.local import fault_injection, log_reader, output_dir, store_takeover, submission
from outlast.local.state_dir import ENDINGS, VARIABLE, Request, Run, StateDir, newest_metrics
from outlast.storage.runs import output as stored_output
from outlast.worker.launch import os_calls, package_copy
from outlast.worker.prepare import data_cache_eviction, phases

_LOG_POLL_S = 0.1
_RESTARTS, _RESTARTS_WINDOW_S = 3, 60.0
"""Launchers that `ensure` starts for a job within a minute, before it gives up."""
_START_TIMEOUT_S = 10.0
"""Seconds that a launcher may take to acquire its lock: Python starts slowly on a busy machine."""
_STOP_TIMEOUT_S = 300.0
"""Seconds that a launcher may take to exit: its workers save, and it reads the whole ledger to compute the goodput."""
_NOTICE_DELAY_S = 1.0


class LocalBackend:
    """The backend for this machine. `state` is usually `.outlast` in the working directory; `start` starts a daemon."""

    poll_s = 0.3

    def __init__(self, state: Path, *, start: Callable[..., None] = os_calls.daemon) -> None:
        self._root = state.absolute()
        self._start = start
        self._restarts: dict[str, list[float]] = {}
        self.notices: list[str] = []
        """Messages for the user about the most recently submitted or resumed job."""

    # Submitting

    def submit(
        self,
        job: spec.Job,
        *,
        source: Path,
        chaos: Path | None = None,
        fresh: bool = False,
        take_over: bool = False,
        command: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Start a new run of a job, or resume its last run if that has not succeeded. Returns the run's id."""
        state_dir = self.state_dir(job.metadata.name)
        if job.spec.suspend:
            raise OutlastError("suspend is true in the job file; set it to false to train")
        if not job.spec.workers.replicas:
            raise OutlastError("workers.replicas is 0, which trains nothing; set a number, e.g. with --workers 1")
        with self._submitting(state_dir):
            last = self._read(state_dir) if state_dir.run.exists() and not fresh else None
            request = submission.Submission(job, source, fresh, take_over, command, say)
            run, self.notices = submission.submit(self._root, state_dir, request, last)
            self._launch(state_dir, new=True)
        if chaos is not None:
            argv = [str(self._root), job.metadata.name, str(chaos.absolute())]
            self._start_role("faults", argv, state_dir)
        return run

    def ensure(self, name: str) -> bool:
        """Start a launcher if the job is active and has none. Returns whether one was started. Raises OutlastError if all end."""
        state_dir = self._existing(name)
        if not self._read(state_dir).state.active or self._is_submitted(state_dir) or state_dir.has_launcher():
            return False
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, []) if now - at < _RESTARTS_WINDOW_S]
        if len(recent) >= _RESTARTS:
            last = files.text(state_dir.log).rstrip().rpartition("\n")[2]
            raise OutlastError(f"job {name}: {_RESTARTS} launchers have ended within a minute; {state_dir.log} says: {last}")
        self._restarts[name] = [*recent, now]
        self._launch(state_dir)
        return True

    @contextlib.contextmanager
    def _submitting(self, state_dir: StateDir) -> Iterator[None]:
        """Keep other commands from starting this job. Raises AlreadyRunning, or OutlastError if a file cannot be written."""
        name, jobs = state_dir.path.name, state_dir.path.parent
        try:
            jobs.mkdir(parents=True, exist_ok=True)
            with file_locks.attempted(jobs / f".{name}.lock") as alone:  # beside the state directory, which may be replaced
                if not alone:
                    raise _running(name)
                self._wait_until_stopped(state_dir)
                yield
        except OSError as problem:
            where = f"{problem.filename or self._root}: {problem.strerror or problem}"
            raise OutlastError(f"job {name} is not started: {where}; correct that, or choose another {VARIABLE}") from problem

    def _wait_until_stopped(self, state_dir: StateDir) -> None:
        """Wait until an old launcher has exited. Raises AlreadyRunning if it, or a new one, is not ending, or after a timeout."""
        began, name, announced = time.monotonic(), state_dir.path.name, False
        while (there := state_dir.has_launcher()) or self._is_submitted(state_dir):
            ending = state_dir.run.exists() and (self._read(state_dir).finished is not None or Request.read(state_dir).end)
            waited = time.monotonic() - began
            if there and (not ending or waited > _STOP_TIMEOUT_S):
                raise _running(name)
            if there and waited > _NOTICE_DELAY_S and not announced:
                print(f"outlast | waiting for the workers of {name} to leave", file=sys.stderr, flush=True)
                announced = True
            time.sleep(0.02)

    def _is_submitted(self, state_dir: StateDir) -> bool:
        """Return whether the job was submitted so recently that its launcher may not have acquired its lock yet."""
        status = self._read(state_dir) if state_dir.run.exists() and _is_starting(state_dir) else None
        return status is not None and status.state.active and status.launcher is None

    def _launch(self, state_dir: StateDir, *, new: bool = False) -> None:
        """Start the launcher from the run's copy of Outlast. If `new` is set, this version of Outlast is copied first."""
        if new:
            try:
                copy = str(package_copy.make(data_cache_eviction.cache(os.environ)))
            except OSError as problem:
                copy = ""
                self.notices.append(f"Outlast is not copied for this job ({problem}); interrupt the job before an upgrade")
            files.replace(state_dir.package, copy)
        self._start_role("launcher", [str(state_dir.path)], state_dir)

    def _start_role(self, role: str, argv: Sequence[str], state_dir: StateDir) -> None:
        copy = state_dir.package.read_text() if state_dir.package.exists() else ""  # runs from earlier versions have none
        environ = package_copy.ahead(os.environ, Path(copy) if copy else None)
        self._start([sys.executable, "-m", "outlast", role, *argv], state_dir.log, env=environ)

    # Reading

    def list(self) -> Sequence[JobStatus]:
        """Return the status of every job in this state directory, newest last. If a job's files are damaged, its status has the
        error as `reason`."""
        jobs = []
        for path in (self._root / "jobs").glob("*/run.json"):
            name = path.parent.name
            try:
                jobs.append(self.status(name))
            except NotFound:  # the job is being submitted again
                continue
            except OutlastError as problem:
                submitted = path.stat().st_mtime
                jobs.append(JobStatus(name=name, run="", state=State.INTERRUPTED, reason=str(problem), submitted=submitted))
        return sorted(jobs, key=lambda status: status.submitted)

    def status(self, name: str) -> JobStatus:
        state_dir = self._existing(name)
        status = self._read(state_dir)
        if not status.state.active or state_dir.has_launcher():
            return status
        if any(worker.pid and state_dir.owns(worker.index, worker.pid) for worker in status.workers):
            reason = "the launcher is gone; its workers train on and will start it again"
            return status.model_copy(update={"launcher": None, "reason": reason, "waits": ""})
        if _is_starting(state_dir):
            return status
        reason = f"all its processes are gone; `outlast run` goes on{status.from_step}"
        return status.model_copy(
            update={"state": State.INTERRUPTED, "reason": reason, "waits": "", "launcher": None, "workers": [], "world": []}
        )

    def output(self, name: str) -> Path:
        return Path(Run.read(self._existing(name)).output)

    def events(self, name: str) -> ledger.Events:
        return ledger.read(self.output(name) / contract.LEDGER)

    def metrics(self, name: str) -> Iterator[bytes]:
        with contextlib.suppress(OSError), (self.output(name) / contract.METRICS).open("rb") as file:
            yield from file

    def job_file(self, name: str) -> str:
        return (self.output(name) / contract.JOB_FILE).read_text()

    def logs(
        self,
        name: str,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since_s: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Yield log lines, existing ones worker by worker. Raises OutlastError if `since_s` is set, since lines have no times."""
        if since_s is not None:
            raise OutlastError(f"{name} runs on this machine, where log lines have no times; use --tail N instead of --since")
        run = Run.read(self._existing(name))
        directory = Path(run.output) / contract.LOGS
        if run.store and not directory.is_dir() and self._over(name):
            yield from stored_output.logs(run.store, worker=worker, tail=tail)
            return
        files: dict[int, log_reader.Tail] = {}
        while True:
            over = not follow or self._over(name)
            logs = log_reader.logs(directory)
            if worker is None and not files and tail != 0 and len(logs) > 1:
                say("existing lines come one worker after the other, since log lines on this machine have no times")
            for index, path in sorted(logs.items()):
                if index not in files and worker in (None, index):
                    files[index] = log_reader.Tail(path, tail)
            for index, file in files.items():
                yield from (LogLine(index, text) for text in file.lines(rest=over))
            if over:
                break
            time.sleep(_LOG_POLL_S)
        if worker is not None and not files:
            have = f"there are logs of {', '.join(map(str, sorted(logs)))}" if logs else "no worker has started"
            raise NotFound(f"{name} has no log of worker {worker}; {have}")
        for file in files.values():
            file.close()

    def _over(self, name: str) -> bool:
        return not self.status(name).state.active

    # Requests

    def scale(self, name: str, replicas: int) -> None:
        state_dir = self._active(name)
        workers = spec.load(state_dir.job).spec.workers
        allowed = workers.allowed()
        if not replicas:
            raise OutlastError(f"0 workers train nothing; outlast suspend {name} saves, and holds the job until outlast resume")
        if replicas not in allowed:
            every = len(allowed) == allowed[-1] - allowed[0] + 1
            sizes = f"{allowed[0]} to {allowed[-1]}" if every else ", ".join(map(str, allowed))
            rule = f"the job allows {sizes} (workers.min, max, sizes)"
            rule = f"the number is fixed at {allowed[0]}" if len(allowed) == 1 else rule
            bound = "min" if replicas < allowed[0] else "max" if replicas > allowed[-1] else ""
            remedy = f"; to change that, suspend it and run it again with --set workers.{bound}={replicas}" if bound else ""
            raise OutlastError(f"{replicas} worker{'s are' if replicas > 1 else ' is'} not allowed; {rule}{remedy}")
        Request.read(state_dir).replaced(state_dir, replicas=replicas)

    def steer(self, name: str, verb: str) -> None:
        """Carry out a command that takes only a job's name: resume, suspend, interrupt, cancel or kill."""
        match verb:
            case "resume":
                self.resume(name)
            case "suspend" | "interrupt":
                state_dir = self._active(name)
                Request.read(state_dir).replaced(state_dir, end=verb)
            case _:
                self._end(name, verb)

    def resume(self, name: str) -> None:
        """Resume a job that has not succeeded, with the same code and job file."""
        state_dir = self._existing(name)
        with self._submitting(state_dir):
            status = self.status(name)
            if status.state is State.SUCCEEDED:
                raise OutlastError(f"job {name} has succeeded; `{status.again}` starts it anew")
            self.notices = submission.resume(state_dir, name, status)
            self._launch(state_dir, new=True)

    def _end(self, name: str, verb: str) -> None:
        """Cancel or kill a run. If no launcher is running, this method does the launcher's work."""
        state_dir, ending = self._existing(name), ENDINGS[verb]
        status = self._read(state_dir)
        if status.state.final:
            raise OutlastError(f"job {name} has ended already ({status.state})")
        Request.read(state_dir).replaced(state_dir, end=verb)
        if state_dir.has_launcher():
            return
        status = self._read(state_dir)
        for worker in status.workers:
            with contextlib.suppress(ProcessLookupError):
                if worker.pid and state_dir.owns(worker.index, worker.pid):
                    os.killpg(worker.pid, signal.SIGKILL)
        ended: dict[str, object] = {"state": ending.state, "reason": ending.reason, "finished": time.time()}
        ended |= {"workers": [], "world": [], "launcher": None}
        files.replace(state_dir.status, status.model_copy(update=ended).model_dump_json())
        book = ledger.Ledger(self.output(name) / contract.LEDGER, "cli")
        book.write("finished", state=str(ending.state), reason=ending.reason, step=status.step, code=ending.code)
        book.close()
        run = Run.read(state_dir)
        if run.store and ending.state.final and (problem := store_takeover.end(run, ending.state, ending.reason, ending.code)):
            raise OutlastError(f"job {name} is {str(ending.state).lower()} here, but {run.store} does not say so: {problem}")

    def is_over(self, name: str) -> bool:
        """Return whether `forget` removes the job: it has ended, or its status is lost."""
        return self.status(name).state.final or self._written(self.state_dir(name)) is None

    def forget(self, name: str, *, output: bool = False) -> None:
        """Remove an ended job's state and, if `output` is set, its output on this machine. Output in a store is kept. Raises
        OutlastError if the job has not ended, unless its status is lost, or if another job uses its output."""
        state_dir = self._existing(name)
        if not self.is_over(name):
            raise not_ended(self.status(name))
        self._wait_until_stopped(state_dir)
        directory = Path(Run.read(state_dir).output)
        if output:
            output_dir.check_unused(directory)
            if owner := output_dir.last_owner(directory, state_dir):
                raise OutlastError(f"output {directory} is that of the job in {owner} now; forget {name} without --output")
        try:
            state_dir.run.unlink()  # first, since the job exists as long as this file does
            shutil.rmtree(state_dir.path)
            if output and directory.exists():
                shutil.rmtree(directory.resolve())
        except OSError as problem:
            raise OutlastError(f"{problem.filename} cannot be removed: {problem.strerror}; remove it yourself") from problem

    def places(self, name: str) -> tuple[Path, Path, str]:
        """Return a job's state directory, its output directory, and the URL of its output in a store, empty if there is none."""
        state_dir = self._existing(name)
        run = Run.read(state_dir)
        return state_dir.path, Path(run.output), run.store

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        faults.check(action)
        return fault_injection.inject(self._existing(name), self.status(name), action, worker, rng)

    # Evaluation

    def evaluate(self, name: str, args: Sequence[str], *, show: Callable[[LogLine], None] = lambda _: None) -> int:
        """Run the job's module with `--evaluate` in one process in this terminal."""
        from outlast.storage import store
        from outlast.storage.checkpoints import both_places

        state_dir = self._existing(name)
        job = spec.load(state_dir.job)
        run = Run.read(state_dir)
        environ = {
            **os.environ,
            contract.Env.JOB: name,
            contract.Env.RUN: run.run,
            contract.Env.OUTPUT: run.output,
            contract.Env.CODE: run.code,
            contract.Env.STATE: str(state_dir.path),
            contract.Env.SHARED: str(state_dir.path),
        }
        environ |= substitution.values(job.spec.env, environ)
        args = both_places.evaluated(Path(run.output), store.open_(run.store) if run.store else None, run.run, args)
        return phases.evaluate(job, environ, args, say=lambda text: print(f"outlast | {text}", file=sys.stderr, flush=True))

    # State directories

    def state_dir(self, name: str) -> StateDir:
        """Return a job's state directory, which may not exist."""
        return StateDir(self._root / "jobs" / name)

    def _existing(self, name: str) -> StateDir:
        state_dir = self.state_dir(name)
        if not state_dir.run.exists():
            raise NotFound(f"no job {name!r} in {self._root}; `outlast list` shows all jobs")
        return state_dir

    def _active(self, name: str) -> StateDir:
        state_dir = self._existing(name)
        if self._over(name):
            raise OutlastError(
                f"job {name} is not running ({self.status(name).state}); `outlast run` or `outlast resume` starts it"
            )
        return state_dir

    def _read(self, state_dir: StateDir) -> JobStatus:
        """Return the status that the launcher wrote last, or `Interrupted` if it is lost."""
        run = Run.read(state_dir)
        if status := self._written(state_dir):
            file = run.file if Path(run.file).exists() else ""
            return status.model_copy(update={"file": file, "command": run.command, "metrics": newest_metrics(Path(run.output))})
        lost = "its status is lost; `outlast run` goes on from the newest checkpoint"
        name = state_dir.path.name
        return JobStatus(name=name, run=run.run, state=State.INTERRUPTED, reason=lost, submitted=run.submitted, output=run.output)

    def _written(self, state_dir: StateDir) -> JobStatus | None:
        """Return the status that the launcher wrote last; None if its file is missing or damaged. Raises OutlastError."""
        try:
            return JobStatus.model_validate_json(state_dir.status.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as problem:
            remedy = "remove it and `outlast run` goes on from the newest checkpoint"
            raise OutlastError(f"{state_dir.status} cannot be read: {problem.strerror}; {remedy}") from problem


def _running(name: str) -> AlreadyRunning:
    return AlreadyRunning(f"job {name} is running; `outlast status {name}` shows it, `outlast cancel {name}` ends it")


def _is_starting(state_dir: StateDir) -> bool:
    """Return whether the run was started so recently that its launcher may not have acquired its lock yet."""
    return abs(time.time() - state_dir.started_at()) < _START_TIMEOUT_S


def main(argv: list[str]) -> None:
    """Carry out a run's fault schedule: `python -m outlast faults STATE NAME SCHEDULE`, which outlives the command line."""
    state, name, schedule = Path(argv[0]), argv[1], faults.load(Path(argv[2]))
    for sentence in faults.play(LocalBackend(state), name, schedule, faults.seed(schedule)):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} chaos: {sentence}", flush=True)
