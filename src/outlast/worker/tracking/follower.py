"""The follower, a process that sends a run's metrics to all trackers. A lock ensures that an output has one follower at a time.

The follower ends after a line on standard input, `{"status": ..., "within": seconds}`, or soon after its parent, rank 0, has
died. With `--end STATUS`, it sends the remaining metrics and the run's end, and exits.
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
from typing import NamedTuple, NoReturn

from outlast.base import file_locks, files
from outlast.job import contract
from outlast.job.contract import Env
from outlast.worker.tracking import follower_supervisor
from outlast.worker.tracking.event_files import EventFile
from outlast.worker.tracking.forwarding import Forwarder
from outlast.worker.tracking.mlflow_runs import MLflow
from outlast.worker.tracking.tracker_interface import Run, Sink, Status, settings
from outlast.worker.tracking.wandb_runs import WandB


def refresh(copy: Path, read: Callable[[int], bytes]) -> None:
    """Make `copy` equal to the complete lines in a growing file. `read(offset)` returns that file's bytes from an offset on. The
    copy's last line, which contains the time, is read again to detect a replaced file. Raises what `read` raises."""
    old = copy.read_bytes() if copy.exists() else b""
    mark = old[old.rfind(b"\n", 0, len(old) - 1) + 1 :] if old else b""
    data = read(len(old) - len(mark))
    if data.startswith(mark) and old:
        with copy.open("ab") as file:
            file.write(data[len(mark) : data.rfind(b"\n") + 1])
    else:
        data = read(0) if old else data
        files.replace(copy, data[: data.rfind(b"\n") + 1])


POLL_S = 0.5
ORPHANED_S = 5.0
"""Seconds for sending the rest if the parent died without a message."""


class Ending(NamedTuple):
    """The training session's final message."""

    status: Status | None
    """The run's final status; None if the run continues."""
    within: float
    """Seconds allowed for sending the remaining metrics."""


class Session:
    """The parent process, whose final message or death ends the follower."""

    def __init__(self, ending: Ending | None, environ: Mapping[str, str]) -> None:
        self._ending = ending
        self._parent = os.getppid()
        # Outlast restarts a run after rank 0 was killed; without Outlast, only we can report its end.
        self._orphaned = Ending(None if environ.get(Env.JOB) else Status.KILLED, ORPHANED_S)
        self._received = b""

    def ending(self, timeout_s: float) -> Ending | None:
        """Return the final message; None if the session has not ended within `timeout_s`."""
        if self._ending is None:
            if os.getppid() != self._parent:
                self._ending = self._orphaned
            elif select.select([0], [], [], timeout_s)[0]:
                self._receive()
        return self._ending

    def _receive(self) -> None:
        data = os.read(0, 4096)
        self._received += data
        if b"\n" in self._received:
            fields = json.loads(self._received)
            self._ending = Ending(Status(fields["status"]) if fields["status"] else None, fields["within"])
        elif not data:
            self._ending = self._orphaned


def main(argv: Sequence[str]) -> NoReturn:
    """Follow the run to its end, then exit, with code 0 if all metrics have arrived or missing metrics were reported."""
    os.nice(19)  # before the trackers' libraries are imported, which is most of the work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # training handles them, and sends its final message
    output, environ = Path(argv[0]), os.environ
    session = Session(Ending(Status(argv[2]), follower_supervisor.FLUSH_S) if len(argv) > 1 else None, environ)
    try:
        code = locked(output, session, environ)
    except OSError as error:
        say(f"metrics are not forwarded: {output / contract.TRACKING} cannot be written: {error.strerror}")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a thread may wait for a server that does not answer


def locked(output: Path, session: Session, environ: Mapping[str, str]) -> int:
    """Wait for the output's lock, then follow the run. Raises OSError."""
    directory = output / contract.TRACKING
    directory.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with (directory / follower_supervisor.LOCK).open("a") as lock:
        while not file_locks.acquire(lock.fileno()):
            ending = session.ending(POLL_S)
            if ending and time.monotonic() - begun > ending.within:
                say("another follower of the metrics has not ended in time")
                return 1
            if ending:
                time.sleep(POLL_S)
        return follow(output, directory, session, environ)


def follow(output: Path, directory: Path, session: Session, environ: Mapping[str, str]) -> int:
    """Feed all trackers until the session ends."""
    (directory / follower_supervisor.ENDED).unlink(missing_ok=True)
    (directory / follower_supervisor.PROBLEM).unlink(missing_ok=True)
    run = Run.of(output, environ.get(Env.RUN) or identity(output), environ)
    lock = threading.Lock()

    def changed() -> None:
        with lock:
            report(directory, [forwarder.problem for forwarder in forwarders])

    forwarders = [Forwarder(sink, run, say, changed) for sink in sinks(run, environ)]
    for forwarder in forwarders:
        forwarder.start()
    while (ending := session.ending(POLL_S)) is None:
        pass
    until = time.monotonic() + ending.within
    for forwarder in forwarders:
        forwarder.finish(ending.status)
    for forwarder in forwarders:
        forwarder.join(max(0.0, until - time.monotonic()))
    problems = [lost(forwarder) for forwarder in forwarders if not forwarder.complete]
    report(directory, problems)
    for problem in problems:
        say(problem)
    if ending.status and not problems:
        files.replace(directory / follower_supervisor.ENDED, ending.status)
    return 0


def lost(forwarder: Forwarder) -> str:
    """Return a sentence that says which metrics a tracker lacks, or that it lacks the run's end."""
    what = forwarder.missing()
    why = forwarder.problem.removeprefix(f"{forwarder.sink.title}: ") or "there was no time"
    lacks = f"{what} of the metrics are not there" if what else "the end of the run is not there"
    return f"{forwarder.sink.title}: {lacks} ({why}); metrics.jsonl has all, and the next start sends it"


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
    try:
        return path.read_text()
    except FileNotFoundError:
        files.replace(path, uuid.uuid4().hex)
        return path.read_text()


def report(directory: Path, problems: Sequence[str]) -> None:
    """Write the problems to a file that the session reads for the status."""
    with contextlib.suppress(OSError):  # a full disk; the log has them, too
        if text := "; ".join(filter(None, problems)):
            files.replace(directory / follower_supervisor.PROBLEM, text)
        else:
            (directory / follower_supervisor.PROBLEM).unlink(missing_ok=True)


def say(sentence: str) -> None:
    """Print a sentence to standard error, which is the worker's log."""
    print(f"outlast: {sentence}", file=sys.stderr, flush=True)
