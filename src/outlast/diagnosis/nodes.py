"""Nodes: which take workers and what they offer; workers that lost theirs, which is lost, drained or full."""

from __future__ import annotations

from collections.abc import Iterator

from outlast import accelerators, units
from outlast.diagnosis import messages
from outlast.diagnosis.finding import Finding, grouped, joined, workers
from outlast.diagnosis.snapshot import Snapshot
from outlast.kube import pods as kube_pods
from outlast.manifests import scheduling
from outlast.manifests.request import Document

TOLERATED = scheduling.tolerated(accelerators.RESOURCES.values())
"""Taints that workers tolerate by default: those of the accelerators that they ask for."""
_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.cloudprovider.kubernetes.io/shutdown")


def offered(node: Document) -> dict[str, float]:
    """How much of each resource a node has for pods."""
    return {name: units.quantity(amount) for name, amount in node["status"].get("allocatable", {}).items()}


def usable(node: Document) -> bool:
    """Whether workers may be put there: ready, not cordoned, no taint that keeps them off."""
    taints = [taint for taint in node["spec"].get("taints", []) if taint.get("effect") != "PreferNoSchedule"]
    ready = bool(kube_pods.condition(node, "Ready")) and not node["spec"].get("unschedulable")
    return ready and all(any(_covers(each, taint) for each in TOLERATED) for taint in taints)


def _covers(toleration: Document, taint: Document) -> bool:
    """Whether one of ours, which ask for no value, is of this taint."""
    return bool(toleration["key"] == taint["key"] and toleration.get("effect") in (None, taint.get("effect")))


def lost(snapshot: Snapshot, now: float) -> Iterator[Finding]:
    """Nodes that do not answer, or are gone, with pods that have not ended."""
    nodes = {kube_pods.name(node): node for node in snapshot.nodes}
    alive = [pod for pod in snapshot.pods if not kube_pods.over(pod) and pod["spec"].get("nodeName")]
    for where, group in grouped((pod["spec"]["nodeName"], pod) for pod in alive).items():
        node, unseen = nodes.get(where), "nodes" in snapshot.unseen
        pods = [pod for pod in group if kube_pods.unreachable(pod)] if unseen else group
        if not pods:
            continue
        whom = f"{workers(pods, 'is')} on node {where}"
        if unseen:
            yield Finding("node-lost", f"{whom}, which does not answer", _back(pods))
            continue
        if node is None:
            names = " ".join(map(kube_pods.name, pods))
            remedy = f"kubectl delete pod {names} --force -n {snapshot.namespace}: then they are replaced"
            yield Finding("node-lost", f"{whom}, which no longer exists", remedy)
            continue
        ready = next(kube_pods.conditions(node, "Ready"), {})
        if ready.get("status") == "True":
            continue
        since = kube_pods.seconds(ready.get("lastTransitionTime"))
        ago = f" for {now - since:.0f} s" if since else ""
        answers = "does not answer" if ready.get("status") == "Unknown" else "is not ready"
        taints = [taint["key"] for taint in node["spec"].get("taints", []) if taint["key"] in _LOST]
        evidence = f"Ready is {ready.get('status')}: {ready.get('reason', '')}: {ready.get('message', '')}"
        what = f"{whom}, which {answers}{ago}"
        yield Finding("node-lost", what, _back(pods), (evidence, *dict.fromkeys(f"taint {key}" for key in taints)))


def _back(pods: list[Document]) -> str:
    """The remedy for pods on lost nodes: controllers create no second pod of a worker that may still run."""
    nodes = " ".join(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
    return (
        f"bring the node back, or, when it is gone for good, kubectl delete node {nodes}, or kubectl delete pod --force "
        f"{' '.join(map(kube_pods.name, pods))}; until then nothing replaces a pod that may still run there"
    )


def taken(snapshot: Snapshot, _: float) -> Iterator[Finding]:
    """Pods that were evicted, preempted or drained, and have not been replaced."""
    found: list[tuple[str, Document]] = []
    for pod in snapshot.pods:
        if any(kube_pods.born(other) > kube_pods.born(pod) for other in snapshot.of_worker(pod)):
            continue
        reason = pod["status"].get("reason") or ""
        if target := kube_pods.disruption(pod):
            found.append((target.get("reason", ""), pod))
        elif reason in ("Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated", "NodeLost"):
            found.append((reason, pod))
    for reason, pods in grouped(found).items():
        message = pods[0]["status"].get("message") or (kube_pods.disruption(pods[0]) or {}).get("message", "")
        said = f"{reason}: {message}"
        where = joined(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
        yield messages.meaning("taken", said, (said,), whom=workers(pods, "was"), where=where, back=_back(pods))
