"""The life of a worker, as a pure state machine: what has happened in, what to do out.

    starting -> run, code, environment, data, checkpoint -> training -> flushing -> ended
                          (an interruption at any time: finish early, save if there is something to save, exit 75;
                           an elastic agent that is killed, or fails itself: launched again, the snapshots stay)

What a worker does next is decided in this file, when its processes hang in `hangs.rule`, and who coordinates the run in
`rendezvous.transport`. `agent.agent` carries out the effects and reports the events. There is no clock, file or process here;
times are those of the agent's own clock and arrive with the events.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

from outlast.base import backoff
from outlast.job import contract
from outlast.job.workerfiles import time_left


class Phase(enum.StrEnum):
    """Where the worker is in its life; the order is the order of work."""

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
    """The state of a worker: its phase, and how it will end."""

    phase: Phase = Phase.STARTING
    leaving: str = ""
    """Why it is interrupted; empty if it is not."""
    leave_by: float | None = None
    """When its training is killed, if it is interrupted: the earliest time that anybody gave."""
    late: bool = False
    """Whether that time is over."""
    gone_by: float | None = None
    """When its machine is gone, as far as somebody said."""
    code: int | None = None
    """The exit code, once it is known."""
    reason: str = ""
    stay: bool = False
    """Whether its pod is to stay up after a final end, so that other pods can ask how the run ended."""
    start: tuple[int, int] | None = None
    """The newest start of its processes when the elastic agent was launched again."""
    relaunches: int = 0
    """Launches since then after which no process has started."""


FINAL = (contract.Exit.DONE, contract.Exit.MISCONFIGURED, contract.Exit.GIVEN_UP)
"""Exit codes after which a worker that is started again has nothing to do."""
DONE_FLUSH_S = 1800.0
"""Timeout of the last upload after training is done. Long, since nothing repeats it: a worker that failed is started again."""
LAST_FLUSH_S = 10.0
"""Least timeout of the last upload of an interrupted worker, even when its grace period is over."""
LEAST_FLUSH_S = 1.0
"""The same where it is known when the machine is gone."""
RELAUNCHES, PAUSE_S, LONGEST_PAUSE_S = 10, 1.0, 30.0
"""Most launches in a row after which no process has started; the pause before the second of them, which doubles, up to the
longest; arbitrary. Together three minutes, in which a machine without processes to spare may get some."""


# Events


@dataclasses.dataclass(frozen=True)
class Started:
    """The agent runs."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The work of a preparing phase is done."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class PreparationFailed:
    """The work of a preparing phase failed; `retry` says whether starting again could help."""

    phase: Phase
    reason: str
    retry: bool


@dataclasses.dataclass(frozen=True)
class Trained:
    """The elastic agent has ended with this exit code (128+n for signal n)."""

    code: int
    start: tuple[int, int] | None = None
    """The newest start of its processes (generation, attempt) if it was killed or has failed itself; None if there was none, or
    it has ended with the run."""


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """SIGTERM, a spot notice, a drain: training has to leave within `grace_s` from `now`. Several may come, in any order: the
    earliest time counts."""

    reason: str
    now: float
    grace_s: float
    ends_s: float | None = None
    """Seconds until the machine is gone; None when nobody said."""


@dataclasses.dataclass(frozen=True)
class GraceOver:
    """The grace period is over."""


@dataclasses.dataclass(frozen=True)
class Flushed:
    """Output and logs are uploaded, or cannot be (`problem`)."""

    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Superseded:
    """A newer generation owns the job's output in the store: this worker is a zombie."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Over:
    """The run had ended before this start; how the worker ends."""

    code: int
    reason: str


Event: TypeAlias = Started | Prepared | PreparationFailed | Trained | Interrupted | GraceOver | Flushed | Superseded | Over


# Effects


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Do the work of a preparing phase."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start the elastic agent and with it the training, after a pause."""

    pause_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Notify:
    """Ask training to save and leave."""

    reason: str
    deadline: float


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kill the elastic agent and the training processes."""


@dataclasses.dataclass(frozen=True)
class Flush:
    """Upload what is left, logs included."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """End the agent. With `stay` only when its pod is deleted, and then with code 0: the end itself is recorded."""

    code: int
    reason: str
    stay: bool = False


Effect: TypeAlias = Prepare | Launch | Notify | Kill | Flush | Exit


def step(worker: Worker, event: Event) -> tuple[Worker, tuple[Effect, ...]]:
    """The state after an event, and the effects to carry out. An event that does not fit the phase changes nothing."""
    match event:
        case Started() if worker.phase is Phase.STARTING:
            return _enter(worker, PREPARATION[0])
        case Prepared(phase) if worker.phase is phase:
            following = PREPARATION.index(phase) + 1
            return _enter(worker, PREPARATION[following] if following < len(PREPARATION) else Phase.TRAINING)
        case PreparationFailed(phase, reason, retry) if worker.phase is phase:
            return _flush(worker, contract.Exit.FAILED if retry else contract.Exit.MISCONFIGURED, reason)
        case Trained(code, start) if worker.phase is Phase.TRAINING:
            relaunches = worker.relaunches + 1 if start == worker.start else 0
            if start is None or worker.late or relaunches > RELAUNCHES:
                if worker.leaving and (code == contract.Exit.INTERRUPTED or contract.killed(code)):
                    return _flush(worker, contract.Exit.INTERRUPTED, worker.leaving)
                return _flush(worker, code, _verdict(code))
            # What the agent has in memory stays, and a worker that leaves saves it yet. The coordinator counts how each start of
            # processes ends, we the other launches.
            pause_s = backoff.exponential(relaunches - 1, PAUSE_S, LONGEST_PAUSE_S) if relaunches else 0.0
            return dataclasses.replace(worker, start=start, relaunches=relaunches), (Launch(pause_s),)
        case Interrupted() if worker.phase not in (Phase.FLUSHING, Phase.ENDED):
            return _leave(worker, event)
        case GraceOver() if worker.leaving and worker.phase is Phase.TRAINING:
            return dataclasses.replace(worker, late=True), (Kill(),)
        case Flushed(problem) if worker.phase is Phase.FLUSHING and worker.code is not None:
            if not problem:
                return _end(worker, worker.code, worker.reason)
            # Start a worker again that is done but for the upload: nothing is left to train, and it uploads again.
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
    return entered, (Launch() if phase is Phase.TRAINING else Prepare(phase),)


def _leave(worker: Worker, asked: Interrupted) -> tuple[Worker, tuple[Effect, ...]]:
    """Interrupted for the first time, or with less time than before."""
    leave_by = asked.now + asked.grace_s
    ends = [each for each in (worker.gone_by, None if asked.ends_s is None else asked.now + asked.ends_s) if each is not None]
    leaving = dataclasses.replace(worker, gone_by=min(ends, default=None))
    if worker.leave_by is not None and worker.leave_by <= leave_by:
        return leaving, ()
    leaving = dataclasses.replace(leaving, leaving=asked.reason, leave_by=leave_by)
    if worker.phase is Phase.TRAINING:
        return leaving, (Notify(asked.reason, leave_by),)
    return _flush(leaving, contract.Exit.INTERRUPTED, f"left before training: {asked.reason}")


def _flush(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    return dataclasses.replace(worker, phase=Phase.FLUSHING, code=code, reason=reason), (Flush(),)


def _end(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    stay = worker.stay and code in FINAL
    return dataclasses.replace(worker, phase=Phase.ENDED, code=code, reason=reason), (Exit(code, reason, stay),)


def flush_timeout_s(code: int | None, worker: Worker, now: float) -> float:
    """How long the last upload of a worker that ends with this code may take: until its machine is gone, if that is known."""
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
    contract.Exit.INTERRUPTED: "training was interrupted, and goes on with the next start of this worker",
    contract.Exit.MISCONFIGURED: "training failed, and would fail again",
    contract.Exit.GIVEN_UP: "the job is given up",
}
