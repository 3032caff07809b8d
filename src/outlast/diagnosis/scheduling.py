"""Why pods find no node: the scheduler's message, taken apart, and what the nodes offer.

The message is `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {key: value}. preemption: ...`
(kubernetes/pkg/scheduler/framework/types.go, FitError). What it says about resources, labels and taints is compared with the
nodes; `messages` knows the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from outlast import accelerators
from outlast.diagnosis import messages
from outlast.diagnosis.finding import Finding, amount_text, grouped, joined, workers
from outlast.diagnosis.nodes import offered
from outlast.diagnosis.snapshot import Snapshot
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document

_HEAD = re.compile(r"\s*\d+/(\d+) nodes are available: ")
_PART = re.compile(r"(\d+) (.*)")
_OF_OTHERS = re.compile(r"[Pp]ersistent[Vv]olume|storage|pod group|PodGroup|[Gg]ang")
"""What other rules report: claims, and gangs."""


def parts(message: str) -> list[tuple[int, str]]:
    """The parts of a message, each with its number of nodes; 0 for a part about the pod.

    `0/3 nodes are available: 1 Insufficient cpu, 2 Too many pods. preemption: ...` gives
    (1, Insufficient cpu), (2, Too many pods).
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


def unschedulable(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Pods that fit on no node."""
    refused = grouped((message, pod) for pod in snapshot.waiting() if (message := _refusal(snapshot, pod)))
    for message, pods in refused.items():
        for count, text in parts(message):
            if found := _blocked(Blocked(snapshot, pods, count), text):
                yield replace(found, evidence=(*found.evidence, f"FailedScheduling: {message}"))


def _refusal(snapshot: Snapshot, pod: Document) -> str:
    """The scheduler's last message about a pod; empty if there is none."""
    events = snapshot.about(pod, "FailedScheduling", "Unschedulable")
    held = kube_pods.condition(pod, "PodScheduled", "False") or {}
    message = held.get("message") if held.get("reason") != "SchedulingGated" else ""
    return str(message or (events[-1].get("message", "") if events else "")).strip()


@dataclass(frozen=True)
class Blocked:
    """Pods that do not fit on `count` nodes for one reason."""

    snapshot: Snapshot
    pods: list[Document]
    count: int

    @property
    def whom(self) -> str:
        """`worker 1 finds`."""
        return workers(self.pods, "finds")


def _blocked(it: Blocked, text: str) -> Finding | None:
    """What one part of a message means; None when another rule reports it."""
    for says, compare in _COMPARED:
        if found := re.search(says, text):
            return compare(it, found)
    if _OF_OTHERS.search(text) and not messages.knows("scheduler", text):
        return None
    number = f"{it.count} " if it.count else ""
    return messages.meaning("scheduler", text, whom=it.whom, count=it.count, number=number)


def _resource(it: Blocked, said: re.Match[str]) -> Finding:
    resource = said["resource"]
    wanted = max(kube_pods.requested(pod, resource) for pod in it.pods)
    offers = {kube_pods.name(node): offered(node).get(resource, 0.0) for node in it.snapshot.nodes}
    most = max(offers.values(), default=0.0)
    noun = "cores" if resource == "cpu" else resource
    short = resource if resource in ("cpu", "memory", "ephemeral-storage") else "resource"
    name = f"unschedulable-{'gpu' if accelerators.known(resource) else short}"
    asks = f"asks for {amount_text(resource, wanted)} {noun}"
    had = (f"nodes offer: {joined(f'{node} {amount_text(resource, amount)} {noun}' for node, amount in offers.items())}",)
    field = {"cpu": "resources.cpu", "memory": "resources.memory"}.get(resource, "resources.gpu")
    lower = f"lower {field}" if not name.endswith("-resource") else f"lower what the template requests of {resource}"
    if not offers:
        remedy = f"{lower}, or ask the cluster's administrator which nodes offer it (you may not see them)"
        return Finding(name, f"{it.whom} no node with room, or none at all: each {asks}", remedy)
    if most == 0:
        return Finding(name, f"{it.whom} no node: none has any {resource}", _absent(it.snapshot, resource), had)
    if most < wanted:
        remedy = f"{lower} to less than {amount_text(resource, most)}, or add larger nodes"
        return Finding(name, f"{it.whom} no node that is large enough: each {asks}", remedy, had)
    remedy = f"wait until others leave, add nodes, or {lower} or workers.replicas"
    return Finding(name, f"{it.whom} no node with room: each {asks}, and others use it", remedy, had)


def _absent(snapshot: Snapshot, resource: str) -> str:
    if not accelerators.known(resource):
        return f"add nodes that offer {resource}, or remove it from the template"
    others = {each for node in snapshot.nodes for each, amount in offered(node).items() if amount and accelerators.known(each)}
    has = f"nodes have {joined(sorted(others))}: set resources.accelerator; or " if others else ""
    return f"{has}add nodes with such devices and their device plugin (which makes {resource} known), or set resources.gpu: 0"


def _selector(it: Blocked, _: re.Match[str]) -> Finding:
    pod = it.pods[0]["spec"]
    chosen = pod.get("nodeSelector", {})
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    asked = [(f"{key}={value}", key) for key, value in chosen.items()]
    for term in required.get("nodeSelectorTerms", []):
        for each in term.get("matchExpressions", []):
            asked.append((" ".join([each["key"], each["operator"], *each.get("values", [])]), each["key"]))
    where = "nodeSelector" if chosen and not required else "resources.instanceTypes or the template's affinity"
    return Finding(
        "unschedulable-selector",
        f"{it.whom} no node: none has the labels that it needs",
        f"correct {where} to labels that nodes have (kubectl get nodes --show-labels), or label the nodes",
        tuple(f"{wish}{_values(it.snapshot, key)}" for wish, key in asked),
    )


def _values(snapshot: Snapshot, key: str) -> str:
    """The values of a label on the nodes; empty when they may not be seen."""
    if "nodes" in snapshot.unseen:
        return ""
    found = sorted({node["metadata"].get("labels", {}).get(key) for node in snapshot.nodes} - {None})
    return f": nodes have {joined(found)}" if found else ": no node has this label"


def _taint(it: Blocked, said: re.Match[str]) -> Finding:
    key, value = said["key"], (said["value"] or "").strip()
    taint = f"{key}={value}" if value else key
    carrying = [
        kube_pods.name(node) for node in it.snapshot.nodes if any(t["key"] == key for t in node["spec"].get("taints", []))
    ]
    evidence = (f"tainted {taint}: {joined(carrying)}",) if carrying else ()
    some = "1 node" if it.count == 1 else f"{it.count} nodes"
    if own := messages.tables()["taints"].get(key):
        return Finding("unschedulable-node", f"{it.whom} no node: {some} cannot take any ({key})", own, evidence)
    operator = f'key: {key}, operator: Equal, value: "{value}"' if value else f"key: {key}, operator: Exists"
    what = f"{it.whom} no node: {some} {'is' if it.count == 1 else 'are'} kept for others by the taint {taint}"
    remedy = f"if the job may run there, add `tolerations: [{{{operator}}}]` to the job file; if not, add nodes without it"
    return Finding("unschedulable-taint", what, remedy, evidence)


_COMPARED: tuple[tuple[str, Callable[[Blocked, re.Match[str]], Finding]], ...] = (
    (r"Insufficient (?P<resource>\S+)", _resource),
    (r"didn't match Pod's node affinity/selector|didn't match node selector", _selector),
    (r"had (?:untolerated )?taints?(?:\(s\))? \{(?P<key>[^:}]+):? ?(?P<value>[^}]*)\}", _taint),
)
"""What the scheduler says of resources, labels and taints, and what compares it with the nodes."""
