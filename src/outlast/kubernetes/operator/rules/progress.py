"""Training progress in the status: step, rate, newest checkpoint. Pure."""

from __future__ import annotations

import dataclasses

from outlast.kubernetes.operator import job_status
from outlast.kubernetes.operator.plan import Event
from outlast.kubernetes.operator.reconcile import Reconcile
from outlast.rendezvous import sentences

PROGRESS_BYTES_PER_S = 5e6
"""Upper bound of what the API server sends to the agents of one job for progress: each watches the whole status."""
BYTES = (10_000, 15)
"""Bytes of a status, most of them its ledger's, and what each worker adds."""
MEASURE_S = 5.0
"""Shortest time over which a rate is measured."""


def written(rec: Reconcile) -> None:
    """Write progress with any other change, at the first step of a world, and at an interval. New steps alone trigger no
    reconcile pass, so one is requested for when the interval ends."""
    known, mark = rec.status.progress, _mark(rec)
    pods, (whole, each) = len(rec.snapshot.pods), BYTES
    interval_s = max(rec.snapshot.limits.progress_s, pods * (whole + pods * each) / PROGRESS_BYTES_PER_S)
    due = rec.until(known.time, interval_s)
    if mark is not None:
        rec.requeue_at(due or rec.now + interval_s)
    step, committed = rec.step, rec.committed
    steps = next((report.steps for report in rec.snapshot.reports.values() if report.steps is not None), known.steps)
    memory, good = _snapshot(rec), _goodput(rec, trains=mark is not None)
    now_known = step, steps, committed, memory, good
    if now_known == (known.step, known.steps, known.committed, known.snapshot, known.goodput):
        return
    first = mark is not None and known.mark is None
    if first and mark and rec.status.world and mark[0] < rec.status.world.held:
        rec.events.append(Event("Warning", "StepsLost", sentences.began_again(mark[0], rec.status.world.held)))
    anew = dataclasses.replace(rec.status, progress=rec.snapshot.status.progress) != rec.snapshot.status
    if due is not None and not first and not anew and rec.status.finished is None:
        return
    committed_at = rec.now if committed > known.committed else known.committed_at
    size = max((each.bytes for each in rec.snapshot.reports.values() if each.committed == committed), default=0)
    size = size or (known.bytes if committed == known.committed else 0)
    rate, mark = _rate(known, mark)
    now = float(int(rec.now))
    rec.update(progress=job_status.Progress(step, steps, committed, committed_at, rate, now, mark, memory, size, good))


def _goodput(rec: Reconcile, *, trains: bool) -> float | None:
    """What the worker of rank 0 tells while it trains, and after the end once it has counted the whole run."""
    first, over = rec.status.world.members[:1] if trains and rec.status.world else (), rec.status.finished is not None
    told = [each.goodput for id, each in rec.snapshot.reports.items() if (each.whole if over else id in first)]
    return next((round(one, 6) for one in told if one is not None), rec.status.progress.goodput)


def _snapshot(rec: Reconcile) -> tuple[int, int]:
    """The newest complete snapshot that a member of the current world reports, and the steps between two; none after a world."""
    inside = [report.snapshot for report in rec.snapshot.reports.values() if report.member.id in rec.members]
    return max(inside, default=(0, 0))


def _mark(rec: Reconcile) -> tuple[int, float] | None:
    """The newest step of rank 0 in the current world, and its time. Always rank 0, as the clocks of nodes differ."""
    known = rec.status.world
    if known is None or rec.status.called is not None or rec.status.result is not None:
        return None
    report = rec.snapshot.reports.get(known.members[0])
    if report is None or report.step is None or not report.time or report.generation not in (None, known.generation):
        return None
    return report.step, round(report.time, 3)


def _rate(known: job_status.Progress, mark: tuple[int, float] | None) -> tuple[float | None, tuple[int, float] | None]:
    """Steps per second since the last mark, and the mark to measure from next. None before there are two in one world."""
    if mark is None or known.mark is None:
        return None, mark
    seconds = mark[1] - known.mark[1]
    if seconds < MEASURE_S:
        return known.rate, known.mark
    return float(f"{max(0, mark[0] - known.mark[0]) / seconds:.4g}"), mark
