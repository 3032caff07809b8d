"""Findings about the job as a whole: suspended, not admitted, in a queue, waiting for a gang or for other workers; and how jobs
end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from outlast.base import units
from outlast.job import contract
from outlast.job.contract import End, Label
from outlast.job.status import JobStatus
from outlast.kubernetes.api import dropins, pod_status
from outlast.kubernetes.diagnosis import cluster, containers, messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, event_time, of_pods
from outlast.kubernetes.diagnosis.finding import Finding, joined, passed, repeated_failures, workers
from outlast.kubernetes.manifests.render_request import Document
from outlast.rendezvous import sentences
from outlast.rendezvous.partition import Loss

_QUEUE = "kueue.x-k8s.io/queue-name"


def absent(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """An ElasticJob that no operator has reconciled, with the finding of `outlast doctor` about the operator."""
    if snapshot.untaken():
        (there,) = cluster.operator(snapshot)
        remedy = there.remedy or "see what it says: `kubectl logs` of its pods"
        yield Finding("operator", "no operator has taken up the job: its status is empty", remedy, (f"operator: {there.what}",))


def failing(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """An ElasticJob that trains, but fails repeatedly without a new checkpoint."""
    status = snapshot.workload.get("status", {})
    failure, committed = status.get("lastFailure") or {}, (status.get("checkpoint") or {}).get("step", 0)
    since = [each for each in status.get("failures") or () if each.get("committedStep", 0) >= committed]
    steps = [each.get("failedStep") for each in reversed(since)]
    if len(since) < 2 or status.get("state") != "Running" or status.get("step", 0) > max(step or 0 for step in steps):
        return
    same = [step for step in takewhile(lambda step: step == steps[0], steps) if step is not None]
    repeated = repeated_failures(same, len(since), str(failure.get("cause", "")))
    what = f"it trains at step {status.get('step', 0)}, but {repeated}"
    remedy = f"correct it; `outlast logs {snapshot.name}` shows all"
    yield Finding("failing", what, remedy, (str(failure.get("reason", "")),))


def cut_off(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Workers of an ElasticJob that are excluded from worlds for a while because their peers could not reach them."""
    status = snapshot.workload.get("status", {})
    left_s: dict[int, float] = {}
    times, nodes = 1, set[str]()
    for each in (status.get("judged") or {}).get("lost") or ():
        loss = Loss(each["at"], each.get("times", 1), held=each.get("held", True))
        if loss.at + loss.held_s > now and each["worker"] not in (status.get("world") or ()):
            left_s[each["worker"]] = loss.at + loss.held_s - now
            times, nodes = max(times, loss.times), nodes | {each.get("node", "")} - {""}
    if not left_s:
        return
    ids = sorted(left_s)
    again = f" {times} times, each soon after the one before" if times > 1 else ""
    until = units.human_seconds(max(left_s.values()))
    what = f"{sentences.workers(ids)} {sentences.was(ids)} lost{again}, and may join again in {until}"
    where = f" of node {joined(sorted(nodes))}" if nodes else ""
    remedy = f"wait; if it happens again, look at the network{where}"
    yield Finding("cut-off", what, remedy, ("the others did not hear it",))


# Pods that cannot be created


def creations(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Pods that could not be created, while there are fewer pods than the job requests."""
    alive = [pod for pod in snapshot.pods if pod_status.phase(pod) in ("Pending", "Running", "Succeeded")]
    missing, wanted = snapshot.wanted() - len(alive), snapshot.wanted()
    if missing <= 0:
        return
    one = "the worker" if Label.JOB in (snapshot.workload.get("metadata", {}).get("labels") or {}) else "it"
    some = f"{missing} of {wanted} workers" if wanted > 1 else one
    told: dict[str, Finding] = {}
    for event in sorted((each for each in snapshot.events if _failed_to_make(each, snapshot)), key=event_time, reverse=True):
        found = messages.refusal(snapshot.namespace, event.get("message", ""))
        what = f"{some} {'have' if missing > 1 else 'has'} no pod: {found.what}"
        told.setdefault(what, replace(found, what=what, evidence=(event_text(event),)))
    yield from told.values()


def _failed_to_make(event: Document, snapshot: Snapshot) -> bool:
    """Whether an event says that a pod of the workload could not be created; for a Deployment, its ReplicaSets report that."""
    about, name = event.get("involvedObject", {}), pod_status.name(snapshot.workload)
    mine = about.get("name") == name or (about.get("kind") == "ReplicaSet" and str(about.get("name")).startswith(f"{name}-"))
    return bool(event.get("reason") == "FailedCreate" and name and mine)


# Queues


def queues(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """A job that Kueue has not admitted."""
    queue = snapshot.workload.get("metadata", {}).get("labels", {}).get(_QUEUE)
    for workload in snapshot.queued:
        if not (pod_status.condition(workload, "Finished") or pod_status.condition(workload, "Admitted")):
            yield _queued(snapshot, workload, workload.get("spec", {}).get("queueName") or queue)
    unseen = "workloads.kueue.x-k8s.io" in snapshot.unseen
    if queue and not snapshot.queued and snapshot.workload.get("spec", {}).get("suspend") and not unseen:
        remedy = "install Kueue with the framework of this kind enabled, or remove scheduling.queue from the job file"
        yield Finding("queue", f"it waits in queue {queue}, and Kueue has created no Workload for it", remedy)


def _queued(snapshot: Snapshot, workload: Document, queue: str) -> Finding:
    evicted = pod_status.condition(workload, "Evicted")
    refused = pod_status.condition(workload, "QuotaReserved", "False")
    if workload.get("spec", {}).get("active") is False:
        what = f"its workload in queue {queue} is deactivated"
        return Finding("queue", what, "set spec.active of the Workload to true", _told(evicted))
    if pod_status.condition(workload, "QuotaReserved"):
        checks = [each for each in workload.get("status", {}).get("admissionChecks", []) if each.get("state") != "Ready"]
        what = f"queue {queue} has room, and waits for {joined(str(each.get('name')) for each in checks) or 'its checks'}"
        said = tuple(f"{each.get('name')}: {each.get('state')}: {each.get('message', '')}" for each in checks)
        return Finding("queue", what, "see what these checks wait for", said)
    grows = any(pod_status.condition(each, "Admitted") for each in snapshot.queued)  # an ElasticJob that grows
    what = f"queue {queue} has not admitted {'all of its workers' if grows else 'it'}"
    if evicted:
        what = f"queue {queue} has put it back ({evicted.get('reason', '')})"
    there = sorted(map(pod_status.name, snapshot.queues))
    known = f" (there are: {joined(there)})" if there else ""
    said = (*_told(refused), *_told(evicted))
    return messages.meaning("kueue", (refused or {}).get("message", ""), said, told=what, queue=queue, known=known)


def _told(condition: Document | None) -> tuple[str, ...]:
    return (f"{condition.get('reason', '')}: {condition.get('message', '')}",) if condition else ()


# Gangs


def gangs(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """A gang that has not started because its PodGroup waits for its queue, or for room for all its workers."""
    pods = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Pending"]
    for group in snapshot.groups:
        least = group.get("spec", {}).get("minMember", 1)
        state = group.get("status", {}).get("phase", "")
        if state in ("Running", "Finished") or not (pods or state in ("Pending", "Inqueue")):
            continue
        events = [event_text(each) for each in snapshot.about({**group, "kind": "PodGroup"})[-1:]]
        said = (*_told(pod_status.condition(group, "Unschedulable")), *events)
        if state == "Pending" and str(group.get("apiVersion", "")).startswith("scheduling.volcano"):
            remedy = "wait until others leave the queue, or ask for less; `kubectl describe queue` says what it may use"
            queue = group.get("spec", {}).get("queue") or "default"
            yield Finding("queue", f"queue {queue} of Volcano has not let it in", remedy, said)
            continue
        remedy = f"the first cause said here for a worker, or lower workers.min ({least}) to what there is room for"
        what = f"its {least} workers start together, and there is not room for all of them"
        yield Finding("gang", what, remedy, said)


@of_pods
def gates(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Pods that no scheduler considers, since their scheduler does not run or their scheduling gates are not removed."""
    if pod_status.phase(pod) != "Pending":
        return
    scheduler = pod["spec"].get("schedulerName", "default-scheduler")
    if scheduler != "default-scheduler" and not snapshot.about(pod) and not pod_status.condition(pod, "PodScheduled", "False"):
        remedy = f"install it, or remove scheduling.gang ({scheduler}) from the job file"
        yield Finding("scheduler", f"waits for the scheduler {scheduler}, which says nothing", remedy)
    if names := [gate["name"] for gate in pod["spec"].get("schedulingGates", [])]:
        yield Finding("gate", f"is held back by {joined(names)}", "wait for whoever removes it")


# Workers that wait for other workers


def others(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Workers that are running but are too few for a world."""
    ready = [pod for pod in snapshot.pods if pod_status.condition(pod, "Ready")]
    running = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Running"]
    wanted = snapshot.wanted()
    if (drop_in := dropins.of(snapshot.workload)) is not None:
        least = drop_in.sizes(snapshot.workload)[0]
    else:
        least = snapshot.workload.get("spec", {}).get("workers", {}).get("min", wanted)
    if running and not ready and len(running) < least:
        have = f"{len(running)} of at least {least} workers run"
        missing = "fix what keeps the others from starting; training begins when all are there" if len(running) < wanted else ""
        yield Finding("others", f"{workers(running, 'waits')} for the others: {have}", missing)
    elif running and not ready:
        remedy = f"wait while they start; `outlast logs {snapshot.name}` shows what they do"
        are = "is" if len(running) == 1 else "are"
        yield passed("starting", f"{workers(running, 'runs')}, and {are} in no world yet", remedy)


def beginning(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Pods that are starting: their images are being pulled, or their volumes mounted."""
    for pod in snapshot.pods:
        if pod_status.phase(pod) != "Pending" or not pod["spec"].get("nodeName"):
            continue
        if not all(reason in ("ContainerCreating", "PodInitializing") for reason, _ in pod_status.waiting_states(pod)):
            continue
        last = snapshot.about(pod)[-1:]
        since = pod_status.timestamp(pod.get("status", {}).get("startTime"))
        ago = f" for {units.human_seconds(now - since)}" if since else ""
        doing = "pulls its image" if any(event.get("reason") == "Pulling" for event in last) else "is being started"
        what = f"{workers([pod])} {doing} on {pod['spec']['nodeName']}{ago}"
        yield passed("starting", what, "wait", tuple(map(event_text, last)))


# Ends and suspension


def stopped(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """A job that is suspended, scaled to 0 or being deleted."""
    spec = snapshot.workload.get("spec", {})
    queued = _QUEUE in snapshot.workload.get("metadata", {}).get("labels", {})
    if spec.get("suspend") and not queued and not _failed(snapshot):
        yield passed("suspended", "it is suspended", f"go on with: outlast resume {snapshot.name}")
    elif snapshot.kind in ("StatefulSet", "ElasticJob") and snapshot.wanted() == 0:
        scaled = snapshot.kind == "ElasticJob" and not snapshot.agentless
        remedy = f"outlast scale {snapshot.name} 1" if scaled else f"outlast resume {snapshot.name}"
        yield passed("suspended", "its number of workers is 0", f"go on with: {remedy}")
    if deleted := snapshot.workload.get("metadata", {}).get("deletionTimestamp"):
        held = snapshot.workload["metadata"].get("finalizers", [])
        evidence = (f"since {deleted}", *((f"held by {joined(held)}",) if held else ()))
        remedy = "wait; if it stays so, the controller that set the finalizer does not run"
        yield passed("deleted", "it is being deleted", remedy, evidence)


def finished(snapshot: Snapshot) -> Finding | None:
    """The finding about a job that has finished, which is then its only finding; None if it has not finished."""
    status = snapshot.workload.get("status", {})
    well = "it is finished, and all is well"
    done = pod_status.condition(snapshot.workload, {"Job": "Complete", "ElasticJob": "Succeeded"}.get(snapshot.kind, "none"))
    if done and snapshot.kind == "ElasticJob":
        said = JobStatus.model_validate({**status, "name": snapshot.name, "run": status.get("run", "")})
        if said.unsaved:
            return Finding("unsaved", f"it is finished, but {said.unsaved}")
    if done:
        return passed("finished", well, "", _told(done))
    if snapshot.kind == "StatefulSet" and snapshot.pods:
        ends = [containers.stayed(snapshot, pod) for pod in snapshot.pods if pod_status.name(pod) in snapshot.logs]
        if ends and all(end is not None and end["exitCode"] == 0 for end in ends):
            return passed("finished", well, f"delete it with: outlast cancel {snapshot.name}")
    return None


_REASONS = {
    "BackoffLimitExceeded": "it was given up: its workers failed more often than restarts.limit allows",
    "MaxFailedIndexesExceeded": "it was given up: too many of its workers failed",
    "FailedIndexes": "it was given up: some of its workers failed too often",
    "PodFailurePolicy": "it was given up: starting again would not have helped",
    "DeadlineExceeded": "it was given up: it had not finished when activeDeadlineSeconds was over",
}


def given_up(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """A Job or ElasticJob that has failed permanently."""
    if (failed := _failed(snapshot)) is None:
        return
    reason = str(failed.get("reason", ""))
    ours = str(snapshot.workload.get("apiVersion")).startswith(f"{contract.GROUP}/")
    says_deadline = "deadline" in f"{reason} {failed.get('message', '')}".lower()  # our own message may quote a script's error
    if (says_deadline and not ours) or reason == End.STARTUP_DEADLINE:
        reason = End.DEADLINE.value
    what = _REASONS.get(reason, f"it has failed: {failed.get('message') or reason}")
    if reason == End.DEADLINE:
        limit = snapshot.workload["spec"].get("activeDeadlineSeconds")
        evidence = (*_told(failed), *((f"activeDeadlineSeconds: {limit}",) if limit else ()))
        remedy = "raise activeDeadlineSeconds, and submit it again: it goes on from its newest checkpoint"
        yield Finding("deadline", what, remedy, evidence)
        return
    remedy = f"fix the cause, and submit it again; `outlast logs {snapshot.name}` shows what the workers said"
    yield Finding("failed", what, remedy if reason in _REASONS else "", _told(failed))


def _failed(snapshot: Snapshot) -> Document | None:
    """The condition of a workload that has failed, or None; its pods may still be ending."""
    if snapshot.kind not in ("Job", "ElasticJob"):
        return None
    return pod_status.condition(snapshot.workload, "Failed") or pod_status.condition(snapshot.workload, "FailureTarget")
