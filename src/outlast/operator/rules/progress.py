"""How far training is, as a job's status tells it. Pure."""

from __future__ import annotations

import dataclasses

from outlast.operator import job_status
from outlast.operator.reconcile import Look

TOLD_BYTES_PER_S = 5e6
"""The most that the API server sends to the agents of one job to tell how far training is: each gets the whole status."""
BYTES_PER_WORKER = 15
"""How much longer a status is by each."""
MEASURE_S = 5.0
"""A rate is that of at least so long."""


def tell(look: Look) -> None:
    """How far training is: with everything else that is written, at the first step of a world, else now and then. That steps are
    heard of is no reason to look, so there is a look when they are due."""
    known, mark = look.memory.progress, _mark(look)
    pause_s = max(look.seen.limits.progress_s, len(look.seen.pods) ** 2 * BYTES_PER_WORKER / TOLD_BYTES_PER_S)
    due = look.until(known.time, pause_s)
    if mark is not None:
        look.again(due or look.now + pause_s)
    step, committed = look.step, look.committed
    steps = next((told.steps for told in look.seen.told.values() if told.steps is not None), known.steps)
    if (step, steps, committed) == (known.step, known.steps, known.committed):
        return
    first = mark is not None and known.mark is None
    anew = dataclasses.replace(look.memory, progress=look.seen.memory.progress) != look.seen.memory
    if due is not None and not first and not anew:
        return
    committed_at = look.now if committed > known.committed else known.committed_at
    rate, mark = _rate(known, mark)
    look.know(progress=job_status.Progress(step, steps, committed, committed_at, rate, float(int(look.now)), mark))


def _mark(look: Look) -> tuple[int, float] | None:
    """The newest step of rank 0 in the world that trains, and when it was. Always the same one: clocks of nodes differ."""
    known = look.memory.world
    if known is None or look.memory.called is not None or look.memory.closed is not None:
        return None
    told = look.seen.told.get(known.members[0])
    if told is None or told.step is None or not told.time or told.generation not in (None, known.generation):
        return None
    return told.step, round(told.time, 3)


def _rate(known: job_status.Progress, mark: tuple[int, float] | None) -> tuple[float | None, tuple[int, float] | None]:
    """Steps per second since the mark that is known, and the mark to go on from. None before there are two of one world."""
    if mark is None or known.mark is None:
        return None, mark
    seconds = mark[1] - known.mark[1]
    if seconds < MEASURE_S:
        return known.rate, known.mark
    return float(f"{max(0, mark[0] - known.mark[0]) / seconds:.4g}"), mark
