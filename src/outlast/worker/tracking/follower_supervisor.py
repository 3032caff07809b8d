"""Supervises the follower: rank 0's session starts it, and waits for it to end. Starting it costs a fork. The follower ends with
its parent."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
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
IMPORTS_S = 20.0
"""Seconds added to FLUSH_S for a new follower's imports on a busy machine. Arbitrary."""
ENDED = "ended"
"""The file in `.tracking/` with the reported end of the run."""


class Trackers:
    """A session's trackers. If the environment requests any, rank 0 starts one follower for all of them."""

    def __init__(self, output: Path, rank: int) -> None:
        self._output, self._done = output, rank > 0 or not settings(os.environ)
        self.process: subprocess.Popen[bytes] | None = None
        self.problem = ""

    def follow(self) -> None:
        """Start the follower, once. Call this when `metrics.jsonl` contains only this run's steps."""
        if self._done:
            return
        self._done = True
        try:
            self.process = _follower(self._output, os.environ)
        except OSError as error:  # too many processes
            self.problem = f"metrics are not forwarded: {error.strerror}"
            log.warning("outlast: %s", self.problem)

    def end(self, error: BaseException | None, *, leaving: bool) -> dict[str, str]:
        """Wait a bounded time for the follower to send all metrics. Returns a warning if the run ends with metrics missing."""
        if self.process is None:
            return {}
        status, goes_on = outcome(error, leaving=leaving, restarted=Env.JOB in os.environ)
        message = {"status": status, "within": LEAVE_S if goes_on else FLUSH_S}
        warning = _finish(self.process, LEAVE_S + 1.0 if goes_on else FLUSH_S + IMPORTS_S, json.dumps(message).encode())
        return {"warning": warning} if warning and not goes_on else {}


def outcome(error: BaseException | None, *, leaving: bool, restarted: bool) -> tuple[Status | None, bool]:
    """Return a run's status for its trackers, and whether it continues. `error` is the exception that ended its session, if any.
    `restarted` is True if Outlast, not this process, decides whether a failed run has ended."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return (None, True) if leaving else (Status.FINISHED, False)
    if leaving or restarted:
        return None, True
    return (Status.KILLED if isinstance(error, KeyboardInterrupt) else Status.FAILED), False


def _follower(output: Path, environ: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
    command = [environ.get(Env.PYTHON, sys.executable), "-P", "-W", "ignore", "-m", "outlast", "follower", str(output), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=dict(environ), start_new_session=True)


def _finish(follower: subprocess.Popen[bytes], at_most_s: float, message: bytes = b"") -> str:
    """Wait until the follower has ended. Returns a sentence about missing metrics, or an empty string."""
    try:
        problem, _ = follower.communicate(message, at_most_s)
    except subprocess.TimeoutExpired:
        follower.kill()
        follower.communicate()
        return "metrics may not have arrived at the trackers within the timeout; they are in metrics.jsonl"
    code = follower.returncode
    return problem.decode() or (f"the follower of the metrics ended with exit code {code}" if code else "")


_STATUS = {"Failed": Status.FAILED, "Cancelled": Status.KILLED}
"""The trackers' status for a job's final state (`status.State`), except success, which the session reports."""


def end(output: Path, environ: Mapping[str, str], state: str) -> str:
    """Report the job's final state to the trackers, once its training processes have ended. Returns an error message, or an empty
    string. Does nothing if the job continues, if no follower has run, or if the last follower has reported the same state."""
    directory, status = output / contract.TRACKING, _STATUS.get(state)
    if status is None or not settings(environ) or not directory.is_dir() or files.text(directory / ENDED) == status:
        return ""
    try:
        return _finish(_follower(output, environ, "--end", status), FLUSH_S + IMPORTS_S)
    except OSError as error:
        return f"the end of the run could not be reported to the trackers: {error.strerror}"
