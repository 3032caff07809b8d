"""The follower, a process that sends a run's metrics to all trackers. A lock ensures that an output has one follower at a time.

The follower ends after a line on standard input, `{"status": ..., "within": seconds}`, or soon after its parent, rank 0, has
died. With `--end STATUS`, it sends the remaining metrics and the run's end, and exits. Standard output gets a sentence for each
tracker that lacks metrics in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
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

POLL_S = 0.5
ORPHANED_S = 5.0
"""Seconds for sending the rest if the parent died without a message."""


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


def say(sentence: str) -> None:
    """Print a sentence to standard error, which is the worker's log."""
    print(f"outlast: {sentence}", file=sys.stderr, flush=True)
