"""A job's restart budget, which progress refunds. Pure: the time is an argument.

The coordinator calls `judge` once for every failed attempt, and stores the returned `History`. Interruptions cost nothing. A
configuration error stops the job at once. Every other failure costs one restart, which is refunded once the failure lies outside
the window or the committed step has advanced. The job stops early if a step fails three times in a row, or if every rank raises
the same script error before its first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import NamedTuple

from outlast.base import backoff, units
from outlast.job import contract
from outlast.job.failure import Failure

SAME_STEP, FULL_DISK = 3, 10
"""Numbers of consecutive errors at one step that end a job: in general, and for a full disk, which a user may clean up
meanwhile."""
LIVED_S, LONGEST_PAUSE_S = 30.0, 30.0
"""For `Kills`: seconds of running that count as progress, and the longest pause in seconds. Both are arbitrary."""


@dataclass(frozen=True)
class Policy:
    limit: int
    """Maximum number of restarts within `window` while the committed step does not advance."""
    window: timedelta


class Record(NamedTuple):
    time: float
    """Time of the verdict, in seconds since the epoch."""
    committed_step: int
    """The newest committed step at this time."""
    failed_step: int | None
    """The step that raised, hung or ran out of memory; None if it is unknown, or the failure was a kill unrelated to it."""


History = tuple[Record, ...]
"""Failures that may still affect a verdict, oldest first."""


@dataclass(frozen=True)
class Restart:
    """Verdict: restart the processes."""

    history: History
    number: int
    """Number of restarts used from the budget, including this one if it is counted."""
    reason: str
    counted: bool = True


@dataclass(frozen=True)
class Stop:
    """Verdict: the job has failed."""

    reason: str
    code: int
    """The job's exit code."""
    kind: contract.End
    counted = True


@dataclass(frozen=True)
class Kills:
    """Counts consecutive kills of a worker's processes (or full disks) without progress."""

    count: int = 0
    step: int = -1
    """The furthest step that any killed process reached."""

    def after(self, outside: bool, step: int | None, lived_s: float) -> Kills:
        """Return the counter after the processes have ended again. `outside` is True if the script is not the cause. If `step` is
        None, running for longer than `LIVED_S` counts as progress."""
        further = step > self.step if step is not None else lived_s > LIVED_S
        return Kills(self.count + 1 if outside and not further else 0, max(self.step, -1 if step is None else step))

    @property
    def pause_s(self) -> float:
        """Backoff before the worker's next processes start, in seconds: 0 for a count below 2, then longer with each kill."""
        return backoff.exponential(self.count - 2, 1.0, LONGEST_PAUSE_S) if self.count > 1 else 0.0


def judge(
    history: History, failure: Failure, committed_step: int, now: float, policy: Policy, *, everywhere: bool = False
) -> Restart | Stop:
    """Return the verdict on a failure. `everywhere` is True if every rank raised this error before its first step, so no machine
    is the cause."""
    # If the clock was set back, failures in the future count as current, or they would stay in the window for too long.
    window = policy.window.total_seconds()
    past = _relevant([record._replace(time=min(record.time, now)) for record in history], now, window)
    used = sum(now - record.time < window and record.committed_step >= committed_step for record in past)
    starved = failure.cause is contract.FailureCause.OUT_OF_MEMORY
    # The reasons for these failures name the place or the remedy. Step 0: at the start, or the script reports no steps.
    complete = not failure.step or failure.hung or failure.left or starved
    what = failure.reason if complete else f"{failure.reason} at step {failure.step}"

    if failure.code == contract.Exit.INTERRUPTED or not failure.counted:
        return Restart(past, used, f"{what}; interruptions do not count", counted=False)
    if failure.code == contract.Exit.MISCONFIGURED:
        return Stop(f"{what}; a restart would not help", failure.code, contract.End.MISCONFIGURED)
    if everywhere:
        does = "does so" if failure.early == "SystemExit" else "raises it"
        again = f"every rank {does} before the first step, a restart would not help"
        return Stop(f"{failure.reason}; {again}", contract.Exit.MISCONFIGURED, contract.End.MISCONFIGURED)
    step = None if contract.killed(failure.code) and not failure.hung and not starved else failure.step
    past, number = (*past, Record(now, committed_step, step)), used + 1
    tries = FULL_DISK if failure.cause is contract.FailureCause.DISK_FULL else SAME_STEP
    if step is not None and _consecutive(past) >= tries:
        again = "it has hung here" if failure.hung else "this step has failed" if step else "it has failed soon after its start"
        if starved:
            again = f"it has run out of memory {f'at step {step}' if step else 'soon after its start'}"
        why = f"{again} {tries} times in a row"
        return Stop(f"{what}; {why}", failure.code, contract.End.NO_PROGRESS)
    if number > policy.limit:
        budget = f"{policy.limit} within {units.duration_text(policy.window)} without a new checkpoint"
        return Stop(f"{what}; restarts.limit ({budget}) is used up", failure.code, contract.End.LIMIT)
    return Restart(past[-max(policy.limit, FULL_DISK) :], number, f"{what}; restart {number} of {policy.limit}")


def _relevant(failures: list[Record], now: float, window: float) -> tuple[Record, ...]:
    """Return only the failures in the window and the last failures at a known step, so that the history stays short."""
    raised = [record for record in failures if record.failed_step is not None][-FULL_DISK:]
    return tuple(record for record in failures if now - record.time < window or record in raised)


def _consecutive(failures: tuple[Record, ...]) -> int:
    steps = [record.failed_step for record in reversed(failures) if record.failed_step is not None]
    return len(list(takewhile(lambda step: step == steps[0], steps)))
