"""Rules for a job that has ended, exceeded a deadline, or was deleted. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.base.clock import until
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.manifests import volumes
from outlast.kubernetes.operator.observed_job import Limits, Pod
from outlast.kubernetes.operator.plan import Deletion, Plan
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.worker.agent.lifecycle import DONE_FLUSH_S

LEAVE_S = 60.0
"""Seconds that workers have to exit once the job has ended."""
UPLOAD_S = DONE_FLUSH_S + LEAVE_S
"""The same for workers that upload the results of a job that has succeeded."""
_FINAL = (State.SUCCEEDED, State.FAILED)


def finished(rec: ReconcilePass) -> None:
    """Clean up after a job that has ended: delete its pods according to `cleanPodPolicy`, and the job itself after
    `ttlSecondsAfterFinished`."""
    status = rec.status
    if status.state not in _FINAL or status.finished is None:
        return
    rec.skip_rest = True
    rec.update(observed_generation=rec.snapshot.generation)
    uploads = _uploads(rec)
    longest_s, leave_s = UPLOAD_S if uploads else LEAVE_S, LEAVE_S if rec.snapshot.plain is None else 0.0
    if rec.snapshot.queue is not None:
        if rec.resource_pods and rec.now < status.finished + longest_s:
            rec.requeue_at(status.finished + longest_s)
        else:
            rec.statuses = rec.snapshot.queue.finished_workloads(status.state is State.SUCCEEDED, status.reason, rec.now)
    policy = rec.spec.clean_pod_policy if rec.snapshot.job else "Running"
    for pod in rec.snapshot.pods:
        if pod.terminating:
            force_delete(rec, pod)
        elif policy == "All" and pod.uid in rec.pod_ends:
            rec.delete(pod, "the job is over, cleanPodPolicy is All")
        elif policy != "None" and (pod.alive or pod.lingering):
            # The pod's agent knows that the job has ended and flushes its uploads; the end of its log is worth waiting for.
            gone_at = status.finished + (UPLOAD_S if uploads and pod.alive else leave_s)
            if rec.now >= gone_at:
                rec.delete(pod, f"the job is over, cleanPodPolicy is {policy}")
            rec.requeue_at(gone_at)
    ttl: float | None = rec.spec.ttl_seconds_after_finished if rec.snapshot.job else None
    if ttl is not None and uploads and any(pod.alive for pod in rec.snapshot.pods):
        ttl = max(ttl, UPLOAD_S)  # the pods go with the job
    if ttl is not None:
        if rec.now >= status.finished + ttl:
            kind, sentence = kinds.kind_of(rec.snapshot.document), f"ttlSecondsAfterFinished ({ttl}) has passed"
            rec.remove = Deletion(rec.snapshot.name, rec.snapshot.uid, sentence, kind=kind)
        rec.requeue_at(status.finished + ttl)


def _uploads(rec: ReconcilePass) -> bool:
    """Return whether running workers of the ended job may still upload its results."""
    job = rec.snapshot.job
    succeeded = rec.status.state is State.SUCCEEDED and rec.snapshot.plain is None
    return succeeded and job is not None and bool(volumes.store_url(job))


def workers_done(rec: ReconcilePass) -> None:
    """End the job if all workers have succeeded, for example because an earlier run was already complete."""
    done = {pod.index for pod in rec.succeeded}
    if rec.desired and done and len(done) >= rec.desired and not rec.alive:
        rec.finish(State.SUCCEEDED, "all workers are done", contract.Exit.DONE, End.SUCCEEDED)


def deadline_exceeded(rec: ReconcilePass) -> None:
    """Fail the job if `activeDeadlineSeconds` or `startupDeadlineSeconds` has passed."""
    started = rec.status.resumed or rec.status.started
    if started is None or not rec.desired:
        return
    active_s, startup_s = rec.spec.active_deadline_seconds, rec.spec.startup_deadline_seconds
    if active_s is not None:
        if rec.now >= started + active_s:
            sentence = f"the job has run for activeDeadlineSeconds ({active_s:g})"
            return rec.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.DEADLINE)
        rec.requeue_at(started + active_s)
    if startup_s is not None and not rec.status.has_formed_world:
        if rec.now >= started + startup_s:
            waiting = ((pod.index, pod_status.waiting_reason(pod.document)) for pod in rec.alive)
            pending = next((f": worker {index} {reason}" for index, reason in waiting if reason), "")
            sentence = f"no world was formed within startupDeadlineSeconds ({startup_s:g}){pending}"
            return rec.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.STARTUP_DEADLINE)
        rec.requeue_at(started + startup_s)


def force_delete(rec: ReconcilePass, pod: Pod) -> None:
    """Force-delete a terminating pod whose node is unreachable."""
    plan = orphans([pod], rec.now, rec.snapshot.observed_since, rec.snapshot.limits)
    for deletion in plan.deletes:
        rec.deletes.setdefault(pod.uid, deletion)
    rec.requeue_at(plan.requeue_at)


def orphans(pods: Iterable[Pod], now: float, since: float, limits: Limits) -> Plan:
    """Return a plan that force-deletes terminating pods whose node is unreachable."""
    terminating = [(pod, max(pod.node_lost_at, since)) for pod in pods if pod.terminating and pod.node_lost_at is not None]
    ends = [(pod, until(silent_since, limits.lost_s, now)) for pod, silent_since in terminating]
    deletes = tuple(
        Deletion(pod.name, pod.uid, f"it is being deleted, and its node {pod.node} does not answer", grace_s=0)
        for pod, end in ends
        if end is None
    )
    return Plan(deletes=deletes, requeue_at=min((end for _, end in ends if end is not None), default=None))
