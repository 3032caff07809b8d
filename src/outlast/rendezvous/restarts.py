"""Decides whether a failed job is started again, by a budget of restarts that progress refunds.

The coordinator (or the operator) calls `judge` once for every generation that failed, and keeps the `History` it returns.
Interruptions cost nothing. A wrong configuration stops the job at once. Every other failure costs one restart, refunded once it
lies outside the window or the committed step has advanced. A step that raised, hung or ran out of memory three times in a row
would do so a fourth time, and an error of the script that every rank raised before its first step a second time: the job stops.
Pure: the time is an argument.
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
"""Number of errors in a row at one step that end a job: in general, and for a full disk, which somebody may clean up (the pauses
take minutes)."""
LIVED_S, LONGEST_PAUSE_S = 30.0, 30.0
"""Thresholds of `Kills`; arbitrary."""


@dataclass(frozen=True)
class Policy:
    """The number of failures that a job survives."""

    limit: int
    """Maximum number of restarts within `window` while the committed step does not advance."""
    window: timedelta
    same_step: int = SAME_STEP
    """Number of errors in a row at one step that end the job, whatever the limit."""


class Record(NamedTuple):
    """One failure that was counted."""

    time: float
    """Time of the verdict, in seconds since the epoch."""
    committed_step: int
    """The newest committed step at that time."""
    failed_step: int | None
    """The step that raised, hung or ran out of memory; None if unknown, or if the process was killed for another reason, which
    does not depend on the step."""


History = tuple[Record, ...]
"""The failures that may still matter, oldest first."""


@dataclass(frozen=True)
class Restart:
    """Start the processes again."""

    history: History
    number: int
    """Number of restarts of the budget that are used, including this one if it is counted."""
    reason: str
    counted: bool = True


@dataclass(frozen=True)
class Stop:
    """Do not start again: the job has failed."""

    reason: str
    code: int
    """Exit code of the job."""
    kind: contract.End
    counted = True


@dataclass(frozen=True)
class Kills:
    """Counts kills of a worker's processes (or full disks) in a row, without progress in between."""

    count: int = 0
    step: int = -1
    """The furthest step that any of the killed processes had reached."""

    def after(self, outside: bool, step: int | None, lived_s: float) -> Kills:
        """The counter after another end of the processes, caused from `outside` the script or not. Without a `step`, running
        longer than `LIVED_S` counts as progress."""
        further = step > self.step if step is not None else lived_s > LIVED_S
        return Kills(self.count + 1 if outside and not further else 0, max(self.step, -1 if step is None else step))

    @property
    def pause_s(self) -> float:
        """Backoff before the worker's next processes start: none after the first two kills, then longer with each kill."""
        return backoff.exponential(self.count - 2, 1.0, LONGEST_PAUSE_S) if self.count > 1 else 0.0


def judge(
    history: History, failure: Failure, committed_step: int, now: float, policy: Policy, *, everywhere: bool = False
) -> Restart | Stop:
    """The decision to start again or to stop, with its reason in one sentence.

    `everywhere`: every rank raised this error before its first step, and it does not depend on the machine.
    """
    # If the clock was set back, a failure in the future counts as happening now, or it would stay in the window for too long.
    window = policy.window.total_seconds()
    past = _that_matter([record._replace(time=min(record.time, now)) for record in history], now, window, policy)
    used = sum(now - record.time < window and record.committed_step >= committed_step for record in past)
    starved = failure.cause is contract.FailureCause.OUT_OF_MEMORY
    # Reasons of these failures name the place or the remedy; step 0: at the start, or the script reports no steps.
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
    tries = FULL_DISK if failure.cause is contract.FailureCause.DISK_FULL else policy.same_step
    if step is not None and _in_a_row(past) >= tries:
        again = "it has hung here" if failure.hung else "this step has failed" if step else "it has failed soon after its start"
        if starved:
            again = f"it has run out of memory {f'at step {step}' if step else 'soon after its start'}"
        why = f"{again} {tries} times in a row"
        return Stop(f"{what}; {why}", failure.code, contract.End.NO_PROGRESS)
    if number > policy.limit:
        budget = f"{policy.limit} within {units.duration_text(policy.window)} without a new checkpoint"
        return Stop(f"{what}; restarts.limit ({budget}) is used up", failure.code, contract.End.LIMIT)
    return Restart(past[-max(policy.limit, policy.same_step, FULL_DISK) :], number, f"{what}; restart {number} of {policy.limit}")


def _that_matter(failures: list[Record], now: float, window: float, policy: Policy) -> tuple[Record, ...]:
    """Failures in the window, and the last failures that a step raised: even with a limit of a million, the history stays
    short."""
    raised = [record for record in failures if record.failed_step is not None][-max(policy.same_step, FULL_DISK) :]
    return tuple(record for record in failures if now - record.time < window or record in raised)


def _in_a_row(failures: tuple[Record, ...]) -> int:
    """The number of errors, from the last one backwards, that the same step raised."""
    steps = [record.failed_step for record in reversed(failures) if record.failed_step is not None]
    return len(list(takewhile(lambda step: step == steps[0], steps)))
