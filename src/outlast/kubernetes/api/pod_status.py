"""Reads a pod's worker index and containers, why the pod waits, and how it ended. Pure.

Any part of a pod's status may be missing. The commands `status`, `logs` and `list` show users the sentences that these functions
return.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outlast.base import units
from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import dropins

Document = Mapping[str, Any]

CONTAINERS = (*contract.Pod.AGENT, *(each.container for each in dropins.DROP_INS))
"""Names that the worker's container may have in a pod with several containers."""
_INDICES = (
    Label.WORKER,
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    *(each.index for each in dropins.DROP_INS),
)
"""Labels or annotations with a worker's index. The first one that is set wins."""
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was removed because its node is tainted",
    "EvictionByEvictionAPI": "was evicted: its node is drained",
    "DeletionByPodGC": "was lost with its node",
    "TerminationByKubelet": "was ended by its node: shutdown, preemption or lack of resources",
}
"""Phrases for the reasons in a DisruptionTarget condition.
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"""
_OWN_STORAGE_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
"""Kubelets' messages about a pod that used more storage than it may (kubernetes/pkg/kubelet/eviction/helpers.go)."""
_ORDINARY = {"ContainerCreating", "PodInitializing"}


@dataclass(frozen=True)
class End:
    """How a worker's container ended."""

    code: int
    """The exit code; -1 if the container was lost or never started."""
    sentence: str
    """A phrase that follows the worker's name, such as `was killed (exit code 137)`."""
    counted: bool
    """True if this end counts as a failure."""
    time: float
    out_of_memory: bool = False


# Metadata


def name(document: Document) -> str:
    """Return an object's name; empty if it has none."""
    return str((document.get("metadata") or {}).get("name", ""))


def labelled_index(pod: Document) -> int | None:
    """Return the index of the pod's worker, or None if the pod has no index."""
    meta = pod["metadata"]
    metadata = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    values = next((str(metadata[key]) for key in _INDICES if metadata.get(key)), "")
    return int(values) if values.isdecimal() else None


def index(pod: Document) -> int:
    """Return the index of the pod's worker; 0 if the pod has no index."""
    return labelled_index(pod) or 0


def timestamp(time: str | None) -> float:
    """Convert a time from Kubernetes to seconds since the epoch; 0 for None."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def rfc3339(when: float) -> str:
    """Format seconds since the epoch as Kubernetes does: `2026-01-01T00:02:00Z`."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def created_at(pod: Document) -> float:
    return timestamp(pod["metadata"].get("creationTimestamp"))


def terminating(pod: Document) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


# Status


def phase(pod: Document) -> str:
    """Return `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def finished(pod: Document) -> bool:
    """Return whether the pod will never run again."""
    return phase(pod) in ("Succeeded", "Failed")


def conditions(document: Document, kind: str = "") -> Iterator[Document]:
    """Yield the conditions of a pod, Job or node. With `kind`, yield only those of that type."""
    for each in (document.get("status") or {}).get("conditions") or ():
        if not kind or each.get("type") == kind:
            yield each


def condition(document: Document, kind: str, status: str = "True") -> dict[str, Any] | None:
    """Return the condition of type `kind` with this status, or None if there is none."""
    return next((dict(each) for each in conditions(document, kind) if each.get("status") == status), None)


def bound_at(pod: Document) -> float:
    """Return when the pod was bound to its node or, while that is unknown, when it was created."""
    return max((timestamp(each.get("lastTransitionTime")) for each in conditions(pod, "PodScheduled")), default=created_at(pod))


def disruption(pod: Document) -> dict[str, Any] | None:
    """Return the pod's DisruptionTarget condition, or None. A pod gets this condition when it is terminated through no fault of
    its own."""
    return condition(pod, "DisruptionTarget")


def over_storage_limit(pod: Document) -> bool:
    """Return whether the pod was evicted because it used more storage than its own limits allow. When the node lacks storage, the
    pod gets a DisruptionTarget condition."""
    status = pod.get("status") or {}
    evicted = status.get("reason") == "Evicted" and disruption(pod) is None
    return evicted and bool(_OWN_STORAGE_LIMIT.search(status.get("message") or ""))


def disrupted(pod: Document) -> bool:
    """Return whether the cluster or the kubelet terminated the pod through no fault of its own."""
    reason = (pod.get("status") or {}).get("reason") or ""
    evicted = reason == "Evicted" and not over_storage_limit(pod)
    return disruption(pod) is not None or evicted or rejected_by_kubelet(reason)


def unreachable(pod: Document) -> bool:
    """Return whether the pod's node is unreachable. The node controller then sets Ready to False but keeps the containers' last
    states (kubernetes/pkg/controller/util/node, MarkPodsNotReady)."""
    gated = pod["spec"].get("readinessGates") or terminating(pod)
    contradiction = condition(pod, "Ready", "False") and condition(pod, "ContainersReady", "True")
    return bool(contradiction and not gated) or phase(pod) == "Unknown" or (pod.get("status") or {}).get("reason") == "NodeLost"


# Containers


def statuses(pod: Document) -> Iterator[Document]:
    """Yield the statuses of a pod's containers, init containers first."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def container_status(pod: Document) -> Document:
    """Return the status of the worker's container, else of the first failed container, else of the first container, else an empty
    dict."""
    statuses_ = (pod.get("status") or {}).get("containerStatuses") or ()
    named = [each for each in statuses_ if each["name"] in CONTAINERS]
    failed = [each for each in statuses_ if ((each.get("state") or {}).get("terminated") or {}).get("exitCode")]
    return next(iter([*named, *failed, *statuses_]), {})


def container(pod: Document) -> Document:
    """Return the worker's container, else the first container."""
    containers = pod["spec"].get("containers") or ()
    return next((each for each in containers if each.get("name") in CONTAINERS), containers[0] if containers else {})


def container_name(pod: Document) -> str:
    """Return the name of the container that writes the worker's log."""
    return str(container(pod).get("name", ""))


def requested(pod: Document, resource: str) -> float:
    """Return the amount of a resource that the pod's containers request in total."""
    requests = [(each.get("resources") or {}).get("requests") or {} for each in pod["spec"].get("containers") or ()]
    return sum(units.quantity(each.get(resource, 0)) for each in requests)


def waiting_states(pod: Document) -> Iterator[tuple[str, str]]:
    """Yield the reason and message of each waiting container."""
    for status in statuses(pod):
        if waiting := (status.get("state") or {}).get("waiting"):
            yield str(waiting.get("reason", "")), str(waiting.get("message", ""))


def terminated(status: Document) -> dict[str, Any]:
    """Return how the container terminated, else how it terminated before its last restart, else an empty dict."""
    return (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated") or {}


def termination(pod: Document) -> dict[str, Any] | None:
    """Return how the pod's first failed container terminated, or its worker's container if none failed; None if neither has
    terminated."""
    terminations = [
        {**termination_, "container": each.get("name")}
        for each in statuses(pod)
        if (termination_ := terminated(each)) and (each.get("name") in contract.Pod.AGENT or termination_.get("exitCode"))
    ]
    return next((each for each in terminations if each.get("exitCode")), terminations[-1] if terminations else None)


def running(pod: Document) -> bool:
    return "running" in (container_status(pod).get("state") or {})


def any_running(pod: Document) -> bool:
    """Return whether any container is running, including init containers."""
    return any((each.get("state") or {}).get("running") for each in statuses(pod))


def all_ended(pod: Document) -> bool:
    """Return whether all containers of the pod have ended. The kubelet updates the pod's phase only seconds later, once it has
    removed the sandbox."""
    status = pod.get("status") or {}
    all_statuses = [*statuses(pod), *(status.get("ephemeralContainerStatuses") or ())]
    all_reported = len(status.get("containerStatuses") or ()) == len(pod["spec"].get("containers") or ())
    return finished(pod) or (all_reported and all((each.get("state") or {}).get("terminated") for each in all_statuses))


def ready(pod: Document) -> bool:
    """Return whether the worker is ready. A worker is ready while it is in a world."""
    return bool(container_status(pod).get("ready")) and not terminating(pod)


def has_started(pod: Document) -> bool:
    """Return whether the worker has started and has a log."""
    status = container_status(pod)
    return bool({"running", "terminated"} & set(status.get("state") or {})) or bool(status.get("restartCount"))


def started_at(pod: Document) -> float | None:
    """Return the start time of the worker's container, or None before it starts."""
    state = container_status(pod).get("state") or {}
    return timestamp((state.get("running") or state.get("terminated") or {}).get("startedAt")) or None


WITHOUT_OUTLAST = "say inject: true in the job file, which brings it, or install it there (docs/guide/images.md)"
_MISSING = re.compile(
    r"exec: \"(?P<runc>[^\"]+)\": (?:executable file not found|.*no such file or directory)"
    r"|executable file [`'\"](?P<crun>[^`'\"]+)[`'\"] not found"
    r"|finding executable \"(?P<gvisor>[^\"]+)\""
    r"|(?P<other>executable file not found|no such file or directory)"
)


def command_missing(message: str) -> str | None:
    """Return the command that an image lacks, according to an error from runc, crun or gVisor. Empty if the error does not name
    it; None if the error has another cause."""
    match = _MISSING.search(message)
    return next((name for name in (match["runc"], match["crun"], match["gvisor"]) if name), "") if match else None


# Sentences


def waiting_reason(pod: Document) -> str:
    """Return why a worker has not started, such as `waits to be scheduled`; empty if it has started."""
    if phase(pod) not in ("Pending", "Running") or running(pod):
        return ""
    ordinary = f"is being started on {pod['spec']['nodeName']}" if "nodeName" in pod["spec"] else "waits to be scheduled"
    return blocking_reason(pod) or ordinary


def blocking_reason(pod: Document) -> str:
    """Return what keeps a worker from starting, such as `cannot be scheduled: 0/3 nodes are available`; empty if nothing does."""
    if phase(pod) not in ("Pending", "Running") or running(pod):
        return ""
    if unscheduled := condition(pod, "PodScheduled", "False"):
        if unscheduled.get("reason") == "SchedulingGated":
            return "waits for admission: its scheduling gates are not removed yet"
        reason = unscheduled.get("message") or unscheduled.get("reason") or "no reason is given"
        return f"cannot be scheduled: {_one_line(reason)}"
    for status in (_unfinished_init(pod), container_status(pod)):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") == "CrashLoopBackOff" and (last := end(pod)) is not None:
            return f"{last.sentence}; it is started again after a pause"
        if waiting and waiting.get("reason") not in _ORDINARY:
            message = f": {_one_line(waiting['message'])}" if waiting.get("message") else ""
            return f"cannot start: {waiting.get('reason') or 'it waits'}{message}"
    return ""


def _unfinished_init(pod: Document) -> Document:
    statuses_ = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return next((each for each in statuses_ if (each["state"].get("terminated") or {}).get("exitCode") != 0), {})


def _failed_init(pod: Document) -> Document | None:
    """Return the status of the last init container with a nonzero exit code. Sidecars before it may have such a code too, but
    they end only after it has failed."""
    statuses_ = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return next((each for each in reversed(statuses_) if terminated(each).get("exitCode")), None)


_REFUSALS = (
    "NodeAffinity",
    "NodeLost",
    "NodeShutdown",
    "Preempting",
    "Shutdown",
    "Terminated",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
)


def end(pod: Document) -> End | None:
    """Return how the pod's worker last ended, or None if it has not ended."""
    status = pod.get("status") or {}
    state = container_status(pod)
    ended = terminated(state)
    code = int(ended.get("exitCode", -1)) if ended else -1
    time = timestamp(ended.get("finishedAt")) or max(
        (timestamp(c.get("lastTransitionTime")) for c in conditions(pod)), default=0.0
    )
    if not ended and phase(pod) not in ("Failed", "Unknown"):
        return None
    if (condition_ := disruption(pod)) is not None:
        sentence = _DISRUPTIONS.get(condition_.get("reason", ""), f"was disrupted ({condition_.get('reason')})")
        return End(code, f"{sentence}{_detail(condition_.get('message'))}", False, time)
    if ended.get("reason") == "OOMKilled":
        return End(code, f"{out_of_memory(pod)}; raise {memory_field(pod)}", True, time, out_of_memory=True)
    if over_storage_limit(pod):  # its exit code may be that of a worker that was told to leave
        return End(-1, f"was evicted by its node{_detail(status.get('message'))}; write less, or raise the limit", True, time)
    if status.get("reason") == "Evicted":
        return End(code, f"was evicted by its node{_detail(status.get('message'))}", False, time)
    if status.get("reason") == "DeadlineExceeded":
        return End(code, "was ended: activeDeadlineSeconds has passed", True, time)
    if rejected_by_kubelet(status.get("reason", "")):
        return End(code, f"was refused or lost by its node ({status['reason']}){_detail(status.get('message'))}", False, time)
    if not ended and (failed_init := _failed_init(pod)) is not None:
        code = int(terminated(failed_init)["exitCode"])
        return End(code, f"failed with exit code {code} in its init container {failed_init['name']}", True, time)
    if not ended:
        return End(-1, f"failed before it began{_detail(status.get('message'))}", True, time)
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        if command_missing(ended.get("message", "")) == "outlast":  # a restart would not help
            sentence = f"cannot be started: there is no Outlast in its image {state.get('image', '')}; {WITHOUT_OUTLAST}"
            return End(contract.Exit.MISCONFIGURED, sentence, True, time)
        return End(code, f"could not be started{_detail(ended.get('message'))}", True, time)
    if code == contract.Exit.DONE:
        return End(code, "is done", False, time)
    if code in (contract.Exit.INTERRUPTED, 143):
        return End(code, f"was told to leave (exit code {code})", False, time)
    if code == contract.Exit.MISCONFIGURED:
        last = reversed(str(ended.get("message") or "").splitlines())
        reason = next((found[0] for line in last if (found := contract.parse_end_line(line))), "")
        sentence = f"ended: {reason}" if reason else f"has an invalid configuration (exit code {code}); see its log"
        return End(code, sentence, True, time)
    if contract.killed(code):
        return End(code, f"was killed (exit code {code})", True, time)
    return End(code, f"failed with exit code {code}", True, time)


def last_error(pod: Document) -> str:
    """Return the error that Outlast's command left in the termination message; empty if there is none."""
    lines = str(terminated(container_status(pod)).get("message") or "").splitlines()
    return next((line.removeprefix("Error: ") for line in reversed(lines) if line.startswith("Error: ")), "")


def rejected_by_kubelet(reason: str) -> bool:
    """Return whether this is a reason for which kubelets reject or remove pods that have done nothing wrong."""
    return reason in _REFUSALS or reason.startswith("OutOf")


def unreachable_reason(pod: Document) -> str:
    """Return a phrase for a pod whose node does not answer; empty for other pods."""
    return f"is on {pod['spec'].get('nodeName', 'a node')}, which does not answer" if unreachable(pod) else ""


def memory_field(pod: Document) -> str:
    """Return the job field that sets the memory of the pod's container."""
    has_drop_in = any(dropins.has(owner) for owner in pod["metadata"].get("ownerReferences") or ())
    return f"resources.limits.memory of its container {container_name(pod)}" if has_drop_in else "resources.memory"


def out_of_memory(pod: Document) -> str:
    """Return a phrase about an OOMKilled container. It names the container's memory limit, or the node's memory if there is no
    limit."""
    limit = ((container(pod).get("resources") or {}).get("limits") or {}).get("memory")
    return f"was OOMKilled: it used more than {f'its limit of {limit}' if limit else 'its node had left'}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _detail(text: str | None) -> str:
    return f": {_one_line(text)}" if text else ""
