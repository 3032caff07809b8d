"""A worker's lifecycle as a pure state machine, which maps events to effects.

    starting -> run, code, environment, data, checkpoint -> training -> flushing -> ended
         (an interruption at any time: save if possible, finish early, exit 75)

It decides what a worker does next; `hangs.hang_limit` decides when its processes hang, and `rendezvous.transport` who coordinates
the run. `agent.agent` carries out the effects and reports the events, with times from its clock.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

from outlast.job import contract
from outlast.job.workerfiles import time_left


class Phase(enum.StrEnum):
    STARTING = "starting"
    RUN = "taking up the run"
    CODE = "fetching code"
    ENVIRONMENT = "making the environment"
    DATA = "fetching data"
    CHECKPOINT = "restoring the checkpoint"
    TRAINING = "training"
    FLUSHING = "pushing"
    ENDED = "ended"


PREPARATION = (Phase.RUN, Phase.CODE, Phase.ENVIRONMENT, Phase.DATA, Phase.CHECKPOINT)


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker's state: its phase, and how it will end."""

    phase: Phase = Phase.STARTING
    leaving: str = ""
    """Reason for the interruption; empty if the worker was not interrupted."""
    leave_by: float | None = None
    """Deadline after which an interrupted worker's training is killed: the earliest one if there are several interruptions."""
    gone_by: float | None = None
    """Time at which the worker's machine disappears; None if unknown."""
    code: int | None = None
    reason: str = ""
    stay: bool = False
    """Whether the pod stays up after a final end, so that other pods can ask how the run ended."""


FINAL = (contract.Exit.DONE, contract.Exit.MISCONFIGURED, contract.Exit.GIVEN_UP)
"""Exit codes after which restarting the worker is pointless."""
DONE_FLUSH_S = 1800.0
"""Timeout in seconds for the last upload after training. It is long, since this upload includes the final results."""
LAST_FLUSH_S = 10.0
"""Minimum timeout in seconds for an interrupted worker's last upload, even after its grace period."""
LEAST_FLUSH_S = 1.0
"""Minimum timeout in seconds for an interrupted worker's last upload if its machine is about to disappear."""


# Events


@dataclasses.dataclass(frozen=True)
class Started:
    """Event: the agent has started."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Event: a preparation phase is done."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class PreparationFailed:
    """Event: a preparation phase has failed. `retry` is True if restarting the worker could help."""

    phase: Phase
    reason: str
    retry: bool


@dataclasses.dataclass(frozen=True)
class Trained:
    """Event: training has ended for this worker, with this exit code (128+n for signal n)."""

    code: int


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """Event: this worker must leave by `now` + `grace_s` (SIGTERM, spot notice, drain). The earliest deadline counts."""

    reason: str
    now: float
    grace_s: float
    ends_s: float | None = None
    """Seconds until the machine disappears; None if unknown."""


@dataclasses.dataclass(frozen=True)
class GraceOver:
    """Event: the grace period is over."""


@dataclasses.dataclass(frozen=True)
class Flushed:
    """Event: the last upload has ended. `problem` is the reason why output is missing in the store; it is empty on success."""

    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Superseded:
    """Event: a newer generation owns the job's output in the store, so this worker is a zombie."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Over:
    """Event: the run had ended before this worker started."""

    code: int
    reason: str


Event: TypeAlias = Started | Prepared | PreparationFailed | Trained | Interrupted | GraceOver | Flushed | Superseded | Over


# Effects


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Effect: carry out a preparation phase."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class Train:
    """Effect: train in successive worlds."""


@dataclasses.dataclass(frozen=True)
class Notify:
    """Effect: ask training to save and leave."""

    reason: str
    deadline: float


@dataclasses.dataclass(frozen=True)
class Kill:
    """Effect: kill the training processes, and leave the rendezvous."""


@dataclasses.dataclass(frozen=True)
class Flush:
    """Effect: upload all remaining output, including the logs."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """Effect: end the agent. If `stay` is set, the agent first waits until its pod is deleted, and then exits with code 0."""

    code: int
    reason: str
    stay: bool = False


Effect: TypeAlias = Prepare | Train | Notify | Kill | Flush | Exit


def step(worker: Worker, event: Event) -> tuple[Worker, tuple[Effect, ...]]:
    """Return the state after an event, and the effects to carry out. An event in the wrong phase changes nothing."""
    match event:
        case Started() if worker.phase is Phase.STARTING:
            return _enter(worker, PREPARATION[0])
        case Prepared(phase) if worker.phase is phase:
            following = PREPARATION.index(phase) + 1
            return _enter(worker, PREPARATION[following] if following < len(PREPARATION) else Phase.TRAINING)
        case PreparationFailed(phase, reason, retry) if worker.phase is phase:
            return _flush(worker, contract.Exit.FAILED if retry else contract.Exit.MISCONFIGURED, reason)
        case Trained(code) if worker.phase is Phase.TRAINING:
            if worker.leaving and (code == contract.Exit.INTERRUPTED or contract.killed(code)):
                return _flush(worker, contract.Exit.INTERRUPTED, worker.leaving)
            return _flush(worker, code, _verdict(code))
        case Interrupted() if worker.phase not in (Phase.FLUSHING, Phase.ENDED):
            return _leave(worker, event)
        case GraceOver() if worker.leaving and worker.phase is Phase.TRAINING:
            return worker, (Kill(),)
        case Flushed(problem) if worker.phase is Phase.FLUSHING and worker.code is not None:
            if not problem:
                return _end(worker, worker.code, worker.reason)
            # Restart a worker that has failed only in its upload; it then repeats just the upload.
            code = contract.Exit.INTERRUPTED if worker.code == contract.Exit.DONE else worker.code
            return _end(worker, code, f"{worker.reason}; {problem}")
        case Superseded(reason) if worker.phase not in (Phase.STARTING, Phase.ENDED):
            ended, effects = _end(worker, contract.Exit.MISCONFIGURED, reason)
            return ended, (Kill(), *effects)
        case Over(code, reason) if worker.phase is Phase.RUN:
            return _end(worker, code, reason)
    return worker, ()


def _enter(worker: Worker, phase: Phase) -> tuple[Worker, tuple[Effect, ...]]:
    entered = dataclasses.replace(worker, phase=phase)
    return entered, (Train() if phase is Phase.TRAINING else Prepare(phase),)


def _leave(worker: Worker, event: Interrupted) -> tuple[Worker, tuple[Effect, ...]]:
    leave_by = event.now + event.grace_s
    ends = [each for each in (worker.gone_by, None if event.ends_s is None else event.now + event.ends_s) if each is not None]
    leaving = dataclasses.replace(worker, gone_by=min(ends, default=None))
    if worker.leave_by is not None and worker.leave_by <= leave_by:
        return leaving, ()
    leaving = dataclasses.replace(leaving, leaving=event.reason, leave_by=leave_by)
    if worker.phase is Phase.TRAINING:
        return leaving, (Notify(event.reason, leave_by),)
    return _flush(leaving, contract.Exit.INTERRUPTED, f"left before training: {event.reason}")


def _flush(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    return dataclasses.replace(worker, phase=Phase.FLUSHING, code=code, reason=reason), (Flush(),)


def _end(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    stay = worker.stay and code in FINAL
    return dataclasses.replace(worker, phase=Phase.ENDED, code=code, reason=reason), (Exit(code, reason, stay),)


def flush_timeout_s(code: int | None, worker: Worker, now: float) -> float:
    """Return the timeout for the last upload of a worker that ends with `code`. The upload must end before the machine goes."""
    grace_left_s = worker.leave_by - now if worker.leave_by is not None else 0.0
    timeout_s = DONE_FLUSH_S if code == contract.Exit.DONE else max(LAST_FLUSH_S, grace_left_s)
    if worker.gone_by is None:
        return timeout_s
    left_s = max(LEAST_FLUSH_S, worker.gone_by - now - time_left.END_S / 2)
    return left_s if code == contract.Exit.INTERRUPTED else min(timeout_s, left_s)


def _verdict(code: int) -> str:
    others = "the training processes were killed" if contract.killed(code) else f"training failed with exit code {code}"
    return _VERDICTS.get(code, others)


_VERDICTS: dict[int, str] = {
    contract.Exit.DONE: "training is done",
    contract.Exit.INTERRUPTED: "training was interrupted, and continues with the next start of this worker",
    contract.Exit.MISCONFIGURED: "training failed, and would fail again",
    contract.Exit.GIVEN_UP: "the job is given up",
}
