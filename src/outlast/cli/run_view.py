"""The view of a run: workers' lines and the job's state, until the job ends or the user stops it.

The first Ctrl-C (or SIGTERM) makes the job save and stop; the second kills it. Closing the terminal (SIGHUP) leaves the job
running. If the job's launcher dies in the meantime, it is restarted.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outlast.base import units
from outlast.base.errors import OutlastError
from outlast.cli import status_page, terminal
from outlast.job import contract
from outlast.job.status import JobStatus, State

if TYPE_CHECKING:
    from outlast.job.backend import Backend
    from outlast.job.logs import LogLine

_POLL_S = 0.2
"""Poll interval for the status in seconds, short enough that changes seem to appear at once."""
_ENSURE_INTERVAL_S = 1.0
"""Seconds between checks that the job still has a launcher."""
_START_TIMEOUT_S = 5.0
"""Seconds that a launcher which was started again may take to show that it works."""
_DRAIN_TIMEOUT_S = 1.0
"""Seconds to wait for each further log line after the job has ended."""
_KILL_TIMEOUT_S = 5.0
_BATCH = 1000
"""Maximum number of log lines per batch, and of buffered lines before the log reader has to wait."""

KILLED = 130


class Screen:
    """Shows a run: prints workers' lines on standard output, and Outlast's sentences on standard error."""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lines(self, lines: Sequence[LogLine]) -> None:
        terminal.log(lines)

    def say(self, sentence: str) -> None:
        terminal.say(sentence)

    def update(self, status: JobStatus) -> None:
        """Show the job's status: here, changes appear as sentences."""


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Yield the list of SIGINTs and SIGTERMs received so far. Within the block, these signals do not end this process."""
    came: list[int] = []
    with terminal.handled(lambda number, _: came.append(number), signal.SIGINT, signal.SIGTERM):
        yield came


def follow(place: Backend, name: str, shown: Screen, signals: Sequence[int], *, tail: int | None) -> tuple[JobStatus, int]:
    """Show a run until it ends or is killed. Returns the last status and the exit code. `tail` is as for `Backend.logs`."""
    logs, folded = _Logs(place, name, tail), terminal.Folded()
    obeyed = 0
    ensured, starting = time.monotonic(), 0.0
    status: JobStatus | None = None
    while True:
        new = place.status(name)
        for sentence in (changes := status_page.changes(status, new)):
            shown.say(sentence)
        if changes:
            shown.lines(list(folded.rest()))
        shown.update(new)
        status = new
        over, now = not status.state.active, time.monotonic()
        due = now >= starting and (over or now - ensured > _ENSURE_INTERVAL_S)
        if due and not obeyed and not status.state.final:
            ensured = now
            if place.ensure(name):
                shown.say("the job's launcher was gone; started it again")
                starting = now + _START_TIMEOUT_S
        if over and (status.state.final or obeyed or now >= starting):
            for lines in logs.rest():
                shown.lines([*folded.take(lines), *folded.rest()])
            return status, exit_code(status)
        shown.lines(list(folded.take(logs.take(_POLL_S))))
        while obeyed < len(signals):
            obeyed += 1
            if obeyed > 1:
                killed = _kill(place, name)
                for sentence in status_page.changes(status, killed):
                    shown.say(sentence)
                return killed, KILLED
            shown.say(f"{leaving(status)}; press Ctrl-C again to kill it")
            with contextlib.suppress(OutlastError):  # it has just ended, as the status shows
                place.steer(name, "interrupt")


def _kill(place: Backend, name: str) -> JobStatus:
    with contextlib.suppress(OutlastError):  # it has just ended, as the status shows
        place.steer(name, "kill")
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (status := place.status(name)).state.active and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)
    return status


def exit_code(status: JobStatus) -> int:
    """Return 0 if the run succeeded, 75 if it can continue, else the exit code of its failure."""
    if status.state is State.SUCCEEDED:
        return contract.Exit.DONE
    if not status.state.final:
        return contract.Exit.INTERRUPTED
    return status.exit_code or contract.Exit.FAILED


def summary(status: JobStatus, now: float) -> Iterator[str]:
    """Yield the summary of an ended run: duration, output, reason for a failure, the command to resume the run, warnings."""
    took = units.human_seconds(status_page.lasted(status, now))
    did = [
        f"{status_page.steps(status)}{' steps' if status.epoch is None else ''} in {took}" if status.step else took,
        units.count(status.restarts, "restart"),
        units.count(status.interruptions, "interruption"),
    ]
    if status.goodput is not None:
        did.append(f"goodput {status_page.goodput(status)}")
    yield f"{', '.join(did)}; output in {status.output}"
    if status.failure is not None and status.state is State.FAILED:
        yield from status_page.failure(status.failure).splitlines()
    if status.state is not State.SUCCEEDED:
        again = f"`{status.again}`, or in the background with `outlast resume {status.name}`"
        yield f"go on{status.from_step} with {again}"
    yield from (f"warning: {warning}" for warning in status.warnings)


def leaving(status: JobStatus) -> str:
    """Describe how training responds to a request to stop."""
    if status_page.session(status):
        return "saving and stopping"
    return "the script gets SIGTERM and interruption.grace to save and exit" if status.told else "the training is asked to stop"


class _Logs:
    """Reads the logs in a separate thread, so that waiting for a line never delays the view."""

    def __init__(self, place: Backend, name: str, tail: int | None) -> None:
        self._queue: queue.Queue[LogLine | BaseException | None] = queue.Queue(_BATCH)
        self._over = False
        threading.Thread(target=self._read, args=(place, name, tail), name="logs", daemon=True).start()

    def _read(self, place: Backend, name: str, tail: int | None) -> None:
        end: BaseException | None = None
        try:
            for line in place.logs(name, worker=None, follow=True, tail=tail):
                self._queue.put(line)
        except BaseException as error:
            end = error
        self._queue.put(end)

    def take(self, wait_s: float) -> list[LogLine]:
        """Return the lines that arrive within `wait_s` seconds. Raises the reader's exception, if any."""
        deadline = time.monotonic() + wait_s
        lines: list[LogLine] = []
        while len(lines) < _BATCH:
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._over = True
                time.sleep(max(0.0, deadline - time.monotonic()))
                break
            lines.append(item)
        return lines

    def rest(self) -> Iterator[list[LogLine]]:
        quiet_since = time.monotonic()
        while not self._over and time.monotonic() - quiet_since < _DRAIN_TIMEOUT_S:
            if lines := self.take(_POLL_S):
                quiet_since = time.monotonic()
                yield lines
