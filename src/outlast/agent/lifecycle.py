"""The life of a worker, as a pure state machine: what has happened in, what to do out.

    starting -> run, code, environment, data, checkpoint -> training -> pushing -> ended
                          (told to leave at any time: finish early, save if there is something to save, exit 75)

Rule 1: everything that decides what a worker does next lives in this file. `agent.agent` carries out the effects and reports
the events; it decides nothing. There is no clock, file or process here; times are those of the agent's own clock and arrive with
the events.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TypeAlias

from outlast import contract
from outlast.workerfiles.progress import Progress


class Phase(enum.StrEnum):
    """Where the worker is in its life; the order is the order of work."""

    STARTING = "starting"
    RUN = "taking up the run"
    CODE = "fetching code"
    ENVIRONMENT = "making the environment"
    DATA = "fetching data"
    CHECKPOINT = "restoring the checkpoint"
    TRAINING = "training"
    PUSHING = "pushing"
    ENDED = "ended"


PREPARATION = (Phase.RUN, Phase.CODE, Phase.ENVIRONMENT, Phase.DATA, Phase.CHECKPOINT)


@dataclasses.dataclass(frozen=True)
class Worker:
    """The state: phase, and what the end will be."""

    phase: Phase = Phase.STARTING
    leaving: str = ""
    """Why it was told to leave; empty if it was not."""
    code: int | None = None
    """The exit code, as soon as it is settled."""
    reason: str = ""


# Events


@dataclasses.dataclass(frozen=True)
class Started:
    """The agent runs."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The work of a preparing phase is done."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class Unprepared:
    """It cannot be done; `retry` says whether starting again could help."""

    phase: Phase
    reason: str
    retry: bool


@dataclasses.dataclass(frozen=True)
class Trained:
    """The elastic agent has ended with this exit code (128+n for signal n)."""

    code: int


@dataclasses.dataclass(frozen=True)
class Told:
    """SIGTERM, a spot notice, a drain: leave within `grace_s` from `now`."""

    reason: str
    now: float
    grace_s: float


@dataclasses.dataclass(frozen=True)
class GraceOver:
    """The time to leave is used up."""


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Output and logs are where they belong, or cannot be brought there (`problem`)."""

    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Displaced:
    """A newer generation owns the job's output in the store: we are a zombie."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Over:
    """The run has ended before this start; what the worker is to end with."""

    code: int
    reason: str


Event: TypeAlias = Started | Prepared | Unprepared | Trained | Told | GraceOver | Pushed | Displaced | Over


# Effects


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Do the work of a preparing phase."""

    phase: Phase


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start the elastic agent and with it the training."""


@dataclasses.dataclass(frozen=True)
class Notify:
    """Tell the training to save and leave."""

    reason: str
    deadline: float


@dataclasses.dataclass(frozen=True)
class Kill:
    """End the elastic agent and the training, at once."""


@dataclasses.dataclass(frozen=True)
class Push:
    """Push what is left, logs included."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """End the agent."""

    code: int
    reason: str


Effect: TypeAlias = Prepare | Launch | Notify | Kill | Push | Exit


def step(worker: Worker, event: Event) -> tuple[Worker, tuple[Effect, ...]]:
    """What the worker is after an event, and what must be done about it. An event that does not fit changes nothing."""
    match event:
        case Started() if worker.phase is Phase.STARTING:
            return _enter(worker, PREPARATION[0])
        case Prepared(phase) if worker.phase is phase:
            following = PREPARATION.index(phase) + 1
            return _enter(worker, PREPARATION[following] if following < len(PREPARATION) else Phase.TRAINING)
        case Unprepared(phase, reason, retry) if worker.phase is phase:
            return _push(worker, contract.Exit.FAILED if retry else contract.Exit.MISCONFIGURED, reason)
        case Trained(code) if worker.phase is Phase.TRAINING:
            if worker.leaving and (code == contract.Exit.INTERRUPTED or contract.killed(code)):
                return _push(worker, contract.Exit.INTERRUPTED, worker.leaving)
            return _push(worker, code, _verdict(code))
        case Told(reason, now, grace_s) if not worker.leaving and worker.phase not in (Phase.PUSHING, Phase.ENDED):
            told = dataclasses.replace(worker, leaving=reason)
            if worker.phase is Phase.TRAINING:
                return told, (Notify(reason, now + grace_s),)
            return _push(told, contract.Exit.INTERRUPTED, f"left before training: {reason}")
        case GraceOver() if worker.leaving and worker.phase is Phase.TRAINING:
            return worker, (Kill(),)
        case Pushed(problem) if worker.phase is Phase.PUSHING and worker.code is not None:
            if not problem:
                return _end(worker, worker.code, worker.reason)
            # Who is done but for the push is started again: nothing is left to train, and the push is tried anew.
            code = contract.Exit.INTERRUPTED if worker.code == contract.Exit.DONE else worker.code
            return _end(worker, code, f"{worker.reason}; {problem}")
        case Displaced(reason) if worker.phase not in (Phase.STARTING, Phase.ENDED):
            ended, effects = _end(worker, contract.Exit.MISCONFIGURED, reason)
            return ended, (Kill(), *effects)
        case Over(code, reason) if worker.phase is Phase.RUN:
            return _end(worker, code, reason)
    return worker, ()


def _enter(worker: Worker, phase: Phase) -> tuple[Worker, tuple[Effect, ...]]:
    entered = dataclasses.replace(worker, phase=phase)
    return entered, (Launch() if phase is Phase.TRAINING else Prepare(phase),)


def _push(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    return dataclasses.replace(worker, phase=Phase.PUSHING, code=code, reason=reason), (Push(),)


def _end(worker: Worker, code: int, reason: str) -> tuple[Worker, tuple[Effect, ...]]:
    return dataclasses.replace(worker, phase=Phase.ENDED, code=code, reason=reason), (Exit(code, reason),)


def _verdict(code: int) -> str:
    if code == contract.Exit.DONE:
        return "training is done"
    if code == contract.Exit.INTERRUPTED:
        return "training was interrupted and has saved its state"
    if code == contract.Exit.MISCONFIGURED:
        return "training failed, and would fail again"
    if code == contract.Exit.GIVEN_UP:
        return "the job is given up"
    return "the training processes were killed" if contract.killed(code) else f"training failed with exit code {code}"


# Hangs


@dataclasses.dataclass(frozen=True)
class Process:
    """One training process as its agent sees it."""

    local_rank: int
    progress: Progress
    stopped: bool
    """Whether the kernel says that it is stopped (SIGSTOP, a debugger)."""
    silent_s: float
    """For how long it has not moved: no step, nothing that its main thread did, no output of a plain script. Time in which its
    agent stood still itself does not count."""
    frozen: bool = False
    """Whether it cannot run Python: native code holds its lock."""
    age_s: float = math.inf
    """For how long it has been there."""
    watched: bool = True
    """Whether it says if its main thread moves. Not so when it has become another program (execv)."""
    where: str = ""
    """Where it stands, and all ranks if all stand still."""

    @property
    def early(self) -> bool:
        """Whether it has stood still for longer than it had moved."""
        return self.silent_s > self.age_s / 2


@dataclasses.dataclass(frozen=True)
class Hang:
    """These training processes hang and are to be killed, with this sentence for each."""

    victims: tuple[tuple[Process, str], ...]


OTHERS_FIRST = 1.25
"""A worker whose own processes look healthy waits this much longer: whoever holds the culprit acts first."""
START_LIMIT_S = 600.0
"""Before the first step there is no pace to judge by: imports, compilation and restores may be slow."""


def hung(processes: Sequence[Process], limit_s: float) -> Hang | None:
    """Whether training stands still on this worker.

    All ranks of a world stand still together when one hangs. One that the kernel has stopped, or that cannot run Python, is the
    culprit; if none of ours is, another worker's may be, and we wait a little longer before we take ours for stuck. Ranks that
    wait for one that moves count as moving (`hangs.stall`).
    """
    judged = [p for p in processes if p.progress.phase != "done" and (p.watched or p.progress.phase != "started")]
    stopped = [p for p in processes if p.stopped and p.silent_s > limit_s]
    if stopped:
        return Hang(tuple((p, f"hung: stopped (SIGSTOP) for {p.silent_s:.0f} s{_at(p)}") for p in stopped))
    frozen = [p for p in judged if p.frozen and p.silent_s > _limit(p, limit_s)]
    if frozen:
        return Hang(tuple((p, f"hung: unable to run Python for {p.silent_s:.0f} s{_at(p)}") for p in frozen))
    stuck = [p for p in judged if p.silent_s > OTHERS_FIRST * _limit(p, limit_s)]
    if stuck and len(stuck) == len(judged):
        return Hang(tuple((p, f"hung: no progress for {p.silent_s:.0f} s{_at(p)}") for p in stuck))
    return None


def _limit(process: Process, limit_s: float) -> float:
    return limit_s if process.progress.phase in ("started", "train", "save") else max(limit_s, START_LIMIT_S)


def _at(process: Process) -> str:
    phase, step, where = process.progress.phase, process.progress.step, f": {process.where}" if process.where else ""
    if phase in ("train", "save") or (phase == "started" and step):
        return f" after step {step}{where}"
    return where if phase == "started" else f" in {phase}{where}"
