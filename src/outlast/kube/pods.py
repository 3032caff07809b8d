"""What a worker's pod says of the worker: its index, what it waits for, how it ended.

Pure: pods are documents as the API server has them. `cluster.job_status` makes a job's status of it. The sentences are those that
users see in `status`, `logs` and `list`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outlast import contract
from outlast.contract import Label
from outlast.diagnosis import seen as sight

Document = Mapping[str, Any]

_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was removed because its node is tainted",
    "EvictionByEvictionAPI": "was evicted: its node is drained",
    "DeletionByPodGC": "was lost with its node",
    "TerminationByKubelet": "was ended by its node: shutdown, preemption or lack of resources",
}
"""Reasons of the condition DisruptionTarget:
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"""
_ORDINARY = {"ContainerCreating", "PodInitializing"}


@dataclass(frozen=True)
class End:
    """How a worker's container ended."""

    code: int
    """-1 when it has none: it was lost, or never began."""
    sentence: str
    """After the name of the worker: `was killed (exit code 137)`."""
    counted: bool
    """Whether it is a failure, and no interruption."""
    time: float


def index(pod: Document) -> int:
    """Which worker it is."""
    labels, annotations = pod["metadata"].get("labels") or {}, pod["metadata"].get("annotations") or {}
    found = (
        labels.get(Label.WORKER)
        or annotations.get("batch.kubernetes.io/job-completion-index")
        or labels.get("apps.kubernetes.io/pod-index")
        or annotations.get("volcano.sh/task-index")
        or "0"
    )
    return int(found) if found.isdecimal() else 0


def seconds(when: str | None) -> float:
    """Seconds since the epoch of a time as Kubernetes writes it; 0 for none."""
    return datetime.fromisoformat(when).timestamp() if when else 0.0


def born(pod: Document) -> float:
    """When it was made."""
    return seconds(pod["metadata"].get("creationTimestamp"))


def bound(pod: Document) -> float:
    """When it was given its node; when it was made, while that is not told."""
    return max((seconds(c.get("lastTransitionTime")) for c in _conditions(pod, "PodScheduled")), default=born(pod))


def phase(pod: Document) -> str:
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def container(pod: Document, *, init: bool = False) -> Document:
    """The status of the worker's container, or of the first that is not yet done of those before it; empty when there is none."""
    status = pod.get("status") or {}
    if init:
        undone = [
            c for c in status.get("initContainerStatuses") or () if (c["state"].get("terminated") or {}).get("exitCode") != 0
        ]
        return undone[0] if undone else {}
    found = status.get("containerStatuses") or ()
    return next((each for each in found if each["name"] in sight.CONTAINERS), found[0] if found else {})


def name(pod: Document) -> str:
    """The name of the container whose log is the worker's."""
    found = pod["spec"]["containers"]
    return str(next((each["name"] for each in found if each["name"] in sight.CONTAINERS), found[0]["name"]))


def running(pod: Document) -> bool:
    """Whether its worker runs now."""
    return "running" in (container(pod).get("state") or {})


def ready(pod: Document) -> bool:
    """Whether its worker is in a world."""
    return bool(container(pod).get("ready")) and not leaves(pod)


def leaves(pod: Document) -> bool:
    """Whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def began(pod: Document) -> bool:
    """Whether its worker has begun, so that there is a log."""
    status = container(pod)
    return bool({"running", "terminated"} & set(status.get("state") or {})) or bool(status.get("restartCount"))


def over(pod: Document) -> bool:
    """Whether it will never run again."""
    return phase(pod) in ("Succeeded", "Failed")


def waits(pod: Document) -> str:
    """Why a worker has not begun; empty when it has, or when nothing is wrong: `cannot be scheduled: 0/3 nodes are available`."""
    if phase(pod) not in ("Pending", "Running") or running(pod):
        return ""
    for condition in _conditions(pod, "PodScheduled"):
        if condition["status"] == "False":
            if condition.get("reason") == "SchedulingGated":
                return "waits for admission: its scheduling gates are not removed yet"
            return (
                f"cannot be scheduled: {_sentence(condition.get('message') or condition.get('reason') or 'no reason is given')}"
            )
    for status in (container(pod, init=True), container(pod)):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") == "CrashLoopBackOff" and (last := end(pod)) is not None:
            return f"{last.sentence}; it is started again after a pause"
        if waiting and waiting.get("reason") not in _ORDINARY:
            detail = f": {_sentence(waiting['message'])}" if waiting.get("message") else ""
            return f"cannot start: {waiting.get('reason') or 'it waits'}{detail}"
    if "nodeName" not in pod["spec"]:
        return "waits to be scheduled"
    return f"is being started on {pod['spec']['nodeName']}"


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
    """How its worker ended last; None when it never has."""
    status = pod.get("status") or {}
    state = container(pod)
    ended = (state.get("state") or {}).get("terminated") or (state.get("lastState") or {}).get("terminated") or {}
    code = int(ended.get("exitCode", -1)) if ended else -1
    when = seconds(ended.get("finishedAt")) or max((seconds(c.get("lastTransitionTime")) for c in _conditions(pod)), default=0.0)
    if not ended and phase(pod) not in ("Failed", "Unknown"):
        return None
    if (target := disruption(pod)) is not None:
        said = _DISRUPTIONS.get(target.get("reason", ""), f"was disrupted ({target.get('reason')})")
        return End(code, f"{said}{_more(target.get('message'))}", False, when)
    if ended.get("reason") == "OOMKilled":
        return End(code, f"{out_of_memory(pod, name(pod))}; raise resources.memory", True, when)
    if status.get("reason") == "Evicted":
        return End(code, f"was evicted by its node{_more(status.get('message'))}", False, when)
    if status.get("reason") == "DeadlineExceeded":
        return End(code, "was ended: activeDeadlineSeconds has passed", True, when)
    if refused(status.get("reason", "")):
        return End(code, f"was refused or lost by its node ({status['reason']}){_more(status.get('message'))}", False, when)
    if not ended:
        return End(-1, f"failed before it began{_more(status.get('message'))}", True, when)
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        if sight.command_missing(ended.get("message", "")) == "outlast":  # to start it again would not help
            said = f"cannot be started: there is no Outlast in its image {state.get('image', '')}; {sight.WITHOUT_OUTLAST}"
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


def disruption(pod: Document) -> Document | None:
    """The condition by which the cluster says that it ends the pod, for no fault of the pod's."""
    return next((each for each in _conditions(pod, "DisruptionTarget") if each.get("status") == "True"), None)


def refused(reason: str) -> bool:
    """Whether this is why a kubelet takes no pod, or has none any more: no fault of the pod's."""
    return reason in _REFUSALS or reason.startswith("OutOf")


def lost(pod: Document) -> str:
    """What is wrong with its node; empty when that answers."""
    return f"is on {pod['spec'].get('nodeName', 'a node')}, which does not answer" if sight.silent(dict(pod)) else ""


def _conditions(pod: Document, type_: str = "") -> Iterator[Document]:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if not type_ or condition["type"] == type_:
            yield condition


def out_of_memory(pod: Document, container: str) -> str:
    """What a container that was OOMKilled did: used more than it may, or without a limit, more than its node had."""
    limits = [(c.get("resources") or {}).get("limits") or {} for c in pod["spec"]["containers"] if c["name"] == container]
    limit = next((found["memory"] for found in limits if "memory" in found), None)
    return f"was OOMKilled: it used more than {f'its limit of {limit}' if limit else 'its node had left'}"


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _more(text: str | None) -> str:
    return f": {_sentence(text)}" if text else ""
