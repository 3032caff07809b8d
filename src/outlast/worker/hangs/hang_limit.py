"""Decides when training hangs. Every limit is a multiple of the job's `hang.limit`.

    stopped by the kernel                limit
    unable to run Python                 limit, but before the first step at least 600 s
    all of a worker's processes silent   1.25 x limit, but before the first step at least 1.25 x 600 s
    the worker's /healthz fails          1.25 x limit, from the first step on

`agent.ranks` observes the processes, `agent.agent` kills them, and `agent.world_loop` reports the failure. `hangs.deadlocks`
detects deadlocks caused by the script within seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from outlast.job.workerfiles.progress_file import Progress


@dataclasses.dataclass(frozen=True)
class Process:
    """An agent's observation of one training process."""

    local_rank: int
    progress: Progress
    stopped: bool
    silent_s: float
    """Seconds without a step, motion of the main thread, or a plain script's output, excluding the agent's pauses."""
    frozen: bool = False
    """True if the process cannot run Python because native code holds the GIL."""
    age_s: float = math.inf
    """Seconds since the agent first observed the process."""
    watched: bool = True
    """False after execv, when the process does not report the activity of its main thread."""
    where: str = ""
    """The process's place in the script, or all ranks' places if all are still."""
    alone: int = 0
    """See `progress_file.Pulse.alone`."""

    @property
    def early(self) -> bool:
        """True if the process has been silent for longer than it was active."""
        return self.silent_s > self.age_s / 2


OTHERS_FIRST = 1.25
"""Factor on the limit for processes that may be waiting for a culprit on another worker, whose agent should act first."""
START_LIMIT_S = 600.0
"""Minimum limit in seconds before the first step, since imports, compilation and restores may be slow."""


def hung(processes: Sequence[Process], limit_s: float) -> list[tuple[Process, str]]:
    """Return this worker's hung processes, which must be killed, each with a reason. `limit_s` is the job's `hang.limit`.

    If one rank hangs, all ranks in its world stop. The culprit is a rank that the kernel has stopped or that cannot run Python;
    it may be on another worker, so other ranks count as stuck only after a longer time.
    """
    counted = [p for p in processes if p.progress.phase != "done" and (p.watched or p.progress.phase != "started")]
    stopped = [p for p in processes if p.stopped and p.silent_s > limit_s]
    if stopped:
        return [(p, f"hung: stopped (SIGSTOP) for {p.silent_s:.0f} s{_at(p)}") for p in stopped]
    frozen = [p for p in counted if p.frozen and p.silent_s > _limit(p, limit_s)]
    if frozen:
        return [(p, f"hung: unable to run Python for {p.silent_s:.0f} s{_at(p)}") for p in frozen]
    stuck = [p for p in counted if p.silent_s > OTHERS_FIRST * _limit(p, limit_s)]
    if len(stuck) < len(counted):
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
    """Return whether `/healthz` must fail: training has begun, but has been silent for so long that its agent kills it."""
    return process.progress.phase in ("train", "save") and silent_s > OTHERS_FIRST * limit_s
