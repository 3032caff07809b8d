"""Nodes: which of them accept workers and what resources they offer; why pods find no node; workers that lost their node.

The scheduler's message is `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {key: value}. preemption:
...` (kubernetes/pkg/scheduler/framework/types.go, FitError). Its parts about resources, labels and taints are compared with the
nodes; `messages` has the meanings of the other parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from outlast.base import units
from outlast.job import accelerators
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, of_pods
from outlast.kubernetes.diagnosis.finding import Finding, amount_text, grouped, joined, workers
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import placement

TOLERATED = placement.tolerated(accelerators.RESOURCES.values())
"""Default tolerations of workers: for nodes with the accelerators that they request, and for spot nodes."""
_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.cloudprovider.kubernetes.io/shutdown")


def offered(node: Document) -> dict[str, float]:
    """The amount of each resource that a node offers to pods."""
    return {name: units.quantity(amount) for name, amount in node["status"].get("allocatable", {}).items()}


def usable(node: Document) -> bool:
    """Whether workers may be scheduled on the node: it is ready and not cordoned, and has no taint that keeps them off."""
    taints = [taint for taint in node["spec"].get("taints", []) if taint.get("effect") != "PreferNoSchedule"]
    ready = bool(pod_status.condition(node, "Ready")) and not node["spec"].get("unschedulable")
    return ready and all(any(_covers(each, taint) for each in TOLERATED) for taint in taints)


def _covers(toleration: Document, taint: Document) -> bool:
    """Whether a toleration of ours, which names no value, covers this taint."""
    return bool(toleration["key"] == taint["key"] and toleration.get("effect") in (None, taint.get("effect")))


# Pods that find no node

_HEAD = re.compile(r"\s*\d+/(\d+) nodes are available: ")
_PART = re.compile(r"(\d+) (.*)")
_OF_OTHERS = re.compile(r"[Pp]ersistent[Vv]olume|storage|pod group|PodGroup|[Gg]ang")
"""Pattern for messages that other rules report: about claims and gangs."""


def parts(message: str) -> list[tuple[int, str]]:
    """The parts of a message, each with its number of nodes; the number is 0 for a part about the pod.

    `0/3 nodes are available: 1 Insufficient cpu, 2 Too many pods. preemption: ...` gives (1, Insufficient cpu), (2, Too many
    pods).
    """
    found = _HEAD.match(message)
    if not found:
        return [(0, message.strip())]
    rest = re.split(r"\. (?:no new claims|preemption:|not found)|,? preemption: ", message[found.end() :])[0]
    rest = rest.rstrip(". ")
    result = []
    for text in re.split(r", (?=\d+ )", rest):
        numbered = _PART.fullmatch(text)
        result.append((int(numbered[1]), numbered[2]) if numbered else (0, text))
    return result


@of_pods
def unschedulable(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Pods that fit on no node."""
    if pod_status.phase(pod) != "Pending" or pod["spec"].get("nodeName"):
        return
    events = snapshot.about(pod, "FailedScheduling", "Unschedulable")
    held = pod_status.condition(pod, "PodScheduled", "False") or {}
    said = held.get("message") if held.get("reason") != "SchedulingGated" else ""
    message = str(said or (events[-1].get("message", "") if events else "")).strip()
    for count, text in parts(message) if message else ():
        if found := _blocked(snapshot, pod, count, text):
            yield replace(found, evidence=(*found.evidence, f"FailedScheduling: {message}"))


def _blocked(snapshot: Snapshot, pod: Document, count: int, text: str) -> Finding | None:
    """The meaning of one part of a message, which is about `count` nodes; None if another rule reports it."""
    if found := re.search(r"Insufficient (\S+)", text):
        return _resource(snapshot, pod, found[1])
    if re.search(r"didn't match Pod's node affinity/selector|didn't match node selector", text):
        return _selector(snapshot, pod)
    if found := re.search(r"had (?:untolerated )?taints?(?:\(s\))? \{(?P<key>[^:}]+):? ?(?P<value>[^}]*)\}", text):
        return _taint(snapshot, count, found["key"], found["value"].strip())
    if _OF_OTHERS.search(text) and not messages.knows("scheduler", text):
        return None
    return messages.meaning("scheduler", text, count=count, number=f"{count} " if count else "")


def _resource(snapshot: Snapshot, pod: Document, resource: str) -> Finding:
    wanted = pod_status.requested(pod, resource)
    offers = {pod_status.name(node): offered(node).get(resource, 0.0) for node in snapshot.nodes}
    most = max(offers.values(), default=0.0)
    noun = "cores" if resource == "cpu" else resource
    short = resource if resource in ("cpu", "memory", "ephemeral-storage") else "resource"
    name = f"unschedulable-{'gpu' if accelerators.is_accelerator(resource) else short}"
    asks = f"asks for {amount_text(resource, wanted)} {noun}"
    had = (f"nodes offer: {joined(f'{node} {amount_text(resource, amount)} {noun}' for node, amount in offers.items())}",)
    field = {"cpu": "resources.cpu", "memory": "resources.memory"}.get(resource, "resources.gpu")
    lower = f"lower {field}" if not name.endswith("-resource") else f"lower what the template requests of {resource}"
    if not offers:
        remedy = f"{lower}, or ask the cluster's administrator which nodes offer it (you may not see them)"
        return Finding(name, f"finds no node with room, or none at all: each {asks}", remedy)
    if most == 0:
        return Finding(name, f"finds no node: none has any {resource}", _absent(snapshot, resource), had)
    if most < wanted:
        remedy = f"{lower} to less than {amount_text(resource, most)}, or add larger nodes"
        return Finding(name, f"finds no node that is large enough: each {asks}", remedy, had)
    remedy = f"wait until others leave, add nodes, or {lower} or workers.replicas"
    return Finding(name, f"finds no node with room: each {asks}, and others use it", remedy, had)


def _absent(snapshot: Snapshot, resource: str) -> str:
    if not accelerators.is_accelerator(resource):
        return f"add nodes that offer {resource}, or remove it from the template"
    others = {
        each for node in snapshot.nodes for each, amount in offered(node).items() if amount and accelerators.is_accelerator(each)
    }
    has = f"nodes have {joined(sorted(others))}: set resources.accelerator; or " if others else ""
    return f"{has}add nodes with such devices and their device plugin (which makes {resource} known), or set resources.gpu: 0"


def _selector(snapshot: Snapshot, pod: Document) -> Finding:
    chosen = pod["spec"].get("nodeSelector", {})
    required = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    asked = [(f"{key}={value}", key) for key, value in chosen.items()]
    for term in required.get("nodeSelectorTerms", []):
        for each in term.get("matchExpressions", []):
            asked.append((" ".join([each["key"], each["operator"], *each.get("values", [])]), each["key"]))
    where = "nodeSelector" if chosen and not required else "resources.instanceTypes or the template's affinity"
    return Finding(
        "unschedulable-selector",
        "finds no node: none has the labels that it needs",
        f"correct {where} to labels that nodes have (kubectl get nodes --show-labels), or label the nodes",
        tuple(f"{wish}{_values(snapshot, key)}" for wish, key in asked),
    )


def _values(snapshot: Snapshot, key: str) -> str:
    """The values that nodes have for a label; empty if we may not read nodes."""
    if "nodes" in snapshot.unseen:
        return ""
    found = sorted({node["metadata"].get("labels", {}).get(key) for node in snapshot.nodes} - {None})
    return f": nodes have {joined(found)}" if found else ": no node has this label"


def _taint(snapshot: Snapshot, count: int, key: str, value: str) -> Finding:
    taint = f"{key}={value}" if value else key
    carrying = [pod_status.name(node) for node in snapshot.nodes if any(t["key"] == key for t in node["spec"].get("taints", []))]
    evidence = (f"tainted {taint}: {joined(carrying)}",) if carrying else ()
    some = "1 node" if count == 1 else f"{count} nodes"
    if own := messages.tables()["taints"].get(key):
        return Finding("unschedulable-node", f"finds no node: {some} cannot take any ({key})", own, evidence)
    operator = f'key: {key}, operator: Equal, value: "{value}"' if value else f"key: {key}, operator: Exists"
    what = f"finds no node: {some} {'is' if count == 1 else 'are'} kept for others by the taint {taint}"
    remedy = f"if the job may run there, add `tolerations: [{{{operator}}}]` to the job file; if not, add nodes without it"
    return Finding("unschedulable-taint", what, remedy, evidence)


# Nodes that are lost, or take their pods away


def lost(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Nodes that are gone or do not answer, with their pods that have not ended."""
    nodes = {pod_status.name(node): node for node in snapshot.nodes}
    alive = [pod for pod in snapshot.pods if not pod_status.finished(pod) and pod["spec"].get("nodeName")]
    for where, group in grouped((pod["spec"]["nodeName"], pod) for pod in alive).items():
        node, unseen = nodes.get(where), "nodes" in snapshot.unseen
        pods = [pod for pod in group if pod_status.unreachable(pod)] if unseen else group
        if not pods:
            continue
        whom = f"{workers(pods, 'is')} on node {where}"
        if unseen:
            yield Finding("node-lost", f"{whom}, which does not answer", _back(pods))
            continue
        if node is None:
            names = " ".join(map(pod_status.name, pods))
            remedy = f"kubectl delete pod {names} --force -n {snapshot.namespace}: then they are replaced"
            yield Finding("node-lost", f"{whom}, which no longer exists", remedy)
            continue
        ready = next(pod_status.conditions(node, "Ready"), {})
        if ready.get("status") == "True":
            continue
        since = pod_status.timestamp(ready.get("lastTransitionTime"))
        ago = f" for {now - since:.0f} s" if since else ""
        answers = "does not answer" if ready.get("status") == "Unknown" else "is not ready"
        taints = [taint["key"] for taint in node["spec"].get("taints", []) if taint["key"] in _LOST]
        evidence = f"Ready is {ready.get('status')}: {ready.get('reason', '')}: {ready.get('message', '')}"
        what = f"{whom}, which {answers}{ago}"
        yield Finding("node-lost", what, _back(pods), (evidence, *dict.fromkeys(f"taint {key}" for key in taints)))


def _back(pods: list[Document]) -> str:
    """The remedy for pods on lost nodes, which is needed because controllers create no second pod for a worker that may still
    run."""
    nodes = " ".join(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
    return (
        f"bring the node back, or, when it is gone for good, kubectl delete node {nodes}, or kubectl delete pod --force "
        f"{' '.join(map(pod_status.name, pods))}; until then nothing replaces a pod that may still run there"
    )


def taken(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Pods that were evicted, preempted or drained, and have not been replaced."""
    found: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        if any(pod_status.created_at(other) > pod_status.created_at(pod) for other in snapshot.of_worker(pod)):
            continue
        reason = pod["status"].get("reason") or ""
        if target := pod_status.disruption(pod):
            found.append((target.get("reason", ""), pod))
        elif reason in ("Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated", "NodeLost"):
            found.append((reason, pod))
    for reason, pods in grouped(found).items():
        message = pods[0]["status"].get("message") or (pod_status.disruption(pods[0]) or {}).get("message", "")
        said = f"{reason}: {message}"
        where = joined(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
        yield messages.meaning("taken", said, (said,), whom=workers(pods, "was"), where=where, back=_back(pods))
