"""When training hangs: the one rule, pure. Every limit is a multiple of the job's `hang.limit`.

    stopped by the kernel             limit
    unable to run Python              limit, before the first step at least 600 s
    silent, as are all of the worker  1.25 x limit, before the first step at least 1.25 x 600 s
    /healthz of the worker fails      1.25 x limit, from the first step on

`agent.ranks` observes, this module judges, `agent.agent` kills and leaves a verdict file, from which `launch.elastic` reports the
failure. Deadlocks by a mistake in the script are found earlier, in seconds, by `hangs.stall`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from outlast.job.workerfiles.progress import Progress


@dataclasses.dataclass(frozen=True)
class Process:
    """One training process as its agent observes it."""

    local_rank: int
    progress: Progress
    stopped: bool
    """Whether the kernel has stopped it (SIGSTOP, a debugger)."""
    silent_s: float
    """Time without progress: no step, no activity of its main thread, no output of a plain script. Time in which the agent
    itself did not run is not counted."""
    frozen: bool = False
    """Whether it cannot run Python, because native code holds the interpreter's lock."""
    age_s: float = math.inf
    """Time since the agent saw it first."""
    watched: bool = True
    """Whether it reports the activity of its main thread. Not after it became another program (execv)."""
    where: str = ""
    """Where in the script it is, or where all ranks are if none moves."""
    alone: int = 0
    """As `progress.Pulse.alone`."""

    @property
    def early(self) -> bool:
        """Whether it has been silent for longer than it was active."""
        return self.silent_s > self.age_s / 2


OTHERS_FIRST = 1.25
"""Factor on the limit for processes that may only wait for another worker's: the worker with the culprit acts first."""
START_LIMIT_S = 600.0
"""Least limit before the first step, where imports, compilation and restores may be slow."""


def hung(processes: Sequence[Process], limit_s: float) -> list[tuple[Process, str]]:
    """The processes of this worker to kill because they hang, with a sentence for each. `limit_s` is the job's `hang.limit`.

    All ranks of a world stand still together when one hangs. One that the kernel has stopped, or that cannot run Python, is the
    culprit; if none of ours is, another worker's may be, so ours count as stuck only after a longer time. Ranks that wait for
    one that moves count as moving (`hangs.stall`).
    """
    judged = [p for p in processes if p.progress.phase != "done" and (p.watched or p.progress.phase != "started")]
    stopped = [p for p in processes if p.stopped and p.silent_s > limit_s]
    if stopped:
        return [(p, f"hung: stopped (SIGSTOP) for {p.silent_s:.0f} s{_at(p)}") for p in stopped]
    frozen = [p for p in judged if p.frozen and p.silent_s > _limit(p, limit_s)]
    if frozen:
        return [(p, f"hung: unable to run Python for {p.silent_s:.0f} s{_at(p)}") for p in frozen]
    stuck = [p for p in judged if p.silent_s > OTHERS_FIRST * _limit(p, limit_s)]
    if len(stuck) < len(judged):
        return []
    return [(p, f"hung: no progress for {p.silent_s:.0f} s{_at(p)}") for p in stuck]


def _limit(process: Process, limit_s: float) -> float:
    return limit_s if process.progress.phase in ("started", "train", "save") else max(limit_s, START_LIMIT_S)


def _at(process: Process) -> str:
    phase, step, where = process.progress.phase, process.progress.step, f": {process.where}" if process.where else ""
    if phase in ("train", "save") or (phase == "started" and step):
        return f" after step {step}{where}"
    return where if phase == "started" else f" in {phase}{where}"


def unhealthy(process: Process, silent_s: float, limit_s: float) -> bool:
    """Whether `/healthz` fails: training that has begun is silent past the limit after which its agent should have ended it."""
    return process.progress.phase in ("train", "save") and silent_s > OTHERS_FIRST * limit_s
