"""Rules about nodes: which nodes accept workers, why pods find no node, and which workers have lost their node.

The scheduler's message has the form `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {key: value}.
preemption: ...` (kubernetes/pkg/scheduler/framework/types.go, FitError). The parts about resources, labels and taints are
compared with the nodes, and `messages` explains the other parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from outlast.base import units
from outlast.job import accelerators
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, per_pod
from outlast.kubernetes.diagnosis.finding import Finding, amount_text, grouped, joined, workers
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import placement

TOLERATED = placement.tolerations(accelerators.RESOURCES.values())
"""Workers' default tolerations for spot nodes and for nodes with accelerators."""


def offered(node: Document) -> dict[str, float]:
    """Return the amount of each resource that a node offers to pods."""
    return {name: units.quantity(amount) for name, amount in node["status"].get("allocatable", {}).items()}


def usable(node: Document) -> bool:
    """Return whether workers may be scheduled on the node: it is ready and not cordoned, and all its taints are tolerated."""
    taints = [taint for taint in node["spec"].get("taints", []) if taint.get("effect") != "PreferNoSchedule"]
    ready = bool(pod_status.condition(node, "Ready")) and not node["spec"].get("unschedulable")
    return ready and all(any(_covers(each, taint) for each in TOLERATED) for taint in taints)


def _covers(toleration: Document, taint: Document) -> bool:
    return bool(toleration["key"] == taint["key"] and toleration.get("effect") in (None, taint.get("effect")))


# Pods that find no node

_HEAD = re.compile(r"\s*\d+/(\d+) nodes are available: ")
_PART = re.compile(r"(\d+) (.*)")
_OF_OTHERS = re.compile(r"[Pp]ersistent[Vv]olume|storage|pod group|PodGroup|[Gg]ang")
"""Matches messages about claims and gangs, which other rules report."""


def parts(message: str) -> list[tuple[int, str]]:
    """Return the parts of a scheduler's message, each with the number of nodes that it is about, or 0 if it is about the pod. For
    example, `0/3 nodes are available: 1 Insufficient cpu, 2 Too many pods.` gives (1, Insufficient cpu) and (2, Too many
    pods)."""
    head = _HEAD.match(message)
    if not head:
        return [(0, message.strip())]
    rest = re.split(r"\. (?:no new claims|preemption:|not found)|,? preemption: ", message[head.end() :])[0]
    rest = rest.rstrip(". ")
    result = []
    for text in re.split(r", (?=\d+ )", rest):
        numbered = _PART.fullmatch(text)
        result.append((int(numbered[1]), numbered[2]) if numbered else (0, text))
    return result


@per_pod
def unschedulable(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find pods that fit on no node."""
    if pod_status.phase(pod) != "Pending" or pod["spec"].get("nodeName"):
        return
    events = snapshot.events_about(pod, "FailedScheduling", "Unschedulable")
    condition = pod_status.condition(pod, "PodScheduled", "False") or {}
    reported = condition.get("message") if condition.get("reason") != "SchedulingGated" else ""
    message = str(reported or (events[-1].get("message", "") if events else "")).strip()
    for count, text in parts(message) if message else ():
        if found := _part_meaning(snapshot, pod, count, text):
            yield replace(found, evidence=(*found.evidence, f"FailedScheduling: {message}"))


def _part_meaning(snapshot: Snapshot, pod: Document, count: int, text: str) -> Finding | None:
    """Return the finding for one part of a scheduler's message, or None if another rule reports that part."""
    if match := re.search(r"Insufficient (\S+)", text):
        return _resource(snapshot, pod, match[1])
    if re.search(r"didn't match Pod's node affinity/selector|didn't match node selector", text):
        return _selector(snapshot, pod)
    if match := re.search(r"had (?:untolerated )?taints?(?:\(s\))? \{(?P<key>[^:}]+):? ?(?P<value>[^}]*)\}", text):
        return _taint(snapshot, count, match["key"], match["value"].strip())
    if _OF_OTHERS.search(text) and not messages.has_meaning("scheduler", text):
        return None
    return messages.meaning("scheduler", text, count=count, number=f"{count} " if count else "")


def _resource(snapshot: Snapshot, pod: Document, resource: str) -> Finding:
    requested = pod_status.requested(pod, resource)
    offers = {pod_status.name(node): offered(node).get(resource, 0.0) for node in snapshot.nodes}
    largest = max(offers.values(), default=0.0)
    accelerator, noun = accelerators.is_accelerator(resource), "cores" if resource == "cpu" else resource
    kind = resource if resource in ("cpu", "memory", "ephemeral-storage") else "gpu" if accelerator else "resource"
    amounts = joined(f"{node} {amount_text(resource, amount)} {noun}" for node, amount in offers.items())
    situation = "unseen" if not offers else "none" if not largest else "small" if largest < requested else "full"
    return messages.meaning(
        "resources",
        f"{situation} {kind}",
        (f"nodes offer: {amounts}",) if offers else (),
        kind=kind,
        resource=resource,
        request=f"{amount_text(resource, requested)} {noun}",
        largest=amount_text(resource, largest),
        field=f"resources.{kind}" if kind in ("cpu", "memory", "gpu") else f"what the template requests of {resource}",
    )


def _selector(snapshot: Snapshot, pod: Document) -> Finding:
    selector = pod["spec"].get("nodeSelector", {})
    required = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    requirements = [(f"{key}={value}", key) for key, value in selector.items()]
    for term in required.get("nodeSelectorTerms", []):
        for each in term.get("matchExpressions", []):
            requirements.append((" ".join([each["key"], each["operator"], *each.get("values", [])]), each["key"]))
    return Finding(
        "unschedulable-selector",
        "finds no node: none has the labels that it needs",
        "correct nodeSelector, resources.instanceTypes or the affinity to labels that nodes have, or label the nodes",
        tuple(f"{requirement}{_values(snapshot, key)}" for requirement, key in requirements),
    )


def _values(snapshot: Snapshot, key: str) -> str:
    if "nodes" in snapshot.forbidden:
        return ""
    values = sorted({node["metadata"].get("labels", {}).get(key) for node in snapshot.nodes} - {None})
    return f": nodes have {joined(values)}" if values else ": no node has this label"


def _taint(snapshot: Snapshot, count: int, key: str, value: str) -> Finding:
    taint = f"{key}={value}" if value else key
    tainted = [pod_status.name(node) for node in snapshot.nodes if any(t["key"] == key for t in node["spec"].get("taints", []))]
    evidence = (f"tainted {taint}: {joined(tainted)}",) if tainted else ()
    subject = "1 node" if count == 1 else f"{count} nodes"
    if remedy_ := messages.tables()["taints"].get(key):
        return Finding("unschedulable-node", f"finds no node: {subject} cannot take any ({key})", remedy_, evidence)
    what = f"finds no node: {subject} {'is' if count == 1 else 'are'} kept for others by the taint {taint}"
    toleration = f"`tolerations: [{{key: {key}, operator: Exists}}]`"
    remedy = f"if the job may run there, add {toleration} to the job file; if not, add nodes without it"
    return Finding("unschedulable-taint", what, remedy, evidence)


# Lost nodes and removed pods


def lost_pods(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Find unfinished pods on nodes that are missing or unreachable."""
    nodes, unseen = {pod_status.name(node): node for node in snapshot.nodes}, "nodes" in snapshot.forbidden
    alive = [pod for pod in snapshot.pods if not pod_status.finished(pod) and pod["spec"].get("nodeName")]
    for name, pods in grouped(
        (pod["spec"]["nodeName"], pod) for pod in alive if not unseen or pod_status.unreachable(pod)
    ).items():
        ready = next(pod_status.conditions(nodes.get(name, {}), "Ready"), {})
        if ready.get("status") == "True":
            continue
        since = pod_status.timestamp(ready.get("lastTransitionTime"))
        ago = f" for {now - since:.0f} s" if since else ""
        answers = "is not ready" if ready.get("status") == "False" else "does not answer"
        problem = f"{answers}{ago}" if unseen or name in nodes else "no longer exists"
        evidence = f"Ready is {ready.get('status')}: {ready.get('reason', '')}: {ready.get('message', '')}"
        what = f"{workers(pods, 'is')} on node {name}, which {problem}"
        remedy = _restore_remedy(snapshot, pods, gone=not unseen and name not in nodes)
        yield Finding("node-lost", what, remedy, (evidence,) if ready else ())


def _restore_remedy(snapshot: Snapshot, pods: list[Document], *, gone: bool = False) -> str:
    """Return the remedy for pods on lost nodes, or on nodes that are `gone`. The user must act, because controllers do not
    replace a pod that may still run."""
    delete = f"kubectl delete pod --force -n {snapshot.namespace} {' '.join(map(pod_status.name, pods))}"
    if gone:
        return f"{delete}, and they are replaced"
    nodes = " ".join(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
    until = "until then nothing replaces a pod that may still run there"
    return f"bring the node back, or, when it is gone for good, kubectl delete node {nodes}, or {delete}; {until}"


def removed_pods(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Find pods that were evicted, preempted or drained and have not been replaced."""
    removed: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        if any(pod_status.created_at(other) > pod_status.created_at(pod) for other in snapshot.pods_of_worker(pod)):
            continue
        reason = pod["status"].get("reason") or ""
        if target := pod_status.disruption(pod):
            removed.append((target.get("reason", ""), pod))
        elif reason in ("Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated", "NodeLost"):
            removed.append((reason, pod))
    for reason, pods in grouped(removed).items():
        message = pods[0]["status"].get("message") or (pod_status.disruption(pods[0]) or {}).get("message", "")
        message_ = f"{reason}: {message}"
        names = joined(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
        restore = _restore_remedy(snapshot, pods)
        yield messages.meaning("taken", message_, (message_,), pods=workers(pods, "was"), node=names, restore=restore)
