"""Fake backend without processes, for tests of its callers: a thread replaces a job's launcher and workers."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outlast.base.errors import AlreadyRunning, NotFound, OutlastError
from outlast.job import contract, spec
from outlast.job import faults as chaos
from outlast.job.failure import Failure
from outlast.job.ledger import Event
from outlast.job.logs import LogLine
from outlast.job.status import CheckpointStatus, JobStatus, RankStatus, State, WorkerStatus

STEP_S = 0.002


@dataclasses.dataclass
class Run:
    status: JobStatus
    lines: list[LogLine] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    launcher: threading.Thread | None = None
    wish: State | None = None


class FakeBackend:
    """Backend with jobs of `steps` steps. `at` maps a step to the action after it, for every job."""

    poll_s = 0.01

    def __init__(self, output: Path, *, steps: int = 20, at: Mapping[int, Callable[[Run], object]] | None = None) -> None:
        self._output = output
        self._steps = steps
        self._at = dict(at or {})
        self.runs: dict[str, Run] = {}
        self.evaluated: list[tuple[str, list[str]]] = []
        self.chaos_schedule: Path | None = None
        self.notices: list[str] = []

    def submit(self, job: spec.Job, *, source: Path, chaos: Path | None = None, **_: object) -> str:
        name, workers = job.metadata.name, job.spec.workers
        run = self.runs.get(name)
        if run is not None and run.launcher is not None and run.launcher.is_alive():
            raise AlreadyRunning(f"job {name} is running")
        if run is None or run.status.state.final:
            sizes = {"replicas": workers.replicas, "min": workers.allowed()[0], "max": workers.allowed()[-1]}
            place = {"output": str(self._output / name), "run": f"run-{len(self.runs)}"}
            status = JobStatus(told="session", name=name, steps=self._steps, submitted=time.time(), **place, **sizes)
            run = self.runs[name] = Run(status)
            run.events.append({"t": time.time(), "kind": "submitted", "source": "cli"})
        self.chaos_schedule = chaos
        run.wish = None
        run.status.state, run.status.reason, run.status.finished = State.PENDING, "starting", None
        self._launch(run)
        return run.status.run

    def _launch(self, run: Run) -> None:
        run.launcher = threading.Thread(target=self._train, args=(run,), daemon=True)
        run.launcher.start()

    def _train(self, run: Run) -> None:
        status = run.status
        world = list(range(status.replicas))
        status.generation += 1
        status.world = world
        status.workers = [
            WorkerStatus(index=i, state="training", pid=100 + i, ranks=[RankStatus(rank=i, local_rank=0)]) for i in world
        ]
        status.state, status.reason = State.RUNNING, f"world of {len(world)}"
        while status.step < self._steps:
            time.sleep(STEP_S)
            status.step += 1
            run.lines += [LogLine(i, f"step {status.step}") for i in world]
            if happens := self._at.pop(status.step, None):
                happens(run)
            if run.launcher is None:
                return
            if run.wish is not None:
                self._leave(run, run.wish, "as was wished")
                return
        self._leave(run, State.SUCCEEDED, "all steps are done")

    def _leave(self, run: Run, state: State, reason: str) -> None:
        path = self._output / run.status.name
        if state in (State.SUSPENDED, State.INTERRUPTED):
            run.status.interruptions += 1
            run.status.checkpoint = CheckpointStatus(step=run.status.step, path=str(path), time=time.time(), bytes=5 << 20)
        run.status.exit_code = {State.SUCCEEDED: 0, State.CANCELLED: 1}.get(state, 75)
        run.status.finished = time.time()
        run.events.append({"t": time.time(), "kind": "finished", "source": "launcher", "state": str(state)})
        run.status.reason, run.status.state = reason, state

    def ensure(self, name: str) -> bool:
        run = self._run(name)
        if run.launcher is not None or run.status.state.final:
            return False
        self._launch(run)
        return True

    def forget(self, name: str, *, output: bool = False) -> None:
        self.runs.pop(name)

    def list(self) -> Sequence[JobStatus]:
        return [run.status for run in self.runs.values()]

    def status(self, name: str) -> JobStatus:
        return self._run(name).status.model_copy(deep=True)

    def scale(self, name: str, replicas: int) -> None:
        self._run(name).status.replicas = replicas

    def steer(self, name: str, verb: str) -> None:
        getattr(self, verb)(name)

    def suspend(self, name: str) -> None:
        self._run(name).wish = State.SUSPENDED

    def resume(self, name: str) -> None:
        self._run(name).wish = None
        self._launch(self._run(name))

    def cancel(self, name: str) -> None:
        run = self._run(name)
        run.wish = State.CANCELLED
        if run.launcher is None or not run.launcher.is_alive():
            self._leave(run, State.CANCELLED, "cancelled")

    def interrupt(self, name: str) -> None:
        self._run(name).wish = State.INTERRUPTED

    def kill(self, name: str) -> None:
        run = self._run(name)
        run.launcher = None
        run.status.state, run.status.reason = State.INTERRUPTED, "killed"

    def logs(
        self, name: str, *, worker: int | None = None, follow: bool = False, tail: int | None = None, **_: object
    ) -> Iterator[LogLine]:
        run = self._run(name)
        seen = 0 if tail is None else max(0, len(run.lines) - tail)
        while True:
            over = not follow or run.status.finished is not None
            while seen < len(run.lines):
                if worker in (None, run.lines[seen].worker):
                    yield run.lines[seen]
                seen += 1
            if over:
                return
            time.sleep(STEP_S)

    def chaos(self, name: str, action: str, *, worker: int | None, rng: random.Random) -> str:
        status = self._run(name).status
        if status.state is not State.RUNNING:
            raise OutlastError("no worker runs now")
        return f"{chaos.check(action)}: worker {rng.choice(status.world) if worker is None else worker} at step {status.step}"

    def output(self, name: str) -> Path:
        return Path(self._run(name).status.output)

    def events(self, name: str) -> Sequence[Event]:
        return self._run(name).events

    def metrics(self, name: str) -> Sequence[bytes]:
        file = self.output(name) / contract.METRICS
        return file.read_bytes().splitlines() if file.exists() else ()

    def job_file(self, name: str) -> str:
        return (self.output(name) / contract.JOB_FILE).read_text()

    def evaluate(self, name: str, args: Sequence[str], **_: object) -> int:
        self.evaluated.append((self._run(name).status.name, [*args]))
        return 3

    def _run(self, name: str) -> Run:
        if name not in self.runs:
            raise NotFound(f"no job {name}")
        return self.runs[name]


def fails(code: int) -> Callable[[Run], None]:
    """Return an action for `at`: rank 1 dies, and the job fails."""

    def happens(run: Run) -> None:
        status = run.status
        why = "rank 1 on worker 1 raised ValueError: too bad"
        status.failure = Failure(worker=1, rank=1, code=code, reason=why, traceback="  File x\nValueError: too bad")
        status.exit_code, status.finished, run.launcher = code, time.time(), None
        status.state, status.reason = State.FAILED, f"{why}; 3 times at step 5"

    return happens


def launcher_dies(run: Run) -> None:
    """Action for `at`: the job's launcher dies."""
    run.launcher = None
