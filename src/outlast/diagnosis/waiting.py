"""Jobs that wait for somebody's leave: suspended, in a queue, for a gang, for the other workers; and how jobs end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from outlast import units
from outlast.diagnosis import containers
from outlast.diagnosis import seen as sight
from outlast.diagnosis.seen import Cause, Seen
from outlast.kube import dropins
from outlast.manifests.request import Document

_QUEUE = "kueue.x-k8s.io/queue-name"


def absent(seen: Seen, _: float) -> Iterator[Cause]:
    """An ElasticJob that nobody has taken up."""
    if seen.kind == "ElasticJob" and not seen.workload.get("status") and not seen.pods:
        other = "" if seen.archived else ", `outlast submit --as indexed-job` needs none"
        yield Cause(
            "operator",
            "nobody has taken the job up: no operator has written its status",
            (),
            f"see whether the operator runs (kubectl get deployment -n outlast-system); `outlast install` brings it{other}",
        )


def failing(seen: Seen, _: float) -> Iterator[Cause]:
    """An ElasticJob that trains, but fails again and again without a new checkpoint."""
    status = seen.workload.get("status", {})
    failure, committed = status.get("lastFailure") or {}, (status.get("checkpoint") or {}).get("step", 0)
    since = [each for each in status.get("failures") or () if each.get("committedStep", 0) >= committed]
    steps = [each.get("failedStep") for each in reversed(since)]
    if len(since) < 2 or status.get("state") != "Running" or status.get("step", 0) > max(step or 0 for step in steps):
        return
    same = [step for step in takewhile(lambda step: step == steps[0], steps) if step is not None]
    reason = str(failure.get("reason", ""))
    said = f"it trains at step {status.get('step', 0)}, but {sight.failing(same, len(since), reason)}"
    yield Cause("failing", said, (reason,), f"correct it; `outlast logs {seen.name}` shows all")


# Queues


def queues(seen: Seen, _: float) -> Iterator[Cause]:
    """Kueue holds the job."""
    queue = seen.workload.get("metadata", {}).get("labels", {}).get(_QUEUE)
    for workload in seen.queued:
        if sight.condition(workload, "Finished"):
            continue
        admitted, reserved = sight.condition(workload, "Admitted"), sight.condition(workload, "QuotaReserved")
        if admitted:
            continue
        name = workload.get("spec", {}).get("queueName") or queue
        evicted = sight.condition(workload, "Evicted")
        refused = sight.condition(workload, "QuotaReserved", "False") or {}
        checks = [each for each in workload.get("status", {}).get("admissionChecks", []) if each.get("state") != "Ready"]
        if workload.get("spec", {}).get("active") is False:
            yield Cause(
                "queue", f"its workload in queue {name} is deactivated", _told(evicted), "set spec.active of the Workload to true"
            )
        elif reserved:
            names = sight.together(str(each.get("name")) for each in checks)
            said = tuple(f"{each.get('name')}: {each.get('state')}: {each.get('message', '')}" for each in checks)
            yield Cause(
                "queue", f"queue {name} has room, and waits for {names or 'its checks'}", said, "see what these checks wait for"
            )
        else:
            more = any(sight.condition(each, "Admitted") for each in seen.queued)  # of an ElasticJob that grows
            what = f"queue {name} has not admitted {'all of its workers' if more else 'it'}"
            if evicted:
                what = f"queue {name} has put it back ({evicted.get('reason', '')})"
            text = str(refused.get("message", ""))
            yield Cause("queue", what, (*_told(refused), *_told(evicted)), _queue_remedy(seen, str(name), text))
    if (
        queue
        and not seen.queued
        and seen.workload.get("spec", {}).get("suspend")
        and "workloads.kueue.x-k8s.io" not in seen.unseen
    ):
        remedy = "install Kueue with the framework of this kind enabled, or remove scheduling.queue from the job file"
        yield Cause("queue", f"it is to wait in queue {queue}, and Kueue has made no workload of it", (), remedy)


def _told(condition: Document | None) -> tuple[str, ...]:
    return (f"{condition.get('reason', '')}: {condition.get('message', '')}",) if condition else ()


def _queue_remedy(seen: Seen, queue: str, message: str) -> str:
    known = [sight.name(each) for each in seen.queues]
    if "doesn't exist" in message or "not found" in message:
        have = f" (there are: {sight.together(sorted(known))})" if known else ""
        return f"correct scheduling.queue{have}, or make the LocalQueue {queue}"
    if "inactive" in message or "stopped" in message:
        return "its ClusterQueue does not admit anything now: see kubectl describe clusterqueue"
    if "insufficient" in message or "maximum capacity" in message or "request >" in message:
        return "lower `resources` or workers.replicas, or have the queue's quota raised: it can never fit"
    return "wait until others leave the queue, raise its priority, or ask for less"


# Gangs


def gangs(seen: Seen, _: float) -> Iterator[Cause]:
    """A PodGroup that is not complete."""
    pods = [pod for pod in seen.pods if sight.phase(pod) == "Pending"]
    for group in seen.groups:
        least = group.get("spec", {}).get("minMember", 1)
        state = group.get("status", {}).get("phase", "")
        failed = sight.condition(group, "Unschedulable")
        if state in ("Running", "Finished") or not (pods or state in ("Pending", "Inqueue")):
            continue
        events = [sight.said(each) for each in seen.about({**group, "kind": "PodGroup"})[-1:]]
        queue = group.get("spec", {}).get("queue")
        if state == "Pending" and str(group.get("apiVersion", "")).startswith("scheduling.volcano"):
            remedy = "wait until others leave the queue, or ask for less; `kubectl describe queue` says what it may use"
            what = f"queue {queue or 'default'} of Volcano has not let it in"
            yield Cause("queue", what, (*_told(failed), *events), remedy)
            continue
        remedy = f"the first cause said here for a worker, or lower workers.min ({least}) to what there is room for"
        what = f"its {least} workers start together, and there is not room for all of them"
        yield Cause("gang", what, (*_told(failed), *events), remedy)
    for pod in pods:
        scheduler = pod["spec"].get("schedulerName", "default-scheduler")
        if scheduler != "default-scheduler" and not seen.about(pod) and not sight.condition(pod, "PodScheduled", "False"):
            remedy = f"install it, or remove scheduling.gang ({scheduler}) from the job file"
            yield Cause("scheduler", f"{sight.whom([pod])} waits for the scheduler {scheduler}, which says nothing", (), remedy)
            return
        if gates := [gate["name"] for gate in pod["spec"].get("schedulingGates", [])]:
            yield Cause("gate", f"{sight.whom([pod])} is held back by {sight.together(gates)}", (), "wait for whoever removes it")
            return


# Workers that wait for others


def others(seen: Seen, _: float) -> Iterator[Cause]:
    """Some workers run, and there are not enough of them for a world."""
    ready = [pod for pod in seen.pods if sight.condition(pod, "Ready")]
    running = [pod for pod in seen.pods if sight.phase(pod) == "Running"]
    wanted = seen.wanted()
    if (drop_in := dropins.of(seen.workload)) is not None:
        least = drop_in.sizes(seen.workload)[0]
    else:
        least = seen.workload.get("spec", {}).get("workers", {}).get("min", wanted) if seen.kind == "ElasticJob" else wanted
    if running and not ready and len(running) < least:
        have = f"{len(running)} of at least {least} workers run"
        missing = "mend what keeps the others; they meet as soon as all are there" if len(running) < wanted else ""
        yield Cause("others", f"{sight.whom(running)} {sight.verb(running, 'waits', 'wait')} for the others: {have}", (), missing)
    elif running and not ready:
        remedy = f"wait while they start; `outlast logs {seen.name}` shows what they do"
        whom = f"{sight.whom(running)} {sight.verb(running, 'runs', 'run')}"
        yield Cause("starting", f"{whom}, and {sight.verb(running, 'is', 'are')} in no world yet", (), remedy, wrong=False)


def beginning(seen: Seen, now: float) -> Iterator[Cause]:
    """Pods on their way: the image is being pulled, the volumes are being mounted."""
    for pod in seen.pods:
        if sight.phase(pod) != "Pending" or not pod["spec"].get("nodeName"):
            continue
        if not all(reason in ("ContainerCreating", "PodInitializing") for reason, _ in sight.stuck(pod)):
            continue
        last = seen.about(pod)[-1:]
        since = sight.seconds(pod.get("status", {}).get("startTime"))
        ago = f" for {units.human_seconds(now - since)}" if since else ""
        doing = "pulls its image" if any(event.get("reason") == "Pulling" for event in last) else "is being started"
        what = f"{sight.whom([pod])} {doing} on {pod['spec']['nodeName']}{ago}"
        yield Cause("starting", what, tuple(map(sight.said, last)), "wait", wrong=False)


# Ends, and what the user wished


def wishes(seen: Seen, _: float) -> Iterator[Cause]:
    """Suspended: nothing runs because somebody wished so."""
    spec = seen.workload.get("spec", {})
    queued = _QUEUE in seen.workload.get("metadata", {}).get("labels", {})
    if spec.get("suspend") and not queued and not _failed(seen):
        yield Cause("suspended", "it is suspended", (), f"go on with: outlast resume {seen.name}", wrong=False)
    elif (seen.kind == "StatefulSet" and spec.get("replicas") == 0) or (seen.archived and seen.wanted() == 0):
        yield Cause("suspended", "it is to have no workers", (), f"go on with: outlast resume {seen.name}", wrong=False)
    elif seen.kind == "ElasticJob" and seen.wanted() == 0:
        yield Cause("suspended", "it is to have no workers", (), f"go on with: outlast scale {seen.name} 1", wrong=False)
    if deleted := seen.workload.get("metadata", {}).get("deletionTimestamp"):
        held = seen.workload["metadata"].get("finalizers", [])
        evidence = (f"since {deleted}", *((f"held by {sight.together(held)}",) if held else ()))
        yield Cause(
            "deleted",
            "it is being deleted",
            evidence,
            "wait; when it stays so, whoever set the finalizer does not run",
            wrong=False,
        )


def finished(seen: Seen) -> Cause | None:
    """The cause of a job that is done; it has no other."""
    spec, status = seen.workload.get("spec", {}), seen.workload.get("status", {})
    if seen.kind == "Job" and (done := sight.condition(seen.workload, "Complete")):
        return Cause("finished", "it is finished, and all is well", _told(done), wrong=False)
    if seen.kind == "ElasticJob" and (done := sight.condition(seen.workload, "Succeeded")):
        return Cause("finished", "it is finished, and all is well", _told(done), wrong=False)
    if seen.kind == "Job" and "tasks" in spec and status.get("state", {}).get("phase") == "Completed":
        return Cause("finished", "it is finished, and all is well", wrong=False)
    if seen.kind == "StatefulSet" and seen.pods:
        ends = [containers.stayed(seen, pod) for pod in seen.pods if sight.name(pod) in seen.logs]
        if ends and all(end is not None and end["exitCode"] == 0 for end in ends):
            return Cause(
                "finished",
                "it is finished, and all is well",
                (),
                f"delete it with: outlast cancel {seen.name}",
                wrong=False,
            )
    return None


_REASONS = {
    "BackoffLimitExceeded": ("it was given up: its workers failed more often than restarts.limit allows", "see below"),
    "MaxFailedIndexesExceeded": ("it was given up: too many of its workers failed", "see below"),
    "FailedIndexes": ("it was given up: some of its workers failed too often", "see below"),
    "PodFailurePolicy": ("it was given up: starting again would not have helped", "see below"),
    "DeadlineExceeded": (
        "it was given up: it had not finished when activeDeadlineSeconds was over",
        "raise activeDeadlineSeconds, and submit it again: it goes on from its newest checkpoint",
    ),
}


def given_up(seen: Seen, _: float) -> Iterator[Cause]:
    """A Job or ElasticJob that has failed for good."""
    failed = _failed(seen)
    if failed is None:
        return
    reason = str(failed.get("reason", ""))
    if "deadline" in f"{reason} {failed.get('message', '')}".lower():
        reason = "DeadlineExceeded"
    what, remedy = _REASONS.get(reason, (f"it has failed: {failed.get('message') or reason}", ""))
    if remedy == "see below":
        remedy = f"mend the cause, and submit it again; `outlast logs {seen.name}` shows what the workers said"
    rule = "deadline" if reason == "DeadlineExceeded" else "failed"
    limit = seen.workload["spec"].get("activeDeadlineSeconds")
    evidence = (*_told(failed), *((f"activeDeadlineSeconds: {limit}",) if rule == "deadline" and limit else ()))
    yield Cause(rule, what, evidence, remedy)


def _failed(seen: Seen) -> Document | None:
    if seen.kind == "Job" and "tasks" in seen.workload.get("spec", {}):
        state = seen.workload.get("status", {}).get("state", {})
        if state.get("phase") in ("Failed", "Aborted", "Terminated"):
            return {"reason": state.get("reason", state["phase"]), "message": state.get("message", "")}
        return None
    if seen.kind not in ("Job", "ElasticJob"):
        return None
    return sight.condition(seen.workload, "Failed") or sight.condition(seen.workload, "FailureTarget")  # its pods still end
