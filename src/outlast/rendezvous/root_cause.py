"""Rules for failures: finding the root cause among a world's failures, and judging whether the job continues. Pure.

When one worker dies, the other workers fail as well. Their errors only echo its death, but may arrive first. So the coordinator
collects a generation's failures for a moment, then judges the root cause once, against the budget in `rendezvous.restart_budget`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outlast.base.clock import until
from outlast.base.typed_json import decode, is_count
from outlast.job import contract
from outlast.job.failure import Failure
from outlast.rendezvous import restart_budget
from outlast.rendezvous.who_trains import World

_REPORTED = ("code", "rank", "step", "time", "hung", "left", "reason", "cause", "traceback", "log_tail", "early")


class Known(NamedTuple):
    """A failure with the step that the run had reached, the step that raised it (None if unknown), and the newest committed
    step."""

    failure: Failure
    raised: int | None
    committed: int


class Pending(NamedTuple):
    """A failure that has not been judged yet."""

    echo: bool
    """True if the failure is only a consequence of another failure."""
    failure: Failure


@dataclass(frozen=True)
class Debounce:
    """Debounce times for the failures of one generation, in seconds from the first failure."""

    cause: float = 0.5
    """Delay for calls while all failures are echoes, because a call would stop the culprit before it can report."""
    settle: float = 1.0
    """Time after which failures are judged even if no world can form yet."""
    answer: float = 5.0
    """Replaces `settle` while all failures are echoes and a member that may be the cause has not answered."""


COORDINATOR = Debounce()
OPERATOR = Debounce(cause=1.5, answer=math.inf)
"""Kubelets take about a second to report how a container ended, and eventually report the end of every pod."""
PLAIN_PODS = Debounce(cause=5.0)
"""In pods without an agent, another kubelet may report the root cause seconds after a consequence."""


def reported(report: Mapping[str, Any], worker: int, start: tuple[int, int], now: float) -> Pending:
    """Return the failure in a member's report. `start` is the generation and attempt of the failed processes. An invalid failure
    still counts, because it could otherwise cause endless restarts."""
    of: dict[str, Any] = {"worker": worker, "generation": start[0], "attempt": start[1]}
    try:
        failure = decode(Failure, {**{name: report[name] for name in _REPORTED if name in report}, **of})
    except ValueError:
        reason = f"worker {worker} failed, and its report cannot be read: its agent is of another version"
        failure = Failure(**of, code=contract.Exit.FAILED, reason=reason, time=now)
    return Pending(bool(report.get("echo")), failure)


def committed(report: Mapping[str, Any] | None) -> int | None:
    """Return the newest committed step in a reported failure; None if unknown."""
    step = (report or {}).get("committed")
    return step if is_count(step) else None


def cause(pending: Iterable[Pending]) -> Pending:
    """Return the root cause of these failures: a death rather than an error, an error rather than an echo, and an earlier failure
    rather than a later one. If all are echoes, the cause is a rank that exited early and so broke the other ranks' collective."""
    others = sorted(pending, key=lambda each: (each.echo, not contract.killed(each.failure.code), each.failure.time))
    left = next((each.failure for each in others if each.echo and each.failure.left), None)
    first = next((each for each in others if each.failure is not left), others[0])
    if left is None or not first.echo or first.failure is left:
        return first
    reason = left_early(left.reason, first.failure.rank, first.failure.step)
    return Pending(False, dataclasses.replace(left, reason=reason, step=first.failure.step))


def left_early(who: str, other: int | None, step: int | None) -> str:
    """Return the reason to report if ranks exited while other ranks were training."""
    trained = f"{'others' if other is None else f'rank {other}'} trained{f' (step {step})' if step else ''}"
    remedy = "all ranks must do as many steps; pods without a common disk find different checkpoint files"
    return f"{who} exited with 0, as if done, while {trained}: {remedy}"


def only_echoes(pending: Collection[Pending]) -> bool:
    """Return whether all failures are echoes; False if there are no failures."""
    return bool(pending) and all(each.echo for each in pending)


def held_until(pending: Collection[Pending], since: float, now: float, debounce: Debounce) -> float | None:
    """Return the time until which calls are delayed so that the root cause can be reported; None if no delay is needed."""
    return until(since, debounce.cause, now) if only_echoes(pending) else None


def judge(
    known: Known,
    history: restart_budget.History,
    policy: restart_budget.Policy,
    now: float,
    *,
    pending: Sequence[Pending] = (),
    current: World | None = None,
    fits: bool = True,
) -> tuple[Failure, restart_budget.Restart | restart_budget.Stop]:
    """Return the failure, marked as counted or not, and the verdict on the job.

    `pending` are all failures in the `current` world. `fits` is False if that world's size is no longer allowed
    (`who_trains.fits`): the script may have refused the size, and the next world has another size.
    """
    failure = known.failure
    everywhere = raised_everywhere(failure, pending, current.members if current else ())
    refused = not fits and failure.code == contract.Exit.MISCONFIGURED
    at_step = dataclasses.replace(failure, step=known.raised, counted=failure.counted and not refused)
    verdict = restart_budget.judge(history, at_step, known.committed, now, policy, everywhere=everywhere)
    if refused:
        verdict = dataclasses.replace(verdict, reason=f"{failure.reason}; the next world has another size")
    return dataclasses.replace(failure, counted=verdict.counted), verdict


def raised_everywhere(failure: Failure, pending: Iterable[Pending], members: Iterable[int]) -> bool:
    """Return whether all members have raised the same error before their first step. A restart would then not help."""
    same = {each.failure.worker for each in pending if not each.echo and each.failure.early == failure.early}
    return bool(failure.early) and same >= set(members)
