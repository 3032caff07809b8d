"""Whether a job that failed is started again: a budget of restarts that progress refunds.

The launcher (or the operator) asks `judge` once for every generation that failed, and keeps the `History` it gets back. Interruptions
cost nothing. A configuration error stops the job at once. Everything else costs one restart; those that lie outside the window, or
before the committed step advanced, are refunded. A step that fails three times will fail a fourth time: the job stops. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from outlast import contract, status


@dataclass(frozen=True)
class Policy:
    """How many failures a job survives."""

    limit: int
    """Restarts allowed within `window` while the committed step does not advance."""
    window: timedelta
    same_step: int = 3
    """Errors at one step that end the job, however large the limit."""


class Record(NamedTuple):
    """One failure that counted."""

    time: float
    """Seconds since the epoch."""
    committed_step: int
    """Newest committed step when it happened."""
    failed_step: int | None
    """Step at which an error was raised; None when it is unknown, or when the process was killed, which says nothing of the step."""


@dataclass(frozen=True)
class History:
    """The failures that may still matter, oldest first."""

    failures: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Restart:
    """Start again."""

    history: History
    number: int
    """Restarts of the budget that are used, this one included."""
    reason: str
    counted: bool = True


@dataclass(frozen=True)
class Stop:
    """Do not start again: the job has failed."""

    reason: str
    code: int
    """Exit code of the job."""


def judge(history: History, failure: status.Failure, committed_step: int, now: float, policy: Policy) -> Restart | Stop:
    """Start again or stop, with the sentence that says why."""
    # After the clock went back, a failure of the future is one of now: otherwise it would stay in the window for ever.
    past = tuple(record._replace(time=min(record.time, now)) for record in history.failures)
    what = failure.reason if failure.step is None else f"{failure.reason} at step {failure.step}"
    spent = [r for r in past if now - r.time < policy.window.total_seconds() and r.committed_step >= committed_step]

    if failure.code == contract.Exit.INTERRUPTED or not failure.counted:
        return Restart(History(past), len(spent), f"{what}; starting again, an interruption does not count", counted=False)
    if failure.code == contract.Exit.MISCONFIGURED:
        return Stop(f"{what}; the configuration is wrong, starting again would not help", failure.code)

    step = None if contract.killed(failure.code) else failure.step
    past = (*past, Record(now, committed_step, step))
    number = len(spent) + 1
    at_this_step = _at_same_step(past) if step is not None else 0
    if at_this_step >= policy.same_step:
        return Stop(f"{what}; it failed there {at_this_step} times in a row", failure.code)
    if number > policy.limit:
        return Stop(f"{what}; {_budget(policy)}, and no checkpoint was committed since", failure.code)
    kept = past[-max(policy.limit, policy.same_step) :]
    return Restart(History(kept), number, f"{what}; restart {number} of {policy.limit}")


def _at_same_step(failures: tuple[Record, ...]) -> int:
    """How many errors, from the last backwards, happened at the step of the last."""
    steps = [record.failed_step for record in failures if record.failed_step is not None]
    count = 0
    for step in reversed(steps):
        if step != steps[-1]:
            break
        count += 1
    return count


def _budget(policy: Policy) -> str:
    if policy.limit == 0:
        return "restarts.limit is 0"
    times = "1 restart" if policy.limit == 1 else f"{policy.limit} restarts"
    return (
        f"the {times} allowed within {_duration(policy.window)} are used up"
        if policy.limit > 1
        else f"the {times} allowed is used up"
    )


def _duration(window: timedelta) -> str:
    seconds = window.total_seconds()
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
