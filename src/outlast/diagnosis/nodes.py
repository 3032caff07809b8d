"""Workers that lost their node: it is lost, drained or full, or they were preempted."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.diagnosis.cause import Cause, grouped, joined, verb, workers_text
from outlast.diagnosis.snapshot import Snapshot
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document

_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", "node.cloudprovider.kubernetes.io/shutdown")


def lost(snapshot: Snapshot, now: float) -> Iterator[Cause]:
    """Nodes that do not answer, or are gone, with pods that have not ended."""
    nodes = {kube_pods.name(node): node for node in snapshot.nodes}
    alive = [pod for pod in snapshot.pods if kube_pods.phase(pod) not in ("Succeeded", "Failed") and pod["spec"].get("nodeName")]
    for where, group in grouped((pod["spec"]["nodeName"], pod) for pod in alive).items():
        node, unseen = nodes.get(where), "nodes" in snapshot.unseen
        pods = [pod for pod in group if kube_pods.unreachable(pod)] if unseen else group
        if not pods:
            continue
        whom = f"{workers_text(pods)} {verb(pods, 'is', 'are')} on node {where}"
        if unseen:
            yield Cause("node-lost", f"{whom}, which does not answer", (), _back(pods))
            continue
        if node is None:
            names = " ".join(map(kube_pods.name, pods))
            remedy = f"kubectl delete pod {names} --force -n {snapshot.namespace}: then they are replaced"
            yield Cause("node-lost", f"{whom}, which no longer exists", (), remedy)
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
        yield Cause("node-lost", what, (evidence, *dict.fromkeys(f"taint {key}" for key in taints)), _back(pods))


def _back(pods: list[Document]) -> str:
    """The remedy for pods on lost nodes: controllers create no second pod of a worker that may still run."""
    nodes = " ".join(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
    return (
        f"bring the node back, or, when it is gone for good, kubectl delete node {nodes}, or kubectl delete pod --force "
        f"{' '.join(map(kube_pods.name, pods))}; until then nothing replaces a pod that may still run there"
    )


def taken(snapshot: Snapshot, _: float) -> Iterator[Cause]:
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
        yield _taken(reason, pods, str(message))


def _taken(reason: str, pods: list[Document], message: str) -> Cause:
    whom = f"{workers_text(pods)} {verb(pods, 'was', 'were')}"
    where = joined(sorted({str(pod["spec"].get("nodeName", "")) for pod in pods}))
    evidence = (f"{reason}: {message}",)
    if reason in ("PreemptionByScheduler", "Preempting"):
        remedy = "give the job a higher scheduling.priorityClassName, or wait: it continues when there is room"
        return Cause("preempted", f"{whom} preempted by a pod of higher priority on {where}", evidence, remedy)
    if reason == "EvictionByEvictionAPI":
        remedy = "nothing needs to be done if it continues elsewhere; else uncordon the node or add another"
        return Cause("drained", f"{whom} asked to leave {where}, by a drain or an autoscaler", evidence, remedy)
    if reason in ("DeletionByTaintManager", "NodeLost"):
        return Cause("node-lost", f"{whom} taken away because node {where} was lost", evidence, _back(pods))
    if reason == "DeletionByPodGC":
        what = f"{whom} taken away because node {where} no longer exists"
        return Cause("node-lost", what, evidence, "wait until it is replaced")
    if "ephemeral" in message or "emptyDir" in message or "disk" in message.lower():
        remedy = "write less to /tmp, /out and caches, raise the volume's sizeLimit in the template, or put them on a claim"
        return Cause("evicted", f"{whom} evicted from {where}: too much was written to the node's disk", evidence, remedy)
    if "memory" in message.lower():
        remedy = "set resources.memory to what the training needs, so that the node is not overfilled"
        return Cause("evicted", f"{whom} evicted from {where}, whose memory was used up", evidence, remedy)
    if "hutdown" in reason or "hutdown" in message:
        remedy = "it continues when there is another node"
        return Cause("drained", f"{whom} ended because {where} was shut down", evidence, remedy)
    return Cause("evicted", f"{whom} evicted from {where}", evidence, "see what the node says (kubectl describe node)")
