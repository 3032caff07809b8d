"""Writes training progress, such as the step and the newest checkpoint, into the status. Pure."""

from __future__ import annotations

import dataclasses

from outlast.job.contract import FailureCause
from outlast.kubernetes.operator import elasticjob_status
from outlast.kubernetes.operator.elasticjob_status import Status
from outlast.kubernetes.operator.observed_job import LeaseProgress
from outlast.kubernetes.operator.plan import Event
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.rendezvous import sentences

PROGRESS_BYTES_PER_S = 5e6
"""Maximum traffic that progress in the status may cause for one job, in bytes per second: each of its agents receives the whole
status."""
STATUS_BYTES = (10_000, 15)
"""Estimated size of a status in bytes: a constant part, mostly the ledger, and a part for each worker."""
MEASURE_S = 5.0
"""Minimum time over which a rate is measured, in seconds."""


def _went_back(status: Status) -> bool:
    """Return whether the last world ended because a rank's state differed, so that its last steps are withdrawn rather than
    lost."""
    last, failed = [each.cause for each in status.counted_failures[-1:]], (status.failure or {}).get("generation")
    return last == [FailureCause.BITS] and status.world is not None and failed == status.world.generation - 1


def update_progress(rec: ReconcilePass) -> None:
    """Write the progress together with any other change, at a world's first step, and otherwise at intervals. New steps trigger
    no reconcile pass, so this function requests the next pass."""
    last, mark = rec.status.progress, _mark(rec)
    pods, (base_bytes, each) = len(rec.snapshot.pods), STATUS_BYTES
    interval_s = max(rec.snapshot.limits.progress_s, pods * (base_bytes + pods * each) / PROGRESS_BYTES_PER_S)
    due = rec.end_of_wait(last.time, interval_s)
    if mark is not None:
        rec.requeue_at(due or rec.now + interval_s)
    step, committed = rec.step, rec.committed
    reports = [each.progress for each in rec.snapshot.reports.values()]
    steps = next((each.steps for each in reports if each.steps is not None), last.steps)
    snapshot, (goodput, losses) = _snapshot(rec), _account(rec, trains=mark is not None)
    reported = step, steps, committed, snapshot, goodput, losses
    if reported == (last.step, last.steps, last.committed, last.snapshot, last.goodput, last.losses):
        return
    first = mark is not None and last.mark is None
    if first and mark and rec.status.world and mark[0] < rec.status.world.held and not _went_back(rec.status):
        rec.events.append(Event("Warning", "StepsLost", sentences.began_again(mark[0], rec.status.world.held)))
    other_changes = dataclasses.replace(rec.status, progress=rec.snapshot.status.progress) != rec.snapshot.status
    if due is not None and not first and not other_changes and rec.status.finished is None:
        return
    committed_at = rec.now if committed > last.committed else last.committed_at
    size = max((each.bytes for each in reports if each.committed == committed), default=0)
    size = size or (last.bytes if committed == last.committed else 0)
    rate, mark = _rate(last, mark)
    now = float(int(rec.now))
    rec.update(
        progress=elasticjob_status.Progress(
            step, steps, committed, committed_at, rate, now, mark, snapshot, size, goodput, losses
        )
    )


def _account(rec: ReconcilePass, *, trains: bool) -> tuple[float | None, elasticjob_status.Losses | None]:
    """Return the goodput and losses that rank 0's worker reports. After the job's end, return those that cover the whole run,
    from any worker."""
    first, over = rec.status.world.members[:1] if trains and rec.status.world else (), rec.status.finished is not None
    last = rec.status.progress
    for id, report in rec.snapshot.reports.items():
        each = report.progress
        if each.goodput is not None and (each.whole if over else id in first):
            return round(min(1.0, max(0.0, each.goodput)), 6), (last.losses or elasticjob_status.Losses()).grown(each.losses)
    return last.goodput, last.losses


def _snapshot(rec: ReconcilePass) -> tuple[int, int]:
    """Return the step of the newest complete snapshot in the world, and the number of steps between snapshots; (0, 0) if
    unknown."""
    inside = [each.progress for each in rec.snapshot.reports.values() if each.member.id in rec.members]
    return max(((each.snapshot, each.every) for each in inside), default=(0, 0))


def _mark(rec: ReconcilePass) -> tuple[int, float] | None:
    """Return rank 0's newest step in the current world, and when rank 0 completed it. Only rank 0's reports are used, because
    nodes' clocks differ."""
    world = rec.status.world
    if world is None or rec.status.called is not None or rec.status.result is not None:
        return None
    report = rec.snapshot.reports.get(world.members[0])
    now = report.progress if report else LeaseProgress()
    if now.step is None or not now.time or now.generation not in (None, world.generation):
        return None
    return now.step, round(now.time, 3)


def _rate(last: elasticjob_status.Progress, mark: tuple[int, float] | None) -> tuple[float | None, tuple[int, float] | None]:
    """Return the steps per second since the last mark (a step and its time), and the mark to measure from next. The rate is None
    until a world has two marks."""
    if mark is None or last.mark is None:
        return None, mark
    seconds = mark[1] - last.mark[1]
    if seconds < MEASURE_S:
        return last.rate, last.mark
    return float(f"{max(0, mark[0] - last.mark[0]) / seconds:.4g}"), mark
