"""Counts failures of workers and their processes against the restart budget. Failures with the same root cause are counted once.
Pure."""

from __future__ import annotations

import dataclasses

from outlast.job.contract import FailureCause
from outlast.job.failure import Failure
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator.observed_job import Pod
from outlast.kubernetes.operator.plan import Event
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import coordination
from outlast.rendezvous import attempts
from outlast.rendezvous.root_cause import Known


def repaired_failures(rec: ReconcilePass) -> None:
    """Count the failures that members have already repaired themselves, each once and in order."""
    if rec.status.result is not None:
        return
    reports = [each for each in rec.snapshot.reports.values() if each.report.past]
    newest = max((each.member.generation for each in reports), default=0)
    for repaired in attempts.uncounted((each.report.past for each in reports), rec.status.counted, newest):
        coordination.take(rec, repaired)
        if rec.skip_rest:
            return


def pod_failure(rec: ReconcilePass, pod: Pod, end: pod_status.End) -> Failure:
    """Return the failure that ended a pod. If the pod ran out of memory, the failure's step is the newest one that a member has
    reported. If the worker left because its bits were wrong, return the failure that it reported itself."""
    world_now, report = rec.status.world, rec.snapshot.reports.get(pod.index)
    told = report.failure if report else None
    if told and told.cause is FailureCause.BITS and world_now and told.generation == world_now.generation:
        return told
    inside = [each for each in rec.snapshot.reports.values() if world_now and each.member.generation == world_now.generation]
    reached = [(each.failure.step if each.failure else None, each.progress.step) for each in inside]
    steps = [step for each in reached for step in each if step is not None]
    return Failure(
        worker=pod.index,
        code=end.code,
        reason=f"worker {pod.index} {end.sentence}",
        cause=FailureCause.OUT_OF_MEMORY if end.out_of_memory else FailureCause.UNKNOWN,
        step=max(steps, default=None) if end.out_of_memory else None,
        generation=world_now.generation if world_now else 0,
        attempt=rec.newest_start(world_now.generation)[1] if world_now else 0,
        time=end.time or rec.now,
    )


def count(rec: ReconcilePass, failure: Failure, generation: int) -> None:
    """Count a worker's failure. Unless that ends the job, treat the world's other failures as its consequences; see
    `cover_others`."""
    coordination.take(rec, Known(failure, failure.step, rec.committed))
    if not rec.skip_rest:
        cover_others(rec, generation)


def cover_others(rec: ReconcilePass, generation: int) -> None:
    """Treat all further failures of a world as caused by the counted one. Generation 0 stands for the workers that belong to no
    world, until they join one."""
    silent = (dataclasses.replace(each, echo=each.echo or each.generation == generation) for each in rec.status.silent)
    rec.update(counted=max(rec.status.counted, rec.newest_start(generation)), silent=tuple(silent))
    if not generation:
        rec.handled_uids.update(dict.fromkeys(pod.uid for pod in rec.snapshot.pods if not rec.is_member(pod)))


def expect_others(rec: ReconcilePass, pod: Pod) -> None:
    """Do not count the end of an interrupted worker, nor the failures that it causes in its world."""
    rec.handled_uids[pod.uid] = None
    status = rec.status
    if status.world and rec.is_member(pod) and status.called is None:
        rec.update(counted=max(status.counted, rec.newest_start(status.world.generation)))


def record_interruption(rec: ReconcilePass, pod: Pod, event_reason: str, sentence: str) -> None:
    """Count and report an interruption, once per pod."""
    if pod.uid not in rec.handled_uids:
        rec.events.append(Event("Normal", event_reason, sentence))
        rec.update(interruptions=rec.status.interruptions + 1)
        rec.handled_uids[pod.uid] = None
