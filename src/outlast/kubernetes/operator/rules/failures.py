"""Failures of workers and of their processes, each cause counted once against the restart budget. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outlast.job import contract
from outlast.job.contract import FailureCause
from outlast.job.failure import Failure
from outlast.job.status import State
from outlast.kubernetes.api import pods
from outlast.kubernetes.operator import desired
from outlast.kubernetes.operator.job_status import CountedFailure
from outlast.kubernetes.operator.plan import Document, Event
from outlast.kubernetes.operator.reconcile import Reconcile
from outlast.kubernetes.operator.snapshot import Pod
from outlast.rendezvous import attempts, restarts, world
from outlast.rendezvous import failures as judging
from outlast.rendezvous.failures import Pending
from outlast.rendezvous.transports.sockets import is_count
from outlast.rendezvous.world import MemberState


def reported(rec: Reconcile) -> list[Pending]:
    """Failures that members report in the current world and that are not counted yet."""
    known = rec.status
    if known.world is None:
        return []
    counted, found = known.counted, []
    for report in rec.snapshot.reports.values():
        member, pod = report.member, rec.pod(report.member.id)
        late = member.again and member.generation < known.world.generation  # the others have gone on without it
        if member.failed and (failure := report.failure) and (late or member.generation == known.world.generation):
            part = failure.start <= counted or judging.is_part_of_call(report.echo, known.called, counted, failure.generation)
            if part or (late and (pod is None or pod.uid in rec.handled)):
                continue
            if failure.time > rec.now:  # its node's clock is ahead of ours
                failure = dataclasses.replace(failure, time=report.renewed)
            found.append(Pending(report.echo, failure))
    others = any(not (each.echo and each.failure.left) for each in found)
    return found if others else []  # who has left was called for another reason than an echo of that


def explained(rec: Reconcile) -> bool:
    """Whether a member of the world is gone or replaced: the failures of the others are secondary to that."""
    known = rec.status.world
    here = {pod.index for pod in rec.alive}
    members = {id for id, report in rec.snapshot.reports.items() if known and report.member.generation >= known.generation}
    return known is not None and not set(known.members) <= here & members


def unanswered(rec: Reconcile) -> bool:
    """Whether a member of the world still reports that it trains or is done although others have failed: it may be the cause."""
    known = rec.status.world
    said = [report.member for id, report in rec.snapshot.reports.items() if id in rec.members]
    return any(
        m.standing in (MemberState.TRAINING, MemberState.DONE) and m.generation == known.generation
        for m in said
        if known is not None
    )


def count_reported(rec: Reconcile, pending: list[Pending], new: world.World | None = None) -> None:
    """Count the failures of one generation as their cause. A member that the new world lacks explains secondary failures."""
    echo, failure = judging.cause(pending)
    generation = failure.generation
    before = rec.status.world
    without = new is not None and before is not None and not set(before.members) <= set(new.members)
    if not (echo and (without or explained(rec))):
        pod = rec.pod(failure.worker)
        count(rec, failure, raised=None if echo else failure.step, node=pod.node if pod else "", pending=pending)
        cover_others(rec, generation)
    if not (echo and without):  # else the cause may be about to report, late
        rec.update(counted=max(rec.status.counted, failure.start))


def repaired(rec: Reconcile) -> None:
    """Count what members have repaired by themselves, each failure once and in order."""
    if rec.status.result is not None:
        return
    said = [report for report in rec.snapshot.reports.values() if report.past]
    newest = max((report.member.generation for report in said), default=0)
    for past, ago_s in attempts.uncounted((report.past for report in said), rec.status.counted, newest):
        echo, failure = judging.reported(past.failure, past.worker, past.start, rec.now)
        failure = dataclasses.replace(failure, time=min(failure.time, rec.now))
        pod = rec.pod(failure.worker)
        rec.update(counted=failure.start)
        count(rec, failure, raised=None if echo else failure.step, node=pod.node if pod else "", past=past, ago_s=ago_s)
        if rec.done:
            return


def of_pod(rec: Reconcile, pod: Pod, end: pods.End) -> Failure:
    """The failure of a pod. It cannot say any more at which step; its peers were at the same one."""
    world_now = rec.status.world
    inside = [each for each in rec.snapshot.reports.values() if world_now and each.member.generation == world_now.generation]
    told = [step for each in inside for step in ((each.failure.step if each.failure else None), each.step) if step is not None]
    return Failure(
        worker=pod.index,
        code=end.code,
        reason=f"worker {pod.index} {end.sentence}",
        cause=FailureCause.OUT_OF_MEMORY if end.out_of_memory else FailureCause.UNKNOWN,
        step=max(told, default=None) if end.out_of_memory else None,
        generation=world_now.generation if world_now else 0,
        attempt=rec.start_of(world_now.generation)[1] if world_now else 0,
        time=end.time or rec.now,
    )


def count(
    rec: Reconcile,
    failure: Failure,
    *,
    raised: int | None,
    node: str,
    pending: Sequence[Pending] = (),
    past: attempts.Past | None = None,
    ago_s: float = 0.0,
) -> None:
    """Count a failure, and end the job if the budget is exhausted. `past` is one that the members have repaired, which happened
    `ago_s` before now; the newest committed step is what it was then."""
    known, committed = rec.status, past.failure.get("committed", -1) if past else -1
    budget = judging.Budget(known.history, rec.policy, committed if is_count(committed) else rec.committed)
    members = known.world.members if known.world else ()
    failure, verdict = judging.judge(failure, raised, budget, rec.now - ago_s, pending=pending, members=members)
    rec.update(failure=kept(rec, failure, node))
    told = {key: value for key, value in failure.document().items() if key in ("generation", "worker", "rank", "code", "step")}
    told |= {"reason": failure.reason, "counted": failure.counted}
    rec.note("failure", **told, repaired=past.attempt if past else None)
    if isinstance(verdict, restarts.Stop):
        code = contract.Exit.MISCONFIGURED if verdict.code == contract.Exit.MISCONFIGURED else contract.Exit.GIVEN_UP
        return rec.finish(State.FAILED, verdict.reason, code, verdict.kind)
    nodes = {counted.record: counted.node for counted in known.counted_failures}
    counted_failures = tuple(CountedFailure(record, nodes.get(record, node)) for record in verdict.history)
    rec.update(counted_failures=counted_failures, restarts=known.restarts + verdict.counted)
    if past:
        state = State.RUNNING if known.called is None else State.RESTARTING
        return rec.set_state(state, f"{past.sentence}: {verdict.reason}", "WorkerFailed", event=True, warning=True)
    rec.prerequisites = desired.prerequisites(rec.snapshot)  # some may have been deleted, so that workers cannot report or meet
    rec.set_state(State.RESTARTING, verdict.reason, "WorkerFailed", event=True, warning=True)


def kept(rec: Reconcile, failure: Failure, node: str) -> Document:
    """A failure as stored in the status, with the tail of its worker's log: from its agent, else from its pod."""
    pod = rec.pod(failure.worker)
    words = failure.log_tail or (pod.log_tail if pod is not None else "")
    empty = {name for name in ("cause", "attempt") if not getattr(failure, name)}
    return {**failure.document(but={"log_tail", *empty}), "node": node, **({"logTail": words} if words else {})}


def cover_others(rec: Reconcile, generation: int) -> None:
    """A counted failure covers all further failures of its world. One outside any world (generation 0) covers all workers that
    are outside too, until they join one."""
    silent = (dataclasses.replace(each, echo=each.echo or each.generation == generation) for each in rec.status.silent)
    rec.update(counted=max(rec.status.counted, rec.start_of(generation)), silent=tuple(silent))
    if not generation:
        rec.handled.update(dict.fromkeys(pod.uid for pod in rec.snapshot.pods if not rec.in_world(pod)))


def expect_others(rec: Reconcile, pod: Pod) -> None:
    """A worker was interrupted: the failures of the others in its world are secondary to that."""
    rec.handled[pod.uid] = None
    known = rec.status
    if known.world and rec.in_world(pod) and known.called is None:
        rec.update(counted=max(known.counted, rec.start_of(known.world.generation)))


def interrupted(rec: Reconcile, pod: Pod, what: str, sentence: str) -> None:
    """Count and report an interruption, once per pod."""
    if pod.uid not in rec.handled:
        rec.events.append(Event("Normal", what, sentence))
        rec.update(interruptions=rec.status.interruptions + 1)
        rec.handled[pod.uid] = None
