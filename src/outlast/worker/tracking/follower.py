"""The follower, a process that sends a run's metrics to all trackers. A lock ensures that an output has one follower at a time.

The follower ends after a line on standard input, `{"status": ..., "within": seconds}`, or soon after its parent, rank 0, has
died. With `--end STATUS`, it sends the remaining metrics and the run's end, and exits. Standard output gets a sentence for each
tracker that lacks metrics in the end. An unreachable tracker is logged once, and again when it recovers. No values are lost,
since the metrics file is the buffer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from outlast.base import file_locks, files
from outlast.base.errors import OutlastError
from outlast.job import contract, url_logins
from outlast.job.contract import Env
from outlast.worker.tracking import follower_supervisor, missing_points
from outlast.worker.tracking.event_files import EventFile
from outlast.worker.tracking.mlflow_runs import MLflow
from outlast.worker.tracking.tracker_interface import Run, Sink, Status, settings
from outlast.worker.tracking.wandb_runs import WandB

POLL_S = 0.5
ORPHANED_S = 5.0
"""Seconds for sending the rest if the parent died without a message."""
LAST_RETRY_S = 0.5
"""Seconds between retries once the run has ended, while its session waits."""


class Ending(NamedTuple):
    """The training session's final message."""

    status: Status | None
    """The run's final status; None if the run continues."""
    within: float
    """Seconds allowed for sending the remaining metrics."""


def main(argv: Sequence[str]) -> NoReturn:
    """Follow the run to its end, then exit."""
    parent = os.getppid()
    os.nice(19)  # before the trackers' libraries are imported, which is most of the work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # training handles them, and sends its final message
    answer = os.dup(1)
    os.dup2(2, 1)  # for what the trackers' libraries print
    ending = Ending(Status(argv[2]), follower_supervisor.FLUSH_S) if len(argv) > 1 else None
    try:
        problems = follow(Path(argv[0]), parent, ending, os.environ)
    except OSError as error:
        problems = [f"metrics are not forwarded: {Path(argv[0], contract.TRACKING)} cannot be written: {error.strerror}"]
    for problem in problems:
        say(problem)
    with contextlib.suppress(OSError):  # the session has ended
        os.write(answer, "; ".join(problems).encode())
    os._exit(0)  # a thread may wait for a server that does not answer


def follow(output: Path, parent: int, ending: Ending | None, environ: Mapping[str, str]) -> list[str]:
    """Feed all trackers until the session ends, and return what they lack then. Raises OSError."""
    directory = output / contract.TRACKING
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as lock:
        file_locks.acquire(lock.fileno(), wait=True)  # another follower ends within seconds of its parent
        (directory / follower_supervisor.ENDED).unlink(missing_ok=True)
        run = Run.of(output, environ.get(Env.RUN) or identity(output), environ)
        forwarders = [Forwarder(sink, run, say) for sink in sinks(run, environ)]
        for forwarder in forwarders:
            forwarder.start()
        while ending is None:
            ending = received(parent, environ)
        until = time.monotonic() + ending.within
        for forwarder in forwarders:
            forwarder.finish(ending.status)
        for forwarder in forwarders:
            forwarder.join(max(0.0, until - time.monotonic()))
        problems = list(filter(None, (forwarder.missing() for forwarder in forwarders)))
        if ending.status and not problems:
            files.replace(directory / follower_supervisor.ENDED, ending.status)
        return problems


def received(parent: int, environ: Mapping[str, str]) -> Ending | None:
    """Wait a moment for rank 0's final message or death. Returns None if neither has come."""
    if os.getppid() == parent:  # its forks may hold standard input open
        if not select.select([0], [], [], POLL_S)[0]:
            return None
        if line := os.read(0, 4096):
            fields = json.loads(line)
            return Ending(Status(fields["status"]) if fields["status"] else None, fields["within"])
    # Outlast restarts a run after rank 0 was killed; without Outlast, only we can report its end.
    return Ending(None if environ.get(Env.JOB) else Status.KILLED, ORPHANED_S)


def sinks(run: Run, environ: Mapping[str, str]) -> list[Sink]:
    """Return the sinks for the trackers that the environment requests."""
    requested = settings(environ)
    trackers: list[Sink] = []
    if requested.tensorboard:
        position = run.output / contract.TRACKING / "tensorboard.json"
        trackers.append(EventFile(run.output / contract.TENSORBOARD / "metrics", run.id, position))
    if requested.mlflow:
        trackers.append(MLflow(requested.mlflow, requested.experiment, run))
    if requested.wandb:
        trackers.append(WandB(requested.project, run))
    return trackers


def identity(output: Path) -> str:
    """Return an id for a run under plain python or torchrun. It is stored beside the checkpoints, without which a run is new."""
    path = output / contract.CHECKPOINTS / ".tracking"
    if not path.exists():
        files.replace(path, uuid.uuid4().hex)
    return path.read_text()


class Forwarder(threading.Thread):
    """Feeds one tracker in a thread that sends new values at regular intervals, and retries until they arrive. `say` prints a
    sentence."""

    def __init__(self, sink: Sink, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(name=f"outlast-{sink.title}", daemon=True)
        self._sink, self._run, self._say = sink, run, say
        self._reader = missing_points.Reader(run.output / contract.METRICS)
        self._position: missing_points.Position | None = None
        """The sink's position; None until the sink is open."""
        self._reached: missing_points.Position = {}
        self._parameters: dict[str, Any] = {}
        self._ending = threading.Event()
        self._status: Status | None = None
        self._problem = ""
        self._complete = False
        """True once all values and the run's end have arrived in the tracker."""

    def forward(self) -> None:
        """Send all new values. Raises the sink's exceptions, after which the next call opens the sink again."""
        if self._position is None:
            self._reader.offset, self._parameters = 0, {}
            self._position = self._reached = self._sink.open()
        position, self._position = self._position, None
        if (parameters := files.mapping(self._run.output / contract.PARAMETERS)) != self._parameters:
            self._sink.parameters(parameters)
            self._parameters = parameters
        while lines := self._reader.read():
            if new := missing_points.points(lines, position, self._sink.rename):
                self._sink.send(new)
                position = self._reached = missing_points.advanced(position, new)
            self._reader.offset += len(lines)
        self._position = position

    def finish(self, status: Status | None) -> None:
        """Send the remaining values at once, with `status` as the run's end. The thread ends once everything has arrived."""
        self._status = status
        self._ending.set()

    def run(self) -> None:
        while not self._complete:
            ending = self._ending.is_set()
            try:
                self.forward()
                if ending:
                    self._sink.end(self._status)
            except Exception as error:  # third-party libraries raise various errors
                self._failed(error)
                if isinstance(error, OutlastError):
                    return
                if ending:
                    time.sleep(LAST_RETRY_S)
            else:
                if self._problem:
                    self._problem = ""
                    self._say(f"{self._sink.title}: works again; everything up to step {self._step()} is there")
                self._complete = ending
            self._ending.wait(self._sink.pause_s)

    def _failed(self, error: Exception) -> None:
        last, self._problem = self._problem, sentence(error)
        if not last:
            waits = "nothing goes there" if isinstance(error, OutlastError) else "what is logged waits in metrics.jsonl"
            self._say(f"{self._sink.title}: {self._problem}; training goes on, {waits}")

    def _step(self) -> int:
        return max(self._reached.values(), default=0)

    def missing(self) -> str:
        """Return a sentence if the tracker lacks metrics or the run's end; otherwise an empty string."""
        if self._complete:
            return ""
        has = f"has the metrics up to step {self._step()} only ({self._problem or 'there was no time'})"
        return f"{self._sink.title}: {has}; metrics.jsonl has all, and the next start sends it"


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without HTTP libraries' outer errors, and without passwords."""
    text = str(error).strip().partition("\n")[0] or repr(error)
    return url_logins.hidden(text.rpartition("Caused by ")[2])[:300]


def say(sentence: str) -> None:
    """Print a sentence to standard error, which is the worker's log."""
    print(f"outlast: {sentence}", file=sys.stderr, flush=True)
