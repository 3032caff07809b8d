"""The only reader of pods: which worker a pod runs, the pod's phase and containers, and why it waits or how it ended.

Pure: pods are documents as the API server returns them, and any part of their status may be missing. The operator, `jobs` and
`diagnosis` read pods through these functions. `status`, `logs` and `list` show the sentences to users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outlast.base import units
from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import dropins

Document = Mapping[str, Any]

CONTAINERS = (*contract.Pod.AGENT, *(each.container for each in dropins.DROP_INS))
"""Possible names of the worker's container, if a pod has several containers."""
_INDICES = (
    Label.WORKER,
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    *(each.index for each in dropins.DROP_INS),
)
"""Labels or annotations that carry a worker's index; the first that is set wins."""
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was removed because its node is tainted",
    "EvictionByEvictionAPI": "was evicted: its node is drained",
    "DeletionByPodGC": "was lost with its node",
    "TerminationByKubelet": "was ended by its node: shutdown, preemption or lack of resources",
}
"""Phrases for the reasons of the condition DisruptionTarget.
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"""
_ORDINARY = {"ContainerCreating", "PodInitializing"}


@dataclass(frozen=True)
class End:
    """How a worker's container ended."""

    code: int
    """Exit code; -1 if there is none, because the container was lost or never started."""
    sentence: str
    """Phrase that follows the name of the worker: `was killed (exit code 137)`."""
    counted: bool
    """Whether the end is a failure rather than an interruption."""
    time: float
    out_of_memory: bool = False


# Metadata


def name(document: Document) -> str:
    """The name of a document; empty if it has none."""
    return str((document.get("metadata") or {}).get("name", ""))


def labelled_index(pod: Document) -> int | None:
    """The index of the pod's worker; None if the pod has none."""
    meta = pod["metadata"]
    marks = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    values = next((str(marks[key]) for key in _INDICES if marks.get(key)), "")
    return int(values) if values.isdecimal() else None


def index(pod: Document) -> int:
    """The index of the pod's worker; 0 if the pod has none."""
    return labelled_index(pod) or 0


def seconds(time: str | None) -> float:
    """A time as Kubernetes writes it, in seconds since the epoch; 0 for None."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def created(pod: Document) -> float:
    return seconds(pod["metadata"].get("creationTimestamp"))


def leaves(pod: Document) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


# Status


def phase(pod: Document) -> str:
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def over(pod: Document) -> bool:
    """Whether the pod will never run again."""
    return phase(pod) in ("Succeeded", "Failed")


def conditions(document: Document, kind: str = "") -> Iterator[Document]:
    """The conditions in the status of a pod, a Job or a node; only those of type `kind`, if it is given."""
    for each in (document.get("status") or {}).get("conditions") or ():
        if not kind or each.get("type") == kind:
            yield each


def condition(document: Document, kind: str, status: str = "True") -> dict[str, Any] | None:
    """The condition of type `kind` that has this status, if any."""
    return next((dict(each) for each in conditions(document, kind) if each.get("status") == status), None)


def bound(pod: Document) -> float:
    """The time when the pod was bound to its node; its creation time while its status does not show the binding."""
    return max((seconds(each.get("lastTransitionTime")) for each in conditions(pod, "PodScheduled")), default=created(pod))


def disruption(pod: Document) -> dict[str, Any] | None:
    """The condition by which the cluster reports that it ends the pod for no fault of the pod."""
    return condition(pod, "DisruptionTarget")


def disrupted(pod: Document) -> bool:
    """Whether the pod was ended from outside, by the cluster or by its kubelet."""
    why = (pod.get("status") or {}).get("reason") or ""
    return disruption(pod) is not None or why == "Evicted" or refused(why)


def unreachable(pod: Document) -> bool:
    """Whether the pod's node does not answer. In that case, the node controller sets Ready to False and leaves the last reported
    state of the containers (kubernetes/pkg/controller/util/node, MarkPodsNotReady)."""
    gated = pod["spec"].get("readinessGates") or leaves(pod)
    contradiction = condition(pod, "Ready", "False") and condition(pod, "ContainersReady", "True")
    return bool(contradiction and not gated) or phase(pod) == "Unknown" or (pod.get("status") or {}).get("reason") == "NodeLost"


# Containers


def statuses(pod: Document) -> Iterator[Document]:
    """The statuses of a pod's containers, init containers first."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def container_status(pod: Document) -> Document:
    """The status of the worker's container, else of the first container that failed, else of the first container; empty if there
    is none."""
    statuses_ = (pod.get("status") or {}).get("containerStatuses") or ()
    named = [each for each in statuses_ if each["name"] in CONTAINERS]
    failed = [each for each in statuses_ if ((each.get("state") or {}).get("terminated") or {}).get("exitCode")]
    return next(iter([*named, *failed, *statuses_]), {})


def container(pod: Document) -> Document:
    """The specification of the worker's container, else of the first container."""
    found = pod["spec"].get("containers") or ()
    return next((each for each in found if each.get("name") in CONTAINERS), found[0] if found else {})


def container_name(pod: Document) -> str:
    """The name of the container that writes the worker's log."""
    return str(container(pod).get("name", ""))


def requested(pod: Document, resource: str) -> float:
    """The amount of a resource that the pod's containers request in total."""
    requests = [(each.get("resources") or {}).get("requests") or {} for each in pod["spec"].get("containers") or ()]
    return sum(units.quantity(each.get(resource, 0)) for each in requests)


def waiting(pod: Document) -> Iterator[tuple[str, str]]:
    """Reason and message of each waiting container."""
    for status in statuses(pod):
        if held := (status.get("state") or {}).get("waiting"):
            yield str(held.get("reason", "")), str(held.get("message", ""))


def terminated(status: Document) -> dict[str, Any]:
    """The termination of a container, current or before its last restart; empty if it has never ended."""
    return (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated") or {}


def termination(pod: Document) -> dict[str, Any] | None:
    """The termination of the pod's first failed container, else of its worker's container; None if neither exists."""
    found = [
        {**over, "container": each.get("name")}
        for each in statuses(pod)
        if (over := terminated(each)) and (each.get("name") in contract.Pod.AGENT or over.get("exitCode"))
    ]
    return next((each for each in found if each.get("exitCode")), found[-1] if found else None)


def running(pod: Document) -> bool:
    """Whether the worker is running."""
    return "running" in (container_status(pod).get("state") or {})


def any_running(pod: Document) -> bool:
    """Whether any container is running, including init containers."""
    return any((each.get("state") or {}).get("running") for each in statuses(pod))


def all_ended(pod: Document) -> bool:
    """Whether no container of the pod runs or will run. Kubelets write the pod's phase seconds later, once the sandbox is
    gone."""
    status = pod.get("status") or {}
    found = [*statuses(pod), *(status.get("ephemeralContainerStatuses") or ())]
    known = len(status.get("containerStatuses") or ()) == len(pod["spec"].get("containers") or ())
    return over(pod) or (known and all((each.get("state") or {}).get("terminated") for each in found))


def ready(pod: Document) -> bool:
    """Whether the worker is in a world."""
    return bool(container_status(pod).get("ready")) and not leaves(pod)


def began(pod: Document) -> bool:
    """Whether the worker has started, so that it has a log."""
    status = container_status(pod)
    return bool({"running", "terminated"} & set(status.get("state") or {})) or bool(status.get("restartCount"))


def started(pod: Document) -> float | None:
    """Start time of the worker's container; None before it starts."""
    state = container_status(pod).get("state") or {}
    return seconds((state.get("running") or state.get("terminated") or {}).get("startedAt")) or None


WITHOUT_OUTLAST = (
    "install it there (pip install 'outlast[train,store]', with the directory of `outlast` on PATH), or build on Outlast's own "
    "image (docs/guide/kubernetes.md, Images)"
)
"""The remedy for an image that has torch but lacks Outlast."""
_MISSING = re.compile(
    r"exec: \"(?P<runc>[^\"]+)\": (?:executable file not found|.*no such file or directory)"
    r"|executable file [`'\"](?P<crun>[^`'\"]+)[`'\"] not found"
    r"|finding executable \"(?P<gvisor>[^\"]+)\""
    r"|(?P<other>executable file not found|no such file or directory)"
)


def command_missing(message: str) -> str | None:
    """The command that an image lacks, according to runc, crun or gVisor, which could not start a container. Empty if the message
    does not name the command; None if the message is about something else."""
    found = _MISSING.search(message)
    return next((name for name in (found["runc"], found["crun"], found["gvisor"]) if name), "") if found else None


# Sentences


def waits(pod: Document) -> str:
    """The reason why a worker has not started, such as `waits to be scheduled`; empty if it has started."""
    if phase(pod) not in ("Pending", "Running") or running(pod):
        return ""
    ordinary = f"is being started on {pod['spec']['nodeName']}" if "nodeName" in pod["spec"] else "waits to be scheduled"
    return stuck(pod) or ordinary


def stuck(pod: Document) -> str:
    """The reason why a worker cannot start by itself, such as `cannot be scheduled: 0/3 nodes are available`; empty if there is
    none."""
    if phase(pod) not in ("Pending", "Running") or running(pod):
        return ""
    if unscheduled := condition(pod, "PodScheduled", "False"):
        if unscheduled.get("reason") == "SchedulingGated":
            return "waits for admission: its scheduling gates are not removed yet"
        why = unscheduled.get("message") or unscheduled.get("reason") or "no reason is given"
        return f"cannot be scheduled: {_sentence(why)}"
    for status in (_unfinished_init(pod), container_status(pod)):
        held = (status.get("state") or {}).get("waiting")
        if held and held.get("reason") == "CrashLoopBackOff" and (last := end(pod)) is not None:
            return f"{last.sentence}; it is started again after a pause"
        if held and held.get("reason") not in _ORDINARY:
            detail = f": {_sentence(held['message'])}" if held.get("message") else ""
            return f"cannot start: {held.get('reason') or 'it waits'}{detail}"
    return ""


def _unfinished_init(pod: Document) -> Document:
    """The status of the first init container that has not succeeded yet; empty if there is none."""
    found = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return next((each for each in found if (each["state"].get("terminated") or {}).get("exitCode") != 0), {})


def _failed_init(pod: Document) -> Document | None:
    """The status of the init container that failed. It is the last one with an exit code, since sidecars before it end with
    it."""
    found = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return next((each for each in reversed(found) if terminated(each).get("exitCode")), None)


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
    """How the pod's worker ended last; None if it has not ended yet."""
    status = pod.get("status") or {}
    state = container_status(pod)
    ended = terminated(state)
    code = int(ended.get("exitCode", -1)) if ended else -1
    when = seconds(ended.get("finishedAt")) or max((seconds(c.get("lastTransitionTime")) for c in conditions(pod)), default=0.0)
    if not ended and phase(pod) not in ("Failed", "Unknown"):
        return None
    if (target := disruption(pod)) is not None:
        said = _DISRUPTIONS.get(target.get("reason", ""), f"was disrupted ({target.get('reason')})")
        return End(code, f"{said}{_more(target.get('message'))}", False, when)
    if ended.get("reason") == "OOMKilled":
        return End(code, f"{out_of_memory(pod)}; raise {memory_field(pod)}", True, when, out_of_memory=True)
    if status.get("reason") == "Evicted":
        return End(code, f"was evicted by its node{_more(status.get('message'))}", False, when)
    if status.get("reason") == "DeadlineExceeded":
        return End(code, "was ended: activeDeadlineSeconds has passed", True, when)
    if refused(status.get("reason", "")):
        return End(code, f"was refused or lost by its node ({status['reason']}){_more(status.get('message'))}", False, when)
    if not ended and (before := _failed_init(pod)) is not None:
        code = int(terminated(before)["exitCode"])
        return End(code, f"failed with exit code {code} in its init container {before['name']}", True, when)
    if not ended:
        return End(-1, f"failed before it began{_more(status.get('message'))}", True, when)
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        if command_missing(ended.get("message", "")) == "outlast":  # a restart would not help
            said = f"cannot be started: there is no Outlast in its image {state.get('image', '')}; {WITHOUT_OUTLAST}"
            return End(contract.Exit.MISCONFIGURED, said, True, when)
        return End(code, f"could not be started{_more(ended.get('message'))}", True, when)
    if code == contract.Exit.DONE:
        return End(code, "is done", False, when)
    if code in (contract.Exit.INTERRUPTED, 143):
        return End(code, f"was told to leave (exit code {code})", False, when)
    if code == contract.Exit.MISCONFIGURED:
        return End(code, f"found its configuration wrong (exit code {code}); its log says what", True, when)
    if contract.killed(code):
        return End(code, f"was killed (exit code {code})", True, when)
    return End(code, f"failed with exit code {code}", True, when)


def last_error(pod: Document) -> str:
    """The error message with which a command of Outlast ended in the pod, from the termination message; empty if there is
    none."""
    lines = str(terminated(container_status(pod)).get("message") or "").splitlines()
    return next((line.removeprefix("Error: ") for line in reversed(lines) if line.startswith("Error: ")), "")


def refused(reason: str) -> bool:
    """Whether this is a reason for which a kubelet rejects or removes a pod that is not at fault."""
    return reason in _REFUSALS or reason.startswith("OutOf")


def lost(pod: Document) -> str:
    """A phrase for a pod whose node does not answer; otherwise empty."""
    return f"is on {pod['spec'].get('nodeName', 'a node')}, which does not answer" if unreachable(pod) else ""


def memory_field(pod: Document) -> str:
    """The field of the pod's job that sets the memory of its container."""
    theirs = any(dropins.has(owner) for owner in pod["metadata"].get("ownerReferences") or ())
    return f"resources.limits.memory of its container {container_name(pod)}" if theirs else "resources.memory"


def out_of_memory(pod: Document) -> str:
    """A phrase about an OOMKilled container, which exceeded its limit or, without a limit, the memory of its node."""
    limit = ((container(pod).get("resources") or {}).get("limits") or {}).get("memory")
    return f"was OOMKilled: it used more than {f'its limit of {limit}' if limit else 'its node had left'}"


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _more(text: str | None) -> str:
    return f": {_sentence(text)}" if text else ""
