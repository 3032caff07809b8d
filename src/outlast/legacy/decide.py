"""Reconciles an ElasticJob of `elastic.pytorch.org`: the archived controller's behaviour, without its defects.

    decide(job, pods, now, lost={"node-a"}, leaving={uid: Leave("karpenter.sh/disrupted")})  -> Plan

Its pods run plain torchrun, which forms new worlds by itself; this module creates, replaces and deletes pods, and ends the job.
Failures are counted in `.status` (`restarts`, `judged`), before a pod is deleted because of one. A job that has settled has an
empty plan. Pure.

A pod is deleted in one reconcile pass and created again in a later one, when it is gone: an index never has two pods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outlast import backoff
from outlast.kube import pods as podwords
from outlast.kube.kinds import LEGACY_JOB
from outlast.legacy import pods as legacy
from outlast.legacy import status as statuses
from outlast.legacy.snapshot import CAUSE_S, RETRYABLE, Failure, Snapshot, deletion, nnodes_of
from outlast.operator import job_status
from outlast.operator.leaving import Leave
from outlast.operator.plan import Deletion, Document, Event, Plan
from outlast.rendezvous.world import until

_AT_ONCE, _PAUSE_S, _LONGEST_S = 3, 10.0, 300.0
"""Restarts without backoff, the first pause (doubled each time), and the longest."""


def decide(
    job: Mapping[str, Any],
    pods: Sequence[Document],
    now: float,
    *,
    lost: Collection[str] = (),
    leaving: Mapping[str, Leave] | None = None,
) -> Plan:
    """The plan. `pods` have the job's labels; `lost` are names of nodes that do not answer or do not exist; `leaving` are
    pods that have to go, by uid."""
    snapshot = Snapshot(job, pods, now, frozenset(lost), leaving or {})
    if job["metadata"].get("deletionTimestamp"):
        return Plan(deletes=tuple(snapshot.stuck()), requeue_at=snapshot.next_stuck())
    if snapshot.ended is not None:
        return _afterwards(snapshot)
    return _end(snapshot) or _go_on(snapshot)


def unreadable(job: Mapping[str, Any], pods: Sequence[Document], problem: str, now: float) -> Plan:
    """The plan for a job of which only the metadata could be read: it has failed, unless it has pods already, which go on."""
    snapshot = Snapshot(job, pods, now, frozenset())
    if job["metadata"].get("deletionTimestamp") or snapshot.ended is not None or snapshot.own:
        return Plan()
    message = f"ElasticJob {snapshot.name} is failed because it cannot be read: {problem}."
    failed = {"type": "Failed", "status": "True", "reason": "InvalidJob", "message": message}
    times = dict.fromkeys(("lastUpdateTime", "lastTransitionTime"), job_status.text(now))
    conditions = [*(snapshot.status.get("conditions") or ()), {**failed, **times}]
    status = {**snapshot.status, "state": "Failed", "conditions": conditions, "completionTime": job_status.text(now)}
    return Plan(status=status, events=(Event("Warning", "InvalidJob", message),))


def _end(snapshot: Snapshot) -> Plan | None:
    """The plan for a job that has just failed or succeeded; None for others."""
    if said := _failed(snapshot):
        return _over_with(snapshot, "Failed", f"ElasticJob {snapshot.name} is failed because {said}.")
    done = snapshot.succeeded.keys() & set(range(snapshot.wanted))
    others = [index for index, pod in snapshot.own.items() if not snapshot.over(pod)] + [each.index for each in snapshot.failures]
    if done and not others:
        return _over_with(snapshot, "Succeeded", f"ElasticJob {snapshot.name} is successfully completed.")
    return None


def _failed(snapshot: Snapshot) -> str:
    """Why the job has failed; empty when it has not."""
    deadline = _deadline(snapshot)
    if deadline is not None and deadline <= snapshot.now:
        return f"it has run for longer than activeDeadlineSeconds ({snapshot.spec['activeDeadlineSeconds']})"
    policy = legacy.restart_policy(snapshot.job)
    for each in snapshot.counted:
        if policy == "ExitCode" and each.permanent:
            codes = ", ".join(map(str, RETRYABLE))
            return f"worker {each.index} {each.sentence}, which is permanent: restartPolicy ExitCode restarts after {codes}"
        if policy == "Never":
            return f"worker {each.index} {each.sentence}, and restartPolicy is Never"
    limit = int(snapshot.spec.get("backoffLimit", legacy.MAX_RESTARTS))
    if snapshot.restarts > limit:
        last = snapshot.counted[-1:]
        what = f"worker {last[0].index} {last[0].sentence}, and " if last else ""
        return f"{what}backoffLimit ({limit}) is used up by {snapshot.restarts} restarts"
    return ""


def _go_on(snapshot: Snapshot) -> Plan:
    """Bring the pods to the desired state."""
    deletes = list(snapshot.stuck())
    later = [snapshot.next_stuck(), _deadline(snapshot)]
    going = {each.uid for each in deletes}

    def delete(pod: Document, reason: str, *, grace_s: int | None = None) -> None:
        if not podwords.leaves(pod) and pod["metadata"]["uid"] not in going:
            going.add(pod["metadata"]["uid"])
            deletes.append(deletion(pod, reason, grace_s=grace_s))

    for index, pod in sorted(snapshot.own.items(), reverse=True):
        if index >= snapshot.wanted and snapshot.phase(pod) != "Succeeded":
            delete(pod, f"{snapshot.wanted} workers are wanted")
    for pod in snapshot.late:
        delete(pod, "others have succeeded: nothing is left to train", grace_s=0)
    for pod in snapshot.own.values():
        node = pod["spec"].get("nodeName", "")
        if (leave := snapshot.leaving.get(pod["metadata"]["uid"])) is None or snapshot.over(pod):
            continue
        if (rest := until(podwords.born(pod), _PAUSE_S, snapshot.now)) is not None:
            later.append(rest)  # it was scheduled there in spite of the taint; its successor might be, too
        else:
            by = f", by {job_status.text(leave.deadline)}" if leave.deadline is not None else ""
            reason = f"its node {node} is about to be terminated ({leave.cause}{by}); it is created again elsewhere"
            delete(pod, reason, grace_s=leave.grace_s(pod, snapshot.now))
    for pod in snapshot.stale.values():
        said, told = legacy.nnodes(snapshot.job), nnodes_of(pod)
        why = f"there may be {said} now, and not {told}" if told else "its rendezvous differs from that of new ones"
        delete(pod, f"all workers are restarted: {why}")
    for each in snapshot.failures:
        grace_s = 0 if podwords.over(each.pod) else None  # sidecars may still run
        pause = _pause(snapshot.restarts) if not each.disrupted else _breath(each)
        if each.index in snapshot.held:
            later.append(until(each.time, CAUSE_S, snapshot.now))
        elif snapshot.succeeded:
            delete(each.pod, "others have succeeded: it is not restarted", grace_s=grace_s)
        elif (end := until(each.time, pause, snapshot.now)) is None:
            delete(each.pod, f"{each.sentence}; it is restarted", grace_s=grace_s)
        else:
            later.append(end)

    made = [] if snapshot.stale else snapshot.missing
    status, events = statuses.changed(snapshot)
    return Plan(
        prerequisites=(legacy.service(snapshot.job),) if made else (),
        status=status,
        deletes=tuple(deletes),
        creates=tuple(legacy.pod(snapshot.job, index) for index in made),
        events=events,
        requeue_at=min((each for each in later if each is not None), default=None),
    )


def _over_with(snapshot: Snapshot, end: str, message: str) -> Plan:
    """Write that the job has ended. The next reconcile pass cleans up its pods."""
    status = statuses.counted(snapshot)
    status["conditions"] = statuses.conditions(snapshot, end, message)
    status["state"] = end
    status["completionTime"] = job_status.text(snapshot.now)
    note = Event("Normal" if end == "Succeeded" else "Warning", f"ElasticJob{end}", message)
    return Plan(status=status, events=(note,))


def _afterwards(snapshot: Snapshot) -> Plan:
    """Clean up the pods of a job that has ended, and delete the job after its TTL."""
    policy = snapshot.spec.get("cleanPodPolicy") or "None"
    deletes = list(snapshot.stuck())
    for pod in snapshot.own.values():
        # Running pods are deleted under any policy: a job that has ended must not train.
        if (
            not podwords.leaves(pod)
            and (policy == "All" or not podwords.over(pod))
            and pod["metadata"]["uid"] not in {e.uid for e in deletes}
        ):
            deletes.append(deletion(pod, f"the job is over, and cleanPodPolicy is {policy}"))
    later, remove = [snapshot.next_stuck()], None
    if (ttl := snapshot.spec.get("ttlSecondsAfterFinished")) is not None:
        at = podwords.seconds(snapshot.ended_at) + ttl
        later.append(at if at > snapshot.now else None)
        if at <= snapshot.now:
            meta, reason = snapshot.job["metadata"], f"ttlSecondsAfterFinished ({ttl}) is over"
            remove = Deletion(meta["name"], meta["uid"], reason, kind=LEGACY_JOB)
    # Keep the counts of pods that are deleted.
    told, seen = (snapshot.status.get("replicaStatuses") or {}).get("Worker") or {}, statuses.replicas(snapshot)["Worker"]
    ended = {key: max(int(told.get(key) or 0), seen[key]) for key in ("succeeded", "failed")}
    status = {**snapshot.status, "replicaStatuses": {"Worker": {**seen, **ended}}}
    return Plan(
        status=status if status != snapshot.status else None,
        deletes=tuple(deletes),
        remove=remove,
        requeue_at=min((each for each in later if each is not None), default=None),
    )


def _deadline(snapshot: Snapshot) -> float | None:
    """When activeDeadlineSeconds is over; None while no workers are wanted."""
    limit, start = snapshot.spec.get("activeDeadlineSeconds"), snapshot.status.get("startTime")
    return podwords.seconds(start) + limit if limit and start and snapshot.wanted else None


def _pause(restarts: int) -> float:
    """Backoff after a failure."""
    return 0.0 if restarts <= _AT_ONCE else backoff.exponential(restarts - _AT_ONCE - 1, _PAUSE_S, _LONGEST_S)


def _breath(failure: Failure) -> float:
    """Backoff for a pod that was lost as soon as it was created: its node would reject the next one as well."""
    return _PAUSE_S if failure.time - podwords.seconds(failure.pod["metadata"]["creationTimestamp"]) < _PAUSE_S else 0.0
