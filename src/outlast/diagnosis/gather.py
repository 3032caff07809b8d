"""Reads the documents of a `Snapshot` from a cluster: each kind that we may read, once.

A list that is forbidden, or of a kind that is not installed, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outlast import kube
from outlast.contract import Label
from outlast.diagnosis.snapshot import Snapshot
from outlast.errors import Absent, Forbidden, NotFound, NotServed, Refused, Unanswered
from outlast.kube import dropins, kinds
from outlast.kube import pods as kube_pods
from outlast.kube.kinds import Kind
from outlast.kube.ownership import owned_by
from outlast.manifests.request import Document

_LINES = 40
"""Lines that are read of each log."""
_LOGS = 6
"""Most logs that are read; those of failed pods come first, newest first."""
_WORKLOADS = (kinds.ELASTIC_JOB, *dropins.KINDS, kinds.JOB, kinds.STATEFUL_SET)


def job(cluster: kube.Cluster, name: str, *, namespace: str | None = None) -> Snapshot:
    """The snapshot of a job. Raises NotFound when there is nothing of it, ClusterError when the cluster cannot be asked."""
    where = namespace or cluster.namespace
    unseen: dict[str, str] = {}
    listed = _reader(cluster, where, unseen)
    selector = f"{Label.JOB}={name}"
    workload = _newest(found for kind in _WORKLOADS for found in _workloads(listed, kind, name, selector))
    pods = tuple(_of(workload, listed(kinds.POD, selector)))
    if not workload and not pods:
        if not cluster.has_namespace(where):
            raise NotFound(f"there is no namespace {where}; correct --namespace (kubectl get namespaces)")
        if kinds.POD.resource in unseen:
            raise Forbidden(unseen[kinds.POD.resource])
        raise NotFound(f"there is no job {name} in namespace {where}; `outlast list` shows those there are")
    # A list of Secrets contains their data: it is read only while pods wait for some.
    waiting = any(kube_pods.phase(pod) == "Pending" and pod["spec"].get("nodeName") for pod in pods)
    queue = workload.get("metadata", {}).get("labels", {}).get("kueue.x-k8s.io/queue-name")
    return Snapshot(
        name=name,
        namespace=where,
        workload=workload,
        pods=pods,
        events=tuple(listed(kinds.EVENT)),
        nodes=tuple(listed(kinds.NODE)),
        claims=tuple(listed(kinds.CLAIM)),
        classes=tuple(listed(kinds.STORAGE_CLASS)),
        quotas=tuple(listed(kinds.QUOTA)),
        limits=tuple(listed(kinds.LIMIT_RANGE)),
        queued=tuple(each for each in listed(kinds.WORKLOAD) if owned_by(each, workload)),
        queues=tuple(listed(kinds.LOCAL_QUEUE)) if queue else (),
        groups=tuple(_groups(listed, name, workload)),
        secrets=_theirs(listed(kinds.SECRET)) if waiting else frozenset(),
        configs=_theirs(listed(kinds.CONFIG_MAP)),
        logs=_logs(cluster, where, pods),
        unseen=unseen,
    )


def _theirs(documents: Iterable[Document]) -> frozenset[str]:
    """The names of those that users have made, and not Outlast."""
    ours = "app.kubernetes.io/managed-by", "outlast"
    return frozenset(kube_pods.name(each) for each in documents if ours not in (each["metadata"].get("labels") or {}).items())


def workload(cluster: kube.Cluster, name: str, namespace: str, *, labels: str, kind: Kind) -> Snapshot:
    """The snapshot of a workload that is no job, of this kind and name, and of the pods with these labels."""
    unseen: dict[str, str] = {}
    listed = _reader(cluster, namespace, unseen)
    pods = tuple(listed(kinds.POD, labels))
    workload = next((each for each in listed(kind) if kube_pods.name(each) == name), {})
    return Snapshot(
        name=name,
        namespace=namespace,
        workload=workload,
        pods=pods,
        events=tuple(listed(kinds.EVENT)),
        nodes=tuple(listed(kinds.NODE)),
        claims=tuple(listed(kinds.CLAIM)),
        classes=tuple(listed(kinds.STORAGE_CLASS)),
        logs=_logs(cluster, namespace, pods),
        unseen=unseen,
    )


_Listed = Callable[..., list[Document]]


def _reader(cluster: kube.Cluster, namespace: str, unseen: dict[str, str]) -> _Listed:
    """A function that lists a kind: empty if it is not installed, or forbidden, which is noted in `unseen`."""

    def listed(kind: Kind, labels: str = "") -> list[Document]:
        try:
            return cluster.list_(kind, namespace=namespace, labels=labels)
        except (NotServed, Absent):
            return []
        except Forbidden as error:
            # rights are asked for before the kind: to one that the cluster lacks, too
            if kind.group not in kinds.INSTALLED_BY or cluster.serves(kind):
                unseen[kind.resource] = str(error)
            return []

    return listed


def _workloads(listed: _Listed, kind: Kind, name: str, selector: str) -> list[Document]:
    """The workloads of a job: an ElasticJob has its name, the others carry its label."""
    if kind in (kinds.ELASTIC_JOB, *dropins.KINDS):
        return [found for found in listed(kind) if kube_pods.name(found) == name]
    return listed(kind, selector)


def _newest(found: Iterable[Document]) -> Document:
    """The newest workload; an ElasticJob before what its operator has created."""
    order = sorted(found, key=lambda each: (each.get("kind") == kinds.ELASTIC_JOB.kind, each["metadata"]["creationTimestamp"]))
    return order[-1] if order else {}


def _of(workload: Document, pods: list[Document]) -> list[Document]:
    """The pods of this run, without those of an earlier one."""
    run = workload.get("metadata", {}).get("labels", {}).get(Label.RUN)
    return [pod for pod in pods if not run or pod["metadata"]["labels"].get(Label.RUN, run) == run]


def _groups(listed: _Listed, name: str, workload: Document) -> list[Document]:
    found = [*listed(kinds.POD_GROUP), *listed(kinds.VOLCANO_GROUP)]
    labelled = [each for each in found if each["metadata"].get("labels", {}).get(Label.JOB) == name]
    return labelled + [each for each in found if owned_by(each, workload) and each not in labelled]


def _logs(cluster: kube.Cluster, namespace: str, pods: tuple[Document, ...]) -> dict[str, list[str]]:
    """The last lines of pods whose worker runs or has ended, failed ones first."""

    def order(pod: Document) -> tuple[bool, str]:
        return bool((kube_pods.termination(pod) or {}).get("exitCode")), str(pod["metadata"].get("creationTimestamp", ""))

    found: dict[str, list[str]] = {}
    for pod in sorted((pod for pod in pods if kube_pods.termination(pod) or kube_pods.any_running(pod)), key=order, reverse=True)[
        :_LOGS
    ]:
        again = any((each.get("lastState") or {}).get("terminated") for each in kube_pods.statuses(pod))
        name = kube_pods.name(pod)
        options = kube.LogOptions(container=kube_pods.container_name(pod), tail=_LINES, previous=again)
        try:
            found[name] = list(cluster.logs(name, options, namespace=namespace))
        except (Absent, Forbidden, Refused, Unanswered) as error:
            found[name] = [f"(the log cannot be read: {error})"]
    return found
