"""The status of an ElasticJob of `elastic.pytorch.org`, as the archived controller wrote it. Pure."""

from __future__ import annotations

from outlast.kube import pods as podwords
from outlast.legacy import pods as legacy
from outlast.legacy.snapshot import Snapshot
from outlast.operator import job_status
from outlast.operator.plan import Document, Event


def changed(snapshot: Snapshot) -> tuple[Document | None, tuple[Event, ...]]:
    """The new status, if it changes, and its Events."""
    status, name = counted(snapshot), snapshot.name
    before = snapshot.status.get("state")
    here = {i: pod for i, pod in snapshot.own.items() if i < snapshot.wanted and not podwords.leaves(pod)}
    running = [pod for pod in here.values() if snapshot.phase(pod) == "Running"]
    whole = len(here) == snapshot.wanted or before in ("Running", "Suspended")
    if not snapshot.wanted:
        state, message = "Suspended", f"ElasticJob {name} is suspended: 0 workers are wanted."
    elif snapshot.succeeded:
        state, message = "Running", f"ElasticJob {name} is running."
    elif snapshot.held and len(snapshot.held) == len(snapshot.failures) and before in ("Running", "Restarting"):
        state, message = before, message_of(snapshot, before)
    elif snapshot.failures:
        state, message = (
            "Restarting",
            f"ElasticJob {name} is restarting because {len(snapshot.failures)} Worker replica(s) failed.",
        )
    elif len(running) >= snapshot.wanted or (len(running) >= legacy.sizes(snapshot.job)[0] and whole):
        state, message = "Running", f"ElasticJob {name} is running."
    elif before in ("Restarting", "Running", "Suspended"):
        state = "Restarting"
        message = message_of(snapshot, "Restarting") or f"ElasticJob {name} is restarting because Worker replica(s) are missing."
    else:
        state, message = "Created", f"ElasticJob {name} is created."
    status["state"] = state
    status["conditions"] = conditions(snapshot, state, message)
    events: tuple[Event, ...] = ()
    if state != before:
        events = (Event("Warning" if state == "Restarting" else "Normal", f"ElasticJob{state}", message),)
    return (status if status != snapshot.status else None), events


def counted(snapshot: Snapshot) -> Document:
    """The status without state and conditions. `startTime` is reset by a suspension."""
    told = ("judged", "restarts", "started", "startTime", "completionTime")
    kept = {key: value for key, value in snapshot.status.items() if key not in told}
    judged = [each.pod["metadata"]["uid"] for each in snapshot.counted]
    return {
        **kept,
        "selector": ",".join(f"{key}={value}" for key, value in legacy.selector(snapshot.name).items()),
        **({"startTime": snapshot.status.get("startTime") or job_status.text(snapshot.now)} if snapshot.wanted else {}),
        "replicaStatuses": replicas(snapshot),
        "restarts": snapshot.restarts,
        **({"judged": judged} if judged else {}),
        **({"started": snapshot.started} if snapshot.started else {}),
    }


def replicas(snapshot: Snapshot) -> Document:
    """`replicaStatuses`."""
    phases = [snapshot.phase(pod) for pod in snapshot.own.values() if not podwords.leaves(pod)]
    counts = {"succeeded": phases.count("Succeeded"), "failed": phases.count("Failed")}
    return {"Worker": {"active": len(phases) - sum(counts.values()), **counts}}


def conditions(snapshot: Snapshot, state: str, message: str) -> list[Document]:
    """The conditions, with the current one last. Running and Restarting replace each other; an end sets Running to False."""
    before: dict[str, Document] = {each["type"]: each for each in snapshot.status.get("conditions") or ()}
    now = job_status.text(snapshot.now)

    def condition(kind: str, truth: str, reason: str, text: str) -> Document:
        old: Document = before.get(kind, {})
        if (old.get("status"), old.get("reason"), old.get("message")) == (truth, reason, text):
            return old
        since = old.get("lastTransitionTime", now) if old.get("status") == truth else now
        said = {"type": kind, "status": truth, "reason": reason, "message": text}
        return {**said, "lastUpdateTime": now, "lastTransitionTime": since}

    made = before.get("Created") or condition("Created", "True", "ElasticJobCreated", f"ElasticJob {snapshot.name} is created.")
    found = [made]
    limits = [*legacy.limits(snapshot.job)]
    limits += [
        f"Pod {pod['metadata']['name']} exists and does not belong to this job, so worker {index} is not created; delete the pod"
        for index, pod in sorted(snapshot.strangers.items())
    ]
    if limits:
        found.append(condition("Limited", "True", "NotHonoured", "; ".join(limits)))
    if state in ("Running", "Restarting"):
        found.append(condition(state, "True", f"ElasticJob{state}", message))
    elif state != "Created":
        if "Running" in before or state == "Suspended":
            found.append(condition("Running", "False", f"ElasticJob{state}", message))
        if state in ("Succeeded", "Failed"):
            found.append(condition(state, "True", f"ElasticJob{state}", message))
    return found


def message_of(snapshot: Snapshot, kind: str) -> str:
    """The sentence of a condition; empty when it is absent."""
    return next((str(each["message"]) for each in snapshot.status.get("conditions") or () if each["type"] == kind), "")
