"""Rules for workers that run plain torchrun without an agent. Only their pods show their state. Pure.

Worker 0 hosts the store through which torchrun forms its worlds. If worker 0 is lost, torchrun exits with 1 in all other pods. A
worker that starts after others have succeeded has nothing left to train.
"""

from __future__ import annotations

from outlast.job import contract
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.manifests import names
from outlast.kubernetes.operator.elasticjob_status import CountedFailure
from outlast.kubernetes.operator.observed_job import NNODES, PlainJob, Pod
from outlast.kubernetes.operator.reconcile_pass import ReconcilePass
from outlast.kubernetes.operator.rules import counted_failures, replaced_workers
from outlast.rendezvous.restart_budget import Record
from outlast.rendezvous.root_cause import PLAIN_PODS

RETRYABLE = (130, 137, 138, 143)
"""Exit codes after which `ExitCode` restarts a worker; all others are permanent failures."""
OVERDUE_S = 60.0
"""Time after a pod's grace period until the pod is force-deleted."""
_NODE_STARTED = ("Unknown", "ContainerStatusUnknown")
"""Reasons that containerd and kubelets give for containers that did not survive their node's restart."""
_REMEMBERED = 10
"""Number of failures kept to compute the backoff. With this many, the backoff has reached its maximum."""


def start_time(rec: ReconcilePass) -> None:
    """Set the job's start time when workers are first requested, and again after a suspension."""
    started = (rec.status.started or rec.now) if rec.desired else None
    rec.update(observed_generation=rec.snapshot.generation, started=started)


def restarted_containers(rec: ReconcilePass) -> None:
    """Count the containers that kubelets have restarted. All restart policies except `Never` and `ExitCode` allow this."""
    counted, counts, added = rec.status.restarted, {}, 0
    for pod in rec.snapshot.pods:
        status = pod_status.container_status(pod.document)
        ended = (status.get("lastState") or {}).get("terminated") or {}
        previous = counted.get(pod.uid, 0)
        if count := max(previous, int(status.get("restartCount") or 0)):
            counts[pod.uid] = count
        # If worker 0 is lost, all others exit with 1; their own errors have that code only after torchrun's retries.
        if not (pod.index > 0 and ended.get("exitCode") == 1) and ended.get("reason") not in _NODE_STARTED:
            added += counts.get(pod.uid, 0) - previous
    rec.update(restarted=counts, restarts=rec.status.restarts + added)
    if exhausted_budget := _exhausted_budget(rec):
        _fail(rec, exhausted_budget, End.LIMIT)


def ended_workers(rec: ReconcilePass) -> None:
    """Delete failed pods, so that they are replaced, and count each failure once."""
    host = rec.pod(0)
    for pod in rec.ended_pods:
        end = rec.pod_ends.get(pod.uid)
        if end is None or pod.succeeded or pod.terminating or pod.index >= rec.desired or _started_too_late(rec, pod):
            continue
        lost, sentence = pod_status.disrupted(pod.document), f"worker {pod.index} {end.sentence}"
        if not lost and _may_have_lost_store(pod):
            if _host_is_lost(rec, host, pod):
                lost, sentence = True, f"{sentence} since worker 0, where workers meet, was lost"
            elif host and not host.ended and (retry_at := rec.end_of_wait(end.time, PLAIN_PODS.cause)) is not None:
                rec.requeue_at(retry_at)  # worker 0's kubelet may be about to report
                continue
        if lost:
            again = "; it is created again" if not _succeeded(rec) else ""
            counted_failures.record_interruption(rec, pod, "WorkerInterrupted", f"{sentence}{again}")
        elif pod.uid not in rec.handled_uids:
            rec.handled_uids[pod.uid] = None
            _count(rec, pod, end.code, sentence)
            if rec.skip_rest:
                return
        if not _succeeded(rec) and rec.status.state is not State.RESTARTING:
            rec.set_state(State.RESTARTING, sentence, "WorkerLost", warning=True)
        if (
            lost
            and (pause_end := rec.end_of_wait(replaced_workers.lost_fast_at(pod, end.time), replaced_workers.FAST_LOSS_S))
            is not None
        ):
            rec.requeue_at(pause_end)  # the pod keeps its name, so that the next one waits
            continue
        rec.delete(pod, f"it has ended: {sentence}", grace_s=0 if pod_status.all_ended(pod.document) else None)


def done_workers(rec: ReconcilePass) -> None:
    """End the job once a worker has succeeded and no other worker trains."""
    done = [pod for pod in _succeeded(rec) if pod.index < rec.desired]
    over = {pod.uid for pod in rec.ended_pods if pod.succeeded or pod.index >= rec.desired or _started_too_late(rec, pod)}
    if done and over >= {pod.uid for pod in rec.snapshot.pods}:
        rec.finish(State.SUCCEEDED, "all workers are done", contract.Exit.DONE, End.SUCCEEDED)


def overdue_workers(rec: ReconcilePass) -> None:
    """Force-delete pods that still exist OVERDUE_S after their grace period."""
    for pod in rec.snapshot.pods:
        if pod.terminating and rec.now < pod.killed_by + OVERDUE_S:
            rec.requeue_at(pod.killed_by + OVERDUE_S)
        elif pod.terminating:
            rec.delete(pod, f"its node {pod.node or '(none)'} has not ended it in time", grace_s=0)


def needless_workers(rec: ReconcilePass) -> None:
    """Delete surplus workers, workers with nothing left to train, and workers that new ones cannot join."""
    for pod in rec.snapshot.pods:
        if pod.index >= rec.desired and not pod.succeeded:
            rec.delete(pod, f"{rec.desired} workers are wanted")
        elif not pod.ended and _started_too_late(rec, pod):
            rec.delete(pod, "others have succeeded: nothing is left to train", grace_s=0)
        elif _cannot_be_joined(rec, pod):
            nnodes, now = _nnodes(pod), _plain_job(rec).nnodes
            why = f"there may be {now} now, and not {nnodes}" if nnodes else "its rendezvous differs from that of new ones"
            rec.delete(pod, f"all workers are restarted: {why}")


def missing_workers(rec: ReconcilePass) -> None:
    """Create pods for free indices, once no worker is left that new ones cannot join."""
    if _has_free_indices(rec) and not any(_cannot_be_joined(rec, pod) for pod in rec.snapshot.pods):
        replaced_workers.missing_workers(rec)
        rec.prerequisites = (dict(_plain_job(rec).service),) if rec.creates else ()


def pods_observed(rec: ReconcilePass) -> None:
    """Set the state of a job that has not ended, according to its pods."""
    before = rec.status.state
    running = sum(pod_status.phase(pod.document) == "Running" for pod in rec.alive)
    whole = len(rec.alive) == rec.desired or before in (State.RUNNING, State.SUSPENDED)
    if not rec.desired:
        rec.set_state(State.SUSPENDED, "0 workers are wanted", "Suspended")
    elif _succeeded(rec) or running >= rec.desired or (running >= rec.spec.workers.min and whole):
        rec.set_state(State.RUNNING, "its workers run", "Training")
    elif before in (State.RUNNING, State.SUSPENDED):
        rec.set_state(State.RESTARTING, "workers are missing", "WorkerLost", warning=True)
    elif before is None:
        rec.set_state(State.PENDING, "its workers are being started", "WaitingForWorkers")


def _plain_job(rec: ReconcilePass) -> PlainJob:
    assert rec.snapshot.plain is not None, "these rules are for no other jobs"
    return rec.snapshot.plain


def _succeeded(rec: ReconcilePass) -> list[Pod]:
    """Return the pods whose worker has succeeded. Pods that ended because they were deleted are left out, as scripts may exit
    with 0 on SIGTERM."""
    return [pod for pod in rec.succeeded if not _exited_on_deletion(rec, pod)]


def _exited_on_deletion(rec: ReconcilePass, pod: Pod) -> bool:
    if not pod.terminating or (end := rec.pod_ends.get(pod.uid)) is None:
        return False
    return end.time >= pod.killed_by - int(pod.document["metadata"].get("deletionGracePeriodSeconds") or 0)


def _started_too_late(rec: ReconcilePass, pod: Pod) -> bool:
    if not (done := _succeeded(rec)):
        return False
    if (started_at := pod_status.started_at(pod.document)) is None:
        return pod_status.phase(pod.document) == "Pending"
    return any(rec.pod_ends[each.uid].time <= started_at for each in done if each.uid in rec.pod_ends)


def _cannot_be_joined(rec: ReconcilePass, pod: Pod) -> bool:
    """Return whether new workers cannot join a worker, because another controller started it or its --nnodes differs."""
    nnodes = _nnodes(pod)
    return not pod.ended and (nnodes != _plain_job(rec).nnodes if nnodes else _has_free_indices(rec))


def _nnodes(pod: Pod) -> str | None:
    """Return the pod's --nnodes, or None if another controller created the pod."""
    nnodes: str | None = (pod.document["metadata"].get("annotations") or {}).get(NNODES)
    return nnodes


def _has_free_indices(rec: ReconcilePass) -> bool:
    """Return whether any index is free. A terminating or failed pod still occupies its index."""
    return (
        not _succeeded(rec)
        and len(rec.snapshot.name) <= names.MAX_LENGTH
        and not rec.pods_by_index.keys() >= set(range(rec.desired))
    )


def _may_have_lost_store(pod: Pod) -> bool:
    """Return whether a worker exited with 1, as torchrun does when worker 0's store is gone."""
    return pod.index > 0 and pod_status.terminated(pod_status.container_status(pod.document)).get("exitCode") == 1


def _host_is_lost(rec: ReconcilePass, host: Pod | None, pod: Pod) -> bool:
    if host is None or host.terminating:
        return True
    if (end := rec.pod_ends.get(host.uid)) is not None and not host.succeeded:
        return pod_status.disrupted(host.document) or not _permanent(end.code)
    return host.created > (pod_status.started_at(pod.document) or pod.created)


def _permanent(code: int) -> bool:
    """Return whether the policy `ExitCode` rules out a restart; an unknown exit code (-1) allows one."""
    return code not in (-1, *RETRYABLE)


def _count(rec: ReconcilePass, pod: Pod, code: int, sentence: str) -> None:
    failure, policy = CountedFailure(Record(rec.now, 0, None), pod.node), _plain_job(rec).policy
    recent = [
        each for each in rec.status.counted_failures if rec.end_of_wait(each.record.time, rec.policy.window.total_seconds())
    ]
    rec.update(restarts=rec.status.restarts + 1, counted_failures=(*recent, failure)[-_REMEMBERED:])
    if policy == "Never":
        _fail(rec, f"{sentence}, and restartPolicy is Never", End.POLICY)
    elif policy == "ExitCode" and _permanent(code):
        codes = ", ".join(map(str, RETRYABLE))
        _fail(rec, f"{sentence}, which is permanent: restartPolicy ExitCode restarts after {codes}", End.POLICY)
    elif exhausted_budget := _exhausted_budget(rec):
        _fail(rec, f"{sentence}, and {exhausted_budget}", End.LIMIT)
    else:
        reason = f"{sentence}; restart {rec.status.restarts} of {rec.policy.limit}"
        rec.set_state(State.RESTARTING, reason, "WorkerFailed", event=True, warning=True)


def _exhausted_budget(rec: ReconcilePass) -> str:
    restarts, limit = rec.status.restarts, rec.policy.limit
    return f"backoffLimit ({limit}) is used up by {restarts} restarts" if restarts > limit else ""


def _fail(rec: ReconcilePass, reason: str, end: End) -> None:
    rec.finish(State.FAILED, reason, contract.Exit.GIVEN_UP, end)
