"""Rules about the job as a whole, such as its suspension, its queue, its gang and its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from outlast.base import units
from outlast.job.contract import Label
from outlast.job.status import JobStatus
from outlast.kubernetes.api import dropins, pod_status
from outlast.kubernetes.diagnosis import cluster, containers, messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, event_time, per_pod
from outlast.kubernetes.diagnosis.finding import Finding, Outcome, joined, passed, repeated_failures, workers
from outlast.kubernetes.manifests.render_request import Document
from outlast.rendezvous import sentences
from outlast.rendezvous.partition import Loss

_QUEUE = "kueue.x-k8s.io/queue-name"
_REPORTED = ("InvalidJob", "NoGang", "FailedCreate", "NameTaken", "Unheard")
"""The operator's reasons, in conditions and Events, for what concerns a job as a whole."""


def not_reconciled(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find an ElasticJob that no operator reconciles. While an operator runs, pods may be missing for a moment."""
    new, changed = not snapshot.workload.get("status"), snapshot.changed()
    if snapshot.unreconciled():
        (operator,) = cluster.operator(snapshot)
        if operator.failed or new or changed:
            undone = "taken up the job: its status is empty" if new else "taken up its last change"
            what = f"no operator has {undone if new or changed else 'replaced its missing workers'}"
            remedy = operator.remedy or "see what it says: `kubectl logs` of its pods"
            outcome: Outcome = "fail" if operator.failed or new else "warn"
            yield Finding("operator", what, remedy, (f"operator: {operator.what}",), outcome)


def reported(snapshot: Snapshot) -> Iterator[Finding]:
    """Find what the operator itself has written: why it creates no pods yet, or a warning that still holds."""
    status = snapshot.workload.get("status") or {}
    reason = str(status.get("reason", ""))
    runs = any(pod_status.phase(pod) == "Running" for pod in snapshot.pods)
    held = status.get("state") == "Pending" and not status.get("startTime")  # the operator has not even accepted the job
    conditions = [each for each in pod_status.conditions(snapshot.workload) if each.get("status") == "True"]
    told = [reason] if held or any(each.get("reason") in _REPORTED for each in conditions) else []
    for event in snapshot.events_about(snapshot.workload, *_REPORTED):
        holds = event["reason"] == "NameTaken" or event["message"] == reason[:1024] or not (reason or runs)
        told += [event["message"]] if event.get("type") == "Warning" and holds else []
    for sentence in dict.fromkeys(filter(None, told)):
        remedy = "correct what it names, if it does not pass by itself; the operator then goes on"
        yield Finding("reported", sentence, remedy, outcome="warn" if runs else "fail")


def repeatedly_failing(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find an ElasticJob that trains, but fails repeatedly without a new checkpoint."""
    status = snapshot.workload.get("status", {})
    failure, committed = status.get("lastFailure") or {}, (status.get("checkpoint") or {}).get("step", 0)
    failures = [each for each in status.get("failures") or () if each.get("committedStep", 0) >= committed]
    steps = [each.get("failedStep") for each in reversed(failures)]
    if len(failures) < 2 or status.get("state") != "Running" or status.get("step", 0) > max(step or 0 for step in steps):
        return
    same_steps = [step for step in takewhile(lambda step: step == steps[0], steps) if step is not None]
    repeated = repeated_failures(same_steps, len(failures), str(failure.get("cause", "")))
    what = f"it trains at step {status.get('step', 0)}, but {repeated}"
    remedy = f"correct it; `outlast logs {snapshot.name}` shows all"
    yield Finding("failing", what, remedy, (str(failure.get("reason", "")),))


def excluded_workers(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Find workers that are temporarily excluded from worlds because their peers could not reach them."""
    status = snapshot.workload.get("status", {})
    left_s: dict[int, float] = {}
    count, nodes = 1, set[str]()
    for each in (status.get("judged") or {}).get("lost") or ():
        loss = Loss(each["at"], each.get("times", 1), held=each.get("held", True))
        if loss.at + loss.held_s > now and each["worker"] not in (status.get("world") or ()):
            left_s[each["worker"]] = loss.at + loss.held_s - now
            count, nodes = max(count, loss.times), nodes | {each.get("node", "")} - {""}
    if not left_s:
        return
    ids = sorted(left_s)
    again = f" {count} times, each soon after the one before" if count > 1 else ""
    duration = units.human_seconds(max(left_s.values()))
    what = f"{sentences.workers(ids)} {sentences.was(ids)} lost{again}, and may join again in {duration}"
    where = f" of node {joined(sorted(nodes))}" if nodes else ""
    remedy = f"wait; if it happens again, look at the network{where}"
    yield Finding("cut-off", what, remedy, ("the others did not hear it",))


# Pods that cannot be created


def failed_creations(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find the reasons why pods could not be created, as long as some are missing."""
    missing, wanted = snapshot.missing(), snapshot.replicas()
    if missing <= 0:
        return
    single = "the worker" if Label.JOB in (snapshot.workload.get("metadata", {}).get("labels") or {}) else "it"
    subject = f"{missing} of {wanted} workers" if wanted > 1 else single
    findings: dict[str, Finding] = {}
    for event in sorted((each for each in snapshot.events if _is_failed_creation(each, snapshot)), key=event_time, reverse=True):
        refusal = messages.refusal(snapshot.namespace, event.get("message", ""))
        what = f"{subject} {'have' if missing > 1 else 'has'} no pod: {refusal.what}"
        findings.setdefault(what, replace(refusal, what=what, evidence=(event_text(event),)))
    yield from findings.values()


def _is_failed_creation(event: Document, snapshot: Snapshot) -> bool:
    """Return whether an event says that a pod of the workload, or of one of its ReplicaSets, could not be created."""
    involved, name = event.get("involvedObject", {}), pod_status.name(snapshot.workload)
    owner = str(involved.get("name"))
    if involved.get("kind") == "ReplicaSet":  # named after its Deployment, with a hash
        owner = owner.rpartition("-")[0]
    return bool(event.get("reason") == "FailedCreate" and name and owner == name)


# Queues


def queues(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find a job that Kueue has not admitted."""
    queue = snapshot.workload.get("metadata", {}).get("labels", {}).get(_QUEUE)
    for workload in snapshot.kueue_workloads:
        if pod_status.condition(workload, "Finished") or pod_status.condition(workload, "Admitted"):
            continue
        checks = workload.get("status", {}).get("admissionChecks", [])
        evidence = (
            *_condition_text(pod_status.condition(workload, "QuotaReserved", "False")),
            *_condition_text(pod_status.condition(workload, "Evicted")),
            *(f"{each.get('name')}: {each.get('state')}: {each.get('message', '')}" for each in checks),
        )
        known = f" (there are: {joined(sorted(map(pod_status.name, snapshot.queues)))})" if snapshot.queues else ""
        queue_ = workload.get("spec", {}).get("queueName") or queue
        state, it = _queue_state(snapshot, workload), f"{pod_status.name(workload)} -n {snapshot.namespace}"
        text = "; ".join((state, *evidence))
        yield messages.meaning("kueue", text, evidence, queue=queue_, known=known, state=state, workload=it)
    unseen = "workloads.kueue.x-k8s.io" in snapshot.forbidden
    if queue and not snapshot.kueue_workloads and snapshot.workload.get("spec", {}).get("suspend") and not unseen:
        remedy = "install Kueue with the framework of this kind enabled, or remove scheduling.queue from the job file"
        yield Finding("queue", f"it waits in queue {queue}, and Kueue has created no Workload for it", remedy)


def _queue_state(snapshot: Snapshot, workload: Document) -> str:
    # While a job trains, an additional Workload asks for more workers.
    whole = "all of its workers" if any(pod_status.condition(each, "Admitted") for each in snapshot.kueue_workloads) else "it"
    evicted = pod_status.condition(workload, "Evicted") or {}
    if workload.get("spec", {}).get("active") is False:
        by_kueue = re.search("due ?to", f"{evicted.get('reason')} {evicted.get('message')}", re.IGNORECASE)
        return f"may not admit {whole}: {'Kueue' if by_kueue else 'a user'} has deactivated its Workload"
    if pod_status.condition(workload, "QuotaReserved") and not evicted:
        checks = [each for each in workload["status"].get("admissionChecks", []) if each.get("state") != "Ready"]
        return f"has room for {whole}, and waits for {joined(each['name'] for each in checks) or 'its checks'}"
    return f"has not admitted {whole}"


def _condition_text(condition: Document | None) -> tuple[str, ...]:
    return (f"{condition.get('reason', '')}: {condition.get('message', '')}",) if condition else ()


# Gangs


def gangs(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find a gang whose PodGroup waits for its queue, or for room for all workers."""
    pending = any(pod_status.phase(pod) == "Pending" for pod in snapshot.pods)
    for group in snapshot.pod_groups:
        minimum, state = group.get("spec", {}).get("minMember", 1), group.get("status", {}).get("phase", "")
        if state not in ("Running", "Finished") and (pending or state in ("Pending", "Inqueue")):
            events = [event_text(each) for each in snapshot.events_about({**group, "kind": "PodGroup"})[-1:]]
            evidence = (*_condition_text(pod_status.condition(group, "Unschedulable")), *events)
            remedy = f"fix the first cause that is listed for a worker, lower workers.min ({minimum}), or wait for the queue"
            where = f" in queue {queue}" if (queue := group.get("spec", {}).get("queue")) else ""  # of Volcano
            what = f"its {minimum} workers start together, and there is not room for all of them{where}"
            yield Finding("gang", what, remedy, evidence)


@per_pod
def gates(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find pods that are not scheduled, either because their scheduler does not run or because of scheduling gates."""
    if pod_status.phase(pod) != "Pending":
        return
    scheduler = pod["spec"].get("schedulerName", "default-scheduler")
    if (
        scheduler != "default-scheduler"
        and not snapshot.events_about(pod)
        and not pod_status.condition(pod, "PodScheduled", "False")
    ):
        remedy = f"install it, or remove scheduling.gang ({scheduler}) from the job file"
        yield Finding("scheduler", f"waits for the scheduler {scheduler}, which does not react", remedy)
    if names := [gate["name"] for gate in pod["spec"].get("schedulingGates", [])]:
        yield Finding("gate", f"is held back by {joined(names)}", "wait for whoever removes it")


# Workers that wait for other workers


def waiting_for_workers(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find running workers that are in no world."""
    ready = [pod for pod in snapshot.pods if pod_status.condition(pod, "Ready")]
    running = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Running"]
    replicas = snapshot.replicas()
    if (drop_in := dropins.of(snapshot.workload)) is not None:
        minimum = drop_in.sizes(snapshot.workload)[0]
    else:
        minimum = snapshot.workload.get("spec", {}).get("workers", {}).get("min", replicas)
    if running and not ready and len(running) < minimum:
        count = f"{len(running)} of at least {minimum} workers run"
        missing = "fix what keeps the others from starting; training begins when all are there" if len(running) < replicas else ""
        yield Finding("others", f"{workers(running, 'waits')} for the others: {count}", missing)
    elif running and not ready:
        remedy = f"wait while they start; `outlast logs {snapshot.name}` shows what they do"
        verb = "is" if len(running) == 1 else "are"
        yield passed("starting", f"{workers(running, 'runs')}, and {verb} in no world yet", remedy)


@per_pod
def deaf(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find workers that are in no world because they do not hear the operator."""
    lines = [line for line in snapshot.logs.get(pod_status.name(pod), ()) if sentences.DEAF in line or sentences.HEARS in line]
    if lines and sentences.DEAF in lines[-1] and not pod_status.condition(pod, "Ready"):
        yield messages.meaning("deaf", lines[-1], (lines[-1],))


def starting(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Report pods that are starting, for example while their images are pulled."""
    for pod in snapshot.pods:
        if pod_status.phase(pod) != "Pending" or not pod["spec"].get("nodeName"):
            continue
        if not all(reason in ("ContainerCreating", "PodInitializing") for reason, _ in pod_status.waiting_states(pod)):
            continue
        last = snapshot.events_about(pod)[-1:]
        since = pod_status.timestamp(pod.get("status", {}).get("startTime"))
        ago = f" for {units.human_seconds(now - since)}" if since else ""
        activity = "pulls its image" if any(event.get("reason") == "Pulling" for event in last) else "is being started"
        what = f"{workers([pod])} {activity} on {pod['spec']['nodeName']}{ago}"
        yield passed("starting", what, "wait", tuple(map(event_text, last)))


# Ends and suspension


def suspended(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Report a job that is suspended, scaled to 0 or being deleted."""
    spec = snapshot.workload.get("spec", {})
    running = [pod for pod in snapshot.pods if pod_status.phase(pod) == "Running"]
    still = f"; still running: {workers(running)}" if running else ""
    queued = _QUEUE in snapshot.workload.get("metadata", {}).get("labels", {})
    if spec.get("suspend") and not queued and not _failed_condition(snapshot):
        yield passed(
            "suspended", f"it is {'being ' if running else ''}suspended{still}", f"go on with: outlast resume {snapshot.name}"
        )
    elif snapshot.kind in ("StatefulSet", "ElasticJob") and snapshot.replicas() == 0:
        scaled = snapshot.kind == "ElasticJob" and not dropins.has(snapshot.workload)
        remedy = f"outlast scale {snapshot.name} 1" if scaled else f"outlast resume {snapshot.name}"
        yield passed("suspended", f"its number of workers is 0{still}", f"go on with: {remedy}")
    if deletion := snapshot.workload.get("metadata", {}).get("deletionTimestamp"):
        finalizers = snapshot.workload["metadata"].get("finalizers", [])
        evidence = (f"since {deletion}", *((f"held by {joined(finalizers)}",) if finalizers else ()))
        remedy = "wait; if it stays so, the controller that set the finalizer does not run"
        yield passed("deleted", "it is being deleted", remedy, evidence)


def finished(snapshot: Snapshot) -> Finding | None:
    """Return the only finding about a finished job, or None if the job has not finished."""
    status = snapshot.workload.get("status", {})
    what = "it is finished, and all is well"
    completed = pod_status.condition(snapshot.workload, {"Job": "Complete", "ElasticJob": "Succeeded"}.get(snapshot.kind, "none"))
    if completed and snapshot.kind == "ElasticJob":
        status_ = JobStatus.model_validate({**status, "name": snapshot.name, "run": status.get("run", "")})
        if status_.unsaved:
            return Finding("unsaved", f"it is finished, but {status_.unsaved}")
    if completed:
        return passed("finished", what, "", _condition_text(completed))
    if snapshot.kind == "StatefulSet" and snapshot.pods:
        ends = [containers.end_in_running_pod(snapshot, pod) for pod in snapshot.pods if pod_status.name(pod) in snapshot.logs]
        if ends and all(end is not None and end["exitCode"] == 0 for end in ends):
            return passed("finished", what, f"delete it with: outlast cancel {snapshot.name}")
    return None


def permanent_failure(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find a Job or ElasticJob that has failed permanently."""
    if failed := _failed_condition(snapshot):
        (text,) = _condition_text(failed)
        said = failed.get("message") or failed.get("reason")
        yield messages.meaning("given-up", text, (text,), job=snapshot.name, said=said)


def _failed_condition(snapshot: Snapshot) -> Document | None:
    """Return the condition that says that the workload has failed, or None. The workload's pods may still be terminating."""
    if snapshot.kind not in ("Job", "ElasticJob"):
        return None
    return pod_status.condition(snapshot.workload, "Failed") or pod_status.condition(snapshot.workload, "FailureTarget")
