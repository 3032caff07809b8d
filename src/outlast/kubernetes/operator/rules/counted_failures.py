"""Failures of workers and their processes; each cause is counted once against the restart budget. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outlast.job import contract
from outlast.job.contract import FailureCause
from outlast.job.failure import Failure
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.elasticjob_status import CountedFailure
from outlast.kubernetes.operator.observed_job import Pod
from outlast.kubernetes.operator.plan import Document, Event
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.rendezvous import attempts, restart_budget, root_cause, who_trains
from outlast.rendezvous.root_cause import Pending
from outlast.rendezvous.who_trains import MemberState


def uncounted(rec: ReconcilePass) -> list[Pending]:
    """Return failures that members of the current world report and that are not counted yet."""
    status = rec.status
    if status.world is None:
        return []
    counted, pending = status.counted, []
    for report in rec.snapshot.reports.values():
        member, pod = report.member, rec.pod(report.member.id)
        late = member.again and member.generation < status.world.generation  # the others have continued without it
        if member.failed and (failure := report.failure) and (late or member.generation == status.world.generation):
            part = failure.start <= counted or root_cause.is_part_of_call(report.echo, status.called, counted, failure.generation)
            if part or (late and (pod is None or pod.uid in rec.handled_uids)):
                continue
            if failure.time > rec.now:  # its node's clock is ahead of ours
                failure = dataclasses.replace(failure, time=report.renewed)
            pending.append(Pending(report.echo, failure))
    others = any(not (each.echo and each.failure.left) for each in pending)
    return pending if others else []  # members that left did so for a reason other than their own echo


def member_is_missing(rec: ReconcilePass) -> bool:
    """Return whether a member of the world is gone or was replaced, so that the others' failures are secondary."""
    world = rec.status.world
    alive = {pod.index for pod in rec.alive}
    members = {id for id, report in rec.snapshot.reports.items() if world and report.member.generation >= world.generation}
    return world is not None and not set(world.members) <= alive & members


def member_has_not_failed(rec: ReconcilePass) -> bool:
    """Return whether a member of the world still reports that it trains or is done although others have failed: that member
    may be the cause."""
    current = rec.status.world
    members = [report.member for id, report in rec.snapshot.reports.items() if id in rec.members]
    return any(
        m.standing in (MemberState.TRAINING, MemberState.DONE) and m.generation == current.generation
        for m in members
        if current is not None
    )


def count_reported(rec: ReconcilePass, pending: list[Pending], new: who_trains.World | None = None) -> None:
    """Count one generation's failures as one, the failure that caused them. Secondary failures are explained by a member that is
    missing from the new world."""
    echo, failure = root_cause.cause(pending)
    generation = failure.generation
    previous = rec.status.world
    without = new is not None and previous is not None and not set(previous.members) <= set(new.members)
    if not (echo and (without or member_is_missing(rec))):
        pod = rec.pod(failure.worker)
        count(rec, failure, raised_step=None if echo else failure.step, node=pod.node if pod else "", pending=pending)
        cover_others(rec, generation)
    if not (echo and without):  # else the cause may be about to report, late
        rec.update(counted=max(rec.status.counted, failure.start))


def repaired_failures(rec: ReconcilePass) -> None:
    """Count failures that the members have repaired by themselves, each once and in order."""
    if rec.status.result is not None:
        return
    reports = [each for each in rec.snapshot.reports.values() if each.report.past]
    newest = max((each.member.generation for each in reports), default=0)
    for past, ago_s in attempts.uncounted((each.report.past for each in reports), rec.status.counted, newest):
        echo, failure = root_cause.reported(past.failure, past.worker, past.start, rec.now)
        failure = dataclasses.replace(failure, time=min(failure.time, rec.now))
        pod = rec.pod(failure.worker)
        rec.update(counted=failure.start)
        count(rec, failure, raised_step=None if echo else failure.step, node=pod.node if pod else "", past=past, ago_s=ago_s)
        if rec.skip_rest:
            return


def pod_failure(rec: ReconcilePass, pod: Pod, end: pod_status.End) -> Failure:
    """Return a pod's failure. Its own step is no longer known, but its peers were at the same step. A worker that leaves with
    wrong bits has already reported them."""
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


def count(
    rec: ReconcilePass,
    failure: Failure,
    *,
    raised_step: int | None,
    node: str,
    pending: Sequence[Pending] = (),
    past: attempts.Past | None = None,
    ago_s: float = 0.0,
) -> None:
    """Count a failure, and end the job if the budget is exhausted. `past` is a failure that the members repaired `ago_s` seconds
    ago; the newest committed step at that time counts."""
    status, committed = rec.status, root_cause.committed(past.failure) if past else None
    told = root_cause.Known(failure, raised_step, rec.committed if committed is None else committed)
    reports = (report.member for report in rec.snapshot.reports.values())
    fits = who_trains.fits(status.world, rec.spec.workers.allowed(), reports)
    failure, verdict = root_cause.judge(
        told, status.history, rec.policy, rec.now - ago_s, pending=pending, current=status.world, fits=fits
    )
    rec.update(failure=failure_document(rec, failure, node))
    fields = {key: value for key, value in failure.document().items() if key in ("generation", "worker", "rank", "code", "step")}
    fields |= {"reason": failure.reason, "counted": failure.counted, "cause": str(failure.cause) or None}
    rec.record("failure", **fields, repaired=past.attempt if past else None)
    if isinstance(verdict, restart_budget.Stop):
        code = contract.Exit.MISCONFIGURED if verdict.code == contract.Exit.MISCONFIGURED else contract.Exit.GIVEN_UP
        return rec.finish(State.FAILED, verdict.reason, code, verdict.kind)
    known = {counted.record: counted for counted in status.counted_failures}
    counted_failures = tuple(known.get(each) or CountedFailure(each, node, str(failure.cause)) for each in verdict.history)
    rec.update(counted_failures=counted_failures, restarts=status.restarts + verdict.counted)
    if past:
        state = State.RUNNING if status.called is None else State.RESTARTING
        return rec.set_state(state, f"{past.sentence}: {verdict.reason}", "WorkerFailed", event=True, warning=True)
    rec.prerequisites = desired.prerequisites(rec.snapshot)  # if some were deleted, workers could not report or meet
    rec.set_state(State.RESTARTING, verdict.reason, "WorkerFailed", event=True, warning=True)


def failure_document(rec: ReconcilePass, failure: Failure, node: str) -> Document:
    """Return a failure as stored in the status, with the tail of its worker's log, from the agent or else from the pod."""
    pod = rec.pod(failure.worker)
    log_tail = failure.log_tail or (pod.log_tail if pod is not None else "")
    empty = {name for name in ("cause", "attempt") if not getattr(failure, name)}
    return {**failure.document(but={"log_tail", *empty}), "node": node, **({"logTail": log_tail} if log_tail else {})}


def cover_others(rec: ReconcilePass, generation: int) -> None:
    """Treat all further failures of a world as covered by the counted one. A failure outside any world (generation 0) covers all
    workers that are in no world, until they join one."""
    silent = (dataclasses.replace(each, echo=each.echo or each.generation == generation) for each in rec.status.silent)
    rec.update(counted=max(rec.status.counted, rec.newest_start(generation)), silent=tuple(silent))
    if not generation:
        rec.handled_uids.update(dict.fromkeys(pod.uid for pod in rec.snapshot.pods if not rec.is_member(pod)))


def expect_others(rec: ReconcilePass, pod: Pod) -> None:
    """Treat the failures of the other workers in an interrupted worker's world as secondary."""
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
