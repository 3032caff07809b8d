"""Supervises the follower: rank 0's session starts it, reads its problems, and waits for it to end. Starting it costs a fork;
after that, the session reads a file every few seconds. The follower ends with its parent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from outlast.base import files
from outlast.job import contract
from outlast.job.contract import Env
from outlast.worker.tracking.tracker_interface import Status, settings

log = logging.getLogger("outlast")

FLUSH_S = 10.0
LEAVE_S = 2.0
"""Seconds that a session waits for trackers if the run continues elsewhere, where another follower sends the metrics."""
LOOK_S = 5.0
IMPORTS_S = 20.0
"""Seconds added to FLUSH_S for a new follower's imports on a busy machine. Arbitrary."""
PROBLEM, ENDED, LOCK = "problem", "ended", "lock"
"""Files in `.tracking/`: the current problem, the reported end of the run, and the follower's lock."""


class Follower:
    """A handle on a running follower."""

    def __init__(self, output: Path, process: subprocess.Popen[bytes]) -> None:
        self._directory, self._process = output / contract.TRACKING, process
        self._looked, self._problem = time.monotonic(), ""

    def news(self) -> str | None:
        """Return the trackers' problem if it has changed (empty once they work again), otherwise None. Usually cheap."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return None
        self._looked = now
        last, self._problem = self._problem, files.text(self._directory / PROBLEM)
        if self._process.poll() is not None and not self._problem:
            self._problem = f"metrics are no longer forwarded: the follower ended with exit code {self._process.returncode}"
        return self._problem if self._problem != last else None

    def finish(self, status: Status | None, *, goes_on: bool = False) -> str:
        """Make the follower send the remaining metrics within a limited time. Returns a sentence about missing metrics, or ""."""
        within = LEAVE_S if goes_on else FLUSH_S
        at_most = LEAVE_S + 1.0 if goes_on else FLUSH_S + IMPORTS_S
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the follower has died
            self._process.stdin.write(json.dumps({"status": status, "within": within}).encode() + b"\n")
            self._process.stdin.close()
        return _wait(self._process, self._directory, at_most)


def _wait(process: subprocess.Popen[bytes], directory: Path, at_most_s: float) -> str:
    try:
        code = process.wait(at_most_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "metrics may not have arrived at the trackers within the timeout; they are in metrics.jsonl"
    return files.text(directory / PROBLEM) or (f"the follower of the metrics ended with exit code {code}" if code else "")


class Trackers:
    """A session's trackers. If the environment requests any, rank 0 starts one follower for all of them."""

    def __init__(self, output: Path, rank: int) -> None:
        self._output, self._done = output, rank > 0
        self._follower: Follower | None = None
        self.problem = ""

    def follow(self) -> None:
        """Start the follower. Call this once `metrics.jsonl` contains only this run's steps."""
        if self._done:
            return
        self._done = True
        try:
            self._follower = start(self._output)
        except OSError as error:  # too many processes
            self.problem = f"metrics are not forwarded: {error.strerror}"
            log.warning("outlast: %s", self.problem)

    def news(self) -> dict[str, str]:
        """Start the follower if necessary, and return a new warning for the progress record, if any."""
        self.follow()
        if self._follower is None or (problem := self._follower.news()) is None:
            return {}
        self.problem = problem
        return {"warning": problem}

    def end(self, error: BaseException | None, *, leaving: bool) -> dict[str, str]:
        """Wait a bounded time for the follower to send all metrics. Returns a warning if the run ends with metrics missing."""
        if self._follower is None:
            return {}
        status, goes_on = outcome(error, leaving=leaving, restarted=Env.JOB in os.environ)
        warning = self._follower.finish(status, goes_on=goes_on)
        return {"warning": warning} if warning and not goes_on else {}


def outcome(error: BaseException | None, *, leaving: bool, restarted: bool) -> tuple[Status | None, bool]:
    """Return a run's status for its trackers, and whether it continues. `error` is the exception that ended its session, if any.
    `restarted` is True if Outlast, not this process, decides whether a failed run has ended."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return (None, True) if leaving else (Status.FINISHED, False)
    if leaving or restarted:
        return None, True
    return (Status.KILLED if isinstance(error, KeyboardInterrupt) else Status.FAILED), False


def start(output: Path, environ: Mapping[str, str] | None = None) -> Follower | None:
    """Start the follower for `output` if the environment requests trackers; otherwise return None. Raises OSError."""
    environ = os.environ if environ is None else environ
    if not settings(environ):
        return None
    process = _process(output, environ, stdin=subprocess.PIPE)
    return Follower(output, process)


def _process(output: Path, environ: Mapping[str, str], *words: str, stdin: int) -> subprocess.Popen[bytes]:
    command = [environ.get(Env.PYTHON, sys.executable), "-P", "-W", "ignore", "-m", "outlast", "follower", str(output), *words]
    return subprocess.Popen(command, stdin=stdin, stdout=2, env=dict(environ), start_new_session=True)


_STATUS = {"Failed": Status.FAILED, "Cancelled": Status.KILLED}
"""The trackers' status for a job's final state (`status.State`), except success, which the session reports."""


def end(output: Path, environ: Mapping[str, str], state: str) -> str:
    """Report the job's final state to the trackers, once its training processes have ended. Returns an error message, or an empty
    string. Does nothing if the job continues, if no follower has run, or if the last follower has reported the same state."""
    directory, status = output / contract.TRACKING, _STATUS.get(state)
    if status is None or not settings(environ) or not directory.is_dir():
        return ""
    if files.text(directory / ENDED) == status:
        return ""
    try:
        process = _process(output, environ, "--end", status, stdin=subprocess.DEVNULL)
    except OSError as error:
        return f"the end of the run could not be reported to the trackers: {error.strerror}"
    return _wait(process, directory, FLUSH_S + IMPORTS_S)
