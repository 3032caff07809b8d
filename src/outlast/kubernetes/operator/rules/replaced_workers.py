"""Rules for workers that have ended or are silent, and for surplus and missing workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.base import backoff
from outlast.job import contract
from outlast.job.contract import End, FailureCause
from outlast.job.failure import Failure
from outlast.job.status import State
from outlast.kubernetes.api import owner_references, pod_status
from outlast.kubernetes.operator import desired, reconcile_pass
from outlast.kubernetes.operator.elasticjob_status import Silent
from outlast.kubernetes.operator.observed_job import Pod
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import coordination, counted_failures
from outlast.kubernetes.operator.rules.job_start import QUEUE_RECHECK_S
from outlast.rendezvous.who_trains import MemberState

FAST_LOSS_S = 10.0
"""A pod that ends sooner than this after its creation is not replaced at once, because its node would reject the next pod as
well."""
SILENT_RECHECK_S = 10.0
"""Poll interval while most workers are silent. Polling is necessary because a worker's return triggers no reconcile pass."""
AVOIDED_FROM = 2
"""New pods avoid a node on which the job has failed this many times. A rank whose state differs from the other ranks' counts as
this many failures."""
_MAX_BACKOFF_S = 60.0


def ended_workers(rec: ReconcilePass) -> None:
    """Delete failed pods, so that they are replaced, and count each failure once."""
    silent = rec.status.silent_uids
    for pod in rec.ended_pods:
        end = rec.pod_ends.get(pod.uid)
        if end is None or pod.succeeded:
            continue
        counted = end.counted and not (pod.terminating and contract.killed(end.code))  # its deletion killed it
        if pod.uid not in rec.handled_uids and pod.uid not in silent:
            if end.code == contract.Exit.GIVEN_UP:  # the coordinator has counted too many failures
                rec.update(failure=coordination.failure_document(rec, counted_failures.pod_failure(rec, pod, end)))
                reason = f"worker {pod.index} reports that the run has exhausted its restarts"
                return rec.finish(State.FAILED, reason, contract.Exit.GIVEN_UP, End.LIMIT)
            if counted:
                failure, generation = counted_failures.pod_failure(rec, pod, end), rec.generation_of(pod)
                if rec.is_counted(generation):
                    rec.update(failure=coordination.failure_document(rec, failure))
                else:
                    counted_failures.count(rec, failure, generation)
                    if rec.skip_rest:
                        return
                rec.handled_uids[pod.uid] = None
            else:
                if rec.desired:
                    sentence = f"worker {pod.index} {end.sentence}; it is created again"
                    counted_failures.record_interruption(rec, pod, "WorkerInterrupted", sentence)
                    if (generation := rec.generation_of(pod)) and rec.status.called is None:
                        fields = {"generation": generation, "worker": pod.index, "code": end.code}
                        rec.record("failure", **fields, reason=f"worker {pod.index} {end.sentence}", counted=False)
                counted_failures.expect_others(rec, pod)
        if not counted and rec.desired and (pause_end := rec.end_of_wait(lost_fast_at(pod, end.time), FAST_LOSS_S)) is not None:
            rec.requeue_at(pause_end)  # the pod keeps its name, so that the next one waits
            continue
        rec.delete(pod, f"it has ended: {end.sentence}", grace_s=0 if pod_status.all_ended(pod.document) else None)


def lost_fast_at(pod: Pod, ended: float) -> float:
    """Return when the pause after a pod's end starts, or minus infinity for a pod that lived long enough to need no pause."""
    return ended if ended - pod.created < FAST_LOSS_S else float("-inf")


def silent_workers(rec: ReconcilePass) -> None:
    """Delete the pods of workers whose Lease has expired. Once such a pod is gone, count a hang, unless the pod's node was
    unreachable. All silence in one world is counted as one failure."""
    existing = {pod.uid for pod in rec.snapshot.pods}
    gone = [each for each in rec.status.silent if each.uid not in existing]
    if gone:
        rec.update(silent=tuple(each for each in rec.status.silent if each.uid in existing))
    counted = set()
    for each in gone:
        if each.echo or each.generation in counted:
            continue
        counted.add(each.generation)
        reason = f"worker {each.worker} has said nothing for {each.after_s:g} s"
        failure = Failure(
            worker=each.worker,
            code=137,
            reason=reason,
            cause=FailureCause.HANG,
            generation=each.generation,
            attempt=rec.newest_start(each.generation)[1],
            time=each.since,
            node=each.node,
        )
        counted_failures.count(rec, failure, each.generation)
        if rec.skip_rest:
            return
    new = []
    for pod in rec.alive:
        report = rec.snapshot.reports.get(pod.index)
        if report is None or report.member.standing is MemberState.DONE:
            continue
        if (end := rec.presumed_dead_at(report)) is not None:
            rec.requeue_at(min(end, rec.now + SILENT_RECHECK_S) if rec.late_members else end)  # their return triggers no pass
            continue
        generation = rec.generation_of(pod)
        if pod.uid not in rec.handled_uids and not rec.is_counted(generation):
            new.append(Silent(pod.uid, pod.index, pod.node, rec.now, generation, after_s=rec.lease_s(report)))
        rec.delete(pod, f"worker {pod.index} has said nothing for {rec.lease_s(report):g} s", grace_s=5)
    if new:
        rec.update(silent=(*rec.status.silent, *new))


def mass_silence(rec: ReconcilePass) -> None:
    """Report that most workers are silent although their nodes are ready. These workers continue to train, and kubelets kill
    those that hang."""
    if rec.is_mass_silence() and rec.status.state is not None:
        silence_s, held_s = min(map(rec.lease_s, rec.late_members)), rec.snapshot.limits.mass_silence_s
        count = len(rec.snapshot.reports)
        reason = (
            f"most of the {count} workers have said nothing for {silence_s:g} s though their nodes are well: the "
            f"path from them to the API server is presumed broken, and none dead before {held_s:g} s are over"
        )
        rec.set_state(rec.status.state, reason, reconcile_pass.UNREACHABLE, event=True, warning=True)


def surplus_workers(rec: ReconcilePass) -> None:
    """Delete pods beyond the desired number once no world includes them."""
    status = rec.status
    leaving = frozenset(status.called.leaving if status.called is not None and status.world is not None else ())
    for pod in _by_rank(rec)[rec.desired :]:
        if pod.index in rec.members and status.result is None:
            continue  # a world without it is formed first
        if pod.index in leaving:
            continue
        rec.handled_uids[pod.uid] = None
        rec.delete(pod, f"{rec.desired} workers are wanted, and worker {pod.index} is in no world")


def missing_workers(rec: ReconcilePass) -> None:
    """Create pods for free indices, the smallest first. A terminating pod still occupies its index."""
    alive = rec.alive
    missing = rec.desired - len(alive) - len(rec.succeeded)
    if missing <= 0 or rec.status.result is not None:
        return
    if (pause := backoff_until(rec)) is not None:
        return rec.requeue_at(pause)
    gone = {uid for uid, deletion in rec.deletes.items() if deletion.grace_s == 0}
    taken = {contract.worker_name(rec.snapshot.name, pod.index) for pod in rec.snapshot.pods if pod.uid not in gone}
    # A foreign pod that stays is reported when its name is used.
    taken |= {pod.name for pod in rec.snapshot.foreign_pods if _will_disappear(rec, pod)}
    free = [index for index in range(rec.desired) if contract.worker_name(rec.snapshot.name, index) not in taken][:missing]
    generation = rec.status.generation + (rec.status.called is None)
    queue = rec.snapshot.queue if rec.snapshot.queue is not None and rec.snapshot.queue.name else None
    free_quota = queue.free_quota(rec.resource_pods) if queue is not None else {}
    for pod in desired.workers(rec.snapshot, free, generation, _nodes_to_avoid(rec)):
        assigned = queue.assign(pod, free_quota) if queue is not None else pod
        if assigned is None:
            return rec.requeue_at(rec.now + QUEUE_RECHECK_S)
        rec.creates.append(assigned)


def _by_rank(rec: ReconcilePass) -> list[Pod]:
    """Return the live pods in the order in which to keep them: by rank in the world, then by index."""
    order = {id: rank for rank, id in enumerate(rec.status.world.members)} if rec.status.world else {}
    return sorted(rec.alive, key=lambda pod: (order.get(pod.index, len(order)), pod.index))


def desired_indices(rec: ReconcilePass) -> Iterable[int]:
    """Return the indices of the next world's members, whose pods exist or will be created."""
    retained = dict.fromkeys([pod.index for pod in _by_rank(rec)][: rec.desired])
    return [*retained, *[index for index in range(rec.desired) if index not in retained][: rec.desired - len(retained)]]


def backoff_until(rec: ReconcilePass) -> float | None:
    """Return when the next pod may be created, with exponential backoff after repeated failures; None means now."""
    recent = [counted.record.time for counted in rec.status.counted_failures if counted.record.committed_step >= rec.committed]
    if len(recent) < 2:
        return None
    return rec.end_of_wait(max(recent), backoff.exponential(len(recent) - 1, 1.0, _MAX_BACKOFF_S))


def _nodes_to_avoid(rec: ReconcilePass) -> tuple[str, ...]:
    """Return the nodes to avoid: those on which the job has failed repeatedly or a rank's state differed, those that were cut off
    from the job's other workers, and those that are about to be terminated."""
    window = rec.policy.window.total_seconds()
    counts: dict[str, int] = {}
    for counted in rec.status.counted_failures:
        if counted.node and rec.now - counted.record.time < window:
            weight = AVOIDED_FROM if counted.cause == FailureCause.BITS else 1
            counts[counted.node] = counts.get(counted.node, 0) + weight
    leaving = {pod.node for pod in rec.snapshot.pods if pod.departure}
    cut_off = {each.node for each in rec.status.lost if each.node}
    return tuple(sorted({*leaving, *cut_off, *(node for node, count in counts.items() if count >= AVOIDED_FROM)}))


def _will_disappear(rec: ReconcilePass, pod: Pod) -> bool:
    """Return whether a foreign pod will go away by itself: it is terminating or belongs to an earlier job of this name."""
    return pod.terminating or owner_references.owned_by_predecessor(pod.document, rec.snapshot.document)
