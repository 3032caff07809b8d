"""Why pods find no node: the scheduler's message, taken apart, and what the nodes offer.

The message is `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {key: value}. preemption: ...`
(kubernetes/pkg/scheduler/framework/types.go, FitError). The rules are a table: the scheduler's words about some nodes, and
a function that makes a cause of them. Storage has its own module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outlast import accelerators, units
from outlast.diagnosis.cause import Cause, amount_text, grouped, joined, verb, workers_text
from outlast.diagnosis.snapshot import Snapshot
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document

_HEAD = re.compile(r"\s*\d+/(\d+) nodes are available: ")
_PART = re.compile(r"(\d+) (.*)")


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


def unschedulable(snapshot: Snapshot, _: float) -> Iterator[Cause]:
    """Pods that fit on no node."""
    refused = grouped((message, pod) for pod in snapshot.waiting() if (message := refusal(snapshot, pod)))
    for message, pods in refused.items():
        told: list[Cause] = []
        for count, text in parts(message):
            for rule in RULES:
                if found := re.search(rule.says, text):
                    cause = rule.cause(Blocked(snapshot, pods, count, found))
                    told += [cause] if cause else []
                    break
            else:
                remedy = "see `kubectl describe pod` and `kubectl get nodes`, or ask the cluster's administrator"
                told.append(Cause("unschedulable", f"{_whom(pods)} no node: {f'{count} ' if count else ''}{text}", (), remedy))
        for cause in told:
            yield Cause(cause.rule, cause.what, (*cause.evidence, f"FailedScheduling: {message}"), cause.remedy)


def refusal(snapshot: Snapshot, pod: Document) -> str:
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
    said: re.Match[str]

    @property
    def whom(self) -> str:
        """`worker 1 finds`."""
        return _whom(self.pods)


def _whom(pods: Sequence[Document]) -> str:
    return f"{workers_text(pods)} {verb(pods, 'finds', 'find')}"


def _resource(it: Blocked) -> Cause:
    resource = it.said["resource"]
    wanted = max(kube_pods.requested(pod, resource) for pod in it.pods)
    offers = {kube_pods.name(node): _amount(node, resource) for node in it.snapshot.nodes}
    most = max(offers.values(), default=0.0)
    rule, asks = f"unschedulable-{_short(resource)}", f"asks for {amount_text(resource, wanted)} {_noun(resource)}"
    each = (f"{name} {amount_text(resource, amount)} {_noun(resource)}" for name, amount in offers.items())
    had = (f"nodes offer: {joined(each)}",)
    if not offers:
        remedy = f"{_smaller(resource)}, or ask the cluster's administrator which nodes offer it (you may not see them)"
        return Cause(rule, f"{it.whom} no node with room, or none at all: each {asks}", (), remedy)
    if most == 0:
        return Cause(rule, f"{it.whom} no node: none has any {resource}", had, _absent(it.snapshot, resource))
    if most < wanted:
        remedy = f"{_smaller(resource)} to less than {amount_text(resource, most)}, or add larger nodes"
        return Cause(rule, f"{it.whom} no node that is large enough: each {asks}", had, remedy)
    remedy = f"wait until others leave, add nodes, or {_smaller(resource)} or workers.replicas"
    return Cause(rule, f"{it.whom} no node with room: each {asks}, and others use it", had, remedy)


def _amount(node: Document, resource: str) -> float:
    return units.quantity(node["status"].get("allocatable", {}).get(resource, 0))


def _short(resource: str) -> str:
    if resource in ("cpu", "memory", "ephemeral-storage"):
        return resource
    return "gpu" if accelerators.known(resource) else "resource"


def _noun(resource: str) -> str:
    return "cores" if resource == "cpu" else resource


def _smaller(resource: str) -> str:
    field = {"cpu": "resources.cpu", "memory": "resources.memory"}.get(resource, "resources.gpu")
    return f"lower {field}" if _short(resource) != "resource" else f"lower what the template requests of {resource}"


def _absent(snapshot: Snapshot, resource: str) -> str:
    if not accelerators.known(resource):
        return f"add nodes that offer {resource}, or remove it from the template"
    resources = {each for node in snapshot.nodes for each in node["status"].get("allocatable", {}) if _amount(node, each)}
    others = sorted(filter(accelerators.known, resources))
    has = f"nodes have {joined(others)}: set resources.accelerator; or " if others else ""
    return f"{has}add nodes with such devices and their device plugin (which makes {resource} known), or set resources.gpu: 0"


def _selector(it: Blocked) -> Cause:
    pod = it.pods[0]["spec"]
    wanted = dict(pod.get("nodeSelector", {}))
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    lines = [f"{key}={value}: {_values(it.snapshot.nodes, key)}" for key, value in wanted.items()]
    for term in required.get("nodeSelectorTerms", []):
        for each in term.get("matchExpressions", []):
            values = " ".join([each["operator"], *each.get("values", [])])
            lines.append(f"{each['key']} {values}: {_values(it.snapshot.nodes, each['key'])}")
    where = "nodeSelector" if wanted and not required else "resources.instanceTypes or the template's affinity"
    return Cause(
        "unschedulable-selector",
        f"{it.whom} no node: none has the labels that it needs",
        tuple(lines) if "nodes" not in it.snapshot.unseen else tuple(f"{key}={value}" for key, value in wanted.items()),
        f"correct {where} to labels that nodes have (kubectl get nodes --show-labels), or label the nodes",
    )


def _values(nodes: Sequence[Document], key: str) -> str:
    """The values of a label on the nodes."""
    found = sorted({node["metadata"].get("labels", {}).get(key) for node in nodes} - {None})
    return f"nodes have {joined(found)}" if found else "no node has this label"


_TAINTS = {
    "node.kubernetes.io/not-ready": "the node is not ready; bring it back or replace it",
    "node.kubernetes.io/unreachable": "the node does not answer; bring it back or replace it",
    "node.kubernetes.io/unschedulable": "the node is cordoned; `kubectl uncordon` it when it may be used again",
    "node.kubernetes.io/disk-pressure": "the node's disk is nearly full; free it or replace the node",
    "node.kubernetes.io/memory-pressure": "the node's memory is nearly used up; wait or move something away",
    "node.kubernetes.io/pid-pressure": "the node has too many processes; move something away",
    "node.kubernetes.io/network-unavailable": "the node's network is not set up; look at the network plugin there",
    "node.cloudprovider.kubernetes.io/uninitialized": "the node is still being set up; wait",
}


def _taint(it: Blocked) -> Cause:
    key, value = it.said["key"], (it.said["value"] or "").strip()
    taint = f"{key}={value}" if value else key
    carrying = [
        kube_pods.name(node) for node in it.snapshot.nodes if any(t["key"] == key for t in node["spec"].get("taints", []))
    ]
    evidence = (f"tainted {taint}: {joined(carrying)}",) if carrying else ()
    several = "node" if it.count == 1 else "nodes"
    if key in _TAINTS:
        what = f"{it.whom} no node: {it.count} {several} cannot take any ({key})"
        return Cause("unschedulable-node", what, evidence, _TAINTS[key])
    operator = f'key: {key}, operator: Equal, value: "{value}"' if value else f"key: {key}, operator: Exists"
    return Cause(
        "unschedulable-taint",
        f"{it.whom} no node: {it.count} {several} {'is' if it.count == 1 else 'are'} kept for others by the taint {taint}",
        evidence,
        f"if the job may run there, add `tolerations: [{{{operator}}}]` to the job file; if not, add nodes without it",
    )


@dataclass(frozen=True)
class Rule:
    """A message of the scheduler, and the cause that it means."""

    says: str
    cause: Callable[[Blocked], Cause | None]
    """None when another module reports it better."""


def _plain(says: str, rule: str, what: str, remedy: str) -> Rule:
    return Rule(says, lambda it: Cause(rule, f"{it.whom} no node: {what.format(count=it.count)}", (), remedy))


RULES = (
    Rule(r"Insufficient (?P<resource>\S+)", _resource),
    Rule(r"didn't match Pod's node affinity/selector|didn't match node selector", _selector),
    Rule(r"had (?:untolerated )?taints?(?:\(s\))? \{(?P<key>[^:}]+):? ?(?P<value>[^}]*)\}", _taint),
    _plain(
        r"didn't match pod anti-affinity rules|existing pods anti-affinity",
        "unschedulable-affinity",
        "it may not be where another pod of its kind is, and all nodes have one",
        "add nodes, lower workers.replicas, or make the anti-affinity of the template preferred instead of required",
    ),
    _plain(
        r"didn't match pod affinity rules",
        "unschedulable-affinity",
        "it may only be where certain pods are, and there are none with room",
        "correct podAffinity in the template, or make it preferred instead of required",
    ),
    _plain(
        r"topology spread constraints",
        "unschedulable-spread",
        "it would make the spread of pods over zones or nodes too uneven",
        "add nodes where there are few, or use whenUnsatisfiable: ScheduleAnyway in the template",
    ),
    _plain(
        r"were unschedulable",
        "unschedulable-node",
        "{count} are cordoned",
        "`kubectl uncordon` the nodes when they may be used again",
    ),
    _plain(r"were not ready|were unreachable", "unschedulable-node", "{count} are lost", "bring the nodes back or replace them"),
    _plain(
        r"Too many pods",
        "unschedulable-pods",
        "{count} run as many pods as they may",
        "add nodes, or remove pods that are no longer needed",
    ),
    _plain(
        r"free ports",
        "unschedulable-port",
        "the port of the machine that it asks for is taken",
        "remove hostPort or hostNetwork from the template",
    ),
    _plain(
        r"no nodes available to schedule pods",
        "unschedulable-node",
        "the cluster has none",
        "add nodes, or wait for the autoscaler",
    ),
    Rule(r"[Pp]ersistent[Vv]olume|volume node affinity|max volume count|storage|pod group|PodGroup|[Gg]ang", lambda _: None),
)
