"""Reads the documents of a `Snapshot` from a cluster, with one list for each kind that we may read.

A list that is forbidden, or whose kind is not installed, is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from outlast.base.errors import Absent, ClusterError, Forbidden, NotFound, NotServed, Refused, Unanswered
from outlast.job.contract import OPERATOR, OPERATOR_NAMESPACE, Label
from outlast.kubernetes import api
from outlast.kubernetes.api import dropins, kinds, pod_status
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.api.owner_references import owned_by
from outlast.kubernetes.diagnosis import sample_pod
from outlast.kubernetes.diagnosis.evidence import Right, Snapshot
from outlast.kubernetes.manifests.render_request import Document

_LINES = 40
"""Number of lines to read from the end of each log."""
_LOGS = 6
"""Maximum number of logs to read. Logs of failed pods come first, and newer logs before older ones."""
_NAMED = (kinds.ELASTIC_JOB, *dropins.KINDS)
"""Kinds of workloads that have the name of their job; other workloads carry the job's label."""

RIGHTS = (
    *(Right(verb, kinds.JOB) for verb in ("create", "list", "delete", "patch")),
    *(Right(verb, kind) for kind in (kinds.CONFIG_MAP, kinds.SERVICE) for verb in ("create", "patch")),
    Right("list", kinds.POD),
    Right("watch", kinds.POD),
    Right("get", kinds.POD, "log"),
    Right("create", kinds.POD, "exec", needed=False),
    *(Right(verb, kinds.SECRET, needed=False) for verb in ("get", "create", "patch")),  # the key of workers at worker 0
    *(Right("list", kind, needed=False) for kind in (kinds.EVENT, kinds.CLAIM, kinds.QUOTA, kinds.NODE, kinds.STORAGE_CLASS)),
)
"""Requests that our commands send in a namespace, as rights."""
_ELASTIC = tuple(Right(verb, kinds.ELASTIC_JOB) for verb in ("create", "list", "patch", "delete"))
_OPTIONAL = (kinds.ELASTIC_JOB, kinds.POD_METRICS, kinds.LOCAL_QUEUE, kinds.VOLCANO_GROUP, kinds.POD_GROUP)


class _Reader:
    """Lists kinds in one namespace, and records in `unseen` the kinds that are forbidden."""

    def __init__(self, cluster: api.Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.unseen: dict[str, str] = {}

    def __call__(self, kind: Kind, labels: str = "") -> tuple[Document, ...]:
        """The documents of a kind; none if the kind is forbidden or not installed."""
        try:
            return tuple(self.cluster.list_(kind, namespace=self.namespace, labels=labels))
        except (NotServed, Absent):
            return ()
        except Forbidden as error:
            # The server checks rights before the kind: it also forbids kinds that the cluster lacks.
            if kind.group not in kinds.INSTALLED_BY or self.cluster.serves(kind):
                self.unseen[kind.resource] = str(error)
            return ()

    def one(self, kind: Kind, name: str, namespace: str | None = None) -> Document | None:
        """One document; None if it is absent or forbidden."""
        try:
            return self.cluster.find(kind, name, namespace=namespace)
        except NotServed:
            return None
        except Forbidden as error:
            self.unseen[kind.resource] = str(error)
            return None


# For a job


def job(cluster: api.Cluster, name: str) -> Snapshot:
    """The snapshot of a job. Raises NotFound if nothing of the job exists, and ClusterError if the cluster cannot be queried."""
    where, selector = cluster.namespace, f"{Label.JOB}={name}"
    read = _Reader(cluster, where)
    found = [each for kind in _NAMED for each in read(kind) if pod_status.name(each) == name]
    found += [each for kind in (kinds.JOB, kinds.STATEFUL_SET) for each in read(kind, selector)]
    # The newest is used, but an ElasticJob comes before objects that its operator has created.
    found.sort(key=lambda each: (each.get("kind") == kinds.ELASTIC_JOB.kind, each["metadata"]["creationTimestamp"]))
    workload = found[-1] if found else {}
    run = workload.get("metadata", {}).get("labels", {}).get(Label.RUN)
    pods = [pod for pod in read(kinds.POD, selector) if not run or pod["metadata"]["labels"].get(Label.RUN, run) == run]
    if not workload and not pods:
        if not cluster.has_namespace(where):
            raise NotFound(f"there is no namespace {where}; correct --namespace (kubectl get namespaces)")
        if kinds.POD.resource in read.unseen:
            raise Forbidden(read.unseen[kinds.POD.resource])
        raise NotFound(f"there is no job {name} in namespace {where}; `outlast list` shows those there are")
    return _snapshot(read, name, workload, pods)


def workload(cluster: api.Cluster, name: str, namespace: str, *, labels: str, kind: Kind) -> Snapshot:
    """The snapshot of a workload that is not a job: the workload of this kind and name, and the pods with these labels."""
    read = _Reader(cluster, namespace)
    found = next((each for each in read(kind) if pod_status.name(each) == name), {})
    return _snapshot(read, name, found, read(kinds.POD, labels))


def _snapshot(read: _Reader, name: str, workload: Document, pods: Iterable[Document]) -> Snapshot:
    """The snapshot of a workload and its pods, with the objects that may keep the pods from running."""
    pods = tuple(pods)
    groups = [*read(kinds.POD_GROUP), *read(kinds.VOLCANO_GROUP)]
    # A list of Secrets contains their data, so it is read only while a pod that has a node waits, possibly for a Secret.
    waiting = any(pod_status.phase(pod) == "Pending" and pod["spec"].get("nodeName") for pod in pods)
    queue = workload.get("metadata", {}).get("labels", {}).get("kueue.x-k8s.io/queue-name")
    found = Snapshot(
        name=name,
        namespace=read.namespace,
        workload=workload,
        pods=pods,
        events=read(kinds.EVENT),
        nodes=read(kinds.NODE),
        claims=read(kinds.CLAIM),
        classes=read(kinds.STORAGE_CLASS),
        queued=tuple(each for each in read(kinds.WORKLOAD) if owned_by(each, workload)),
        queues=read(kinds.LOCAL_QUEUE) if queue else (),
        groups=tuple(each for each in groups if _labels(each).get(Label.JOB) == name or owned_by(each, workload)),
        secrets=_made_by_users(read(kinds.SECRET)) if waiting else frozenset(),
        configs=_made_by_users(read(kinds.CONFIG_MAP)),
        logs=_logs(read.cluster, read.namespace, pods),
        unseen=read.unseen,
    )
    return replace(found, served=frozenset({kinds.ELASTIC_JOB}), operator=_operator(read)) if found.untaken() else found


def _labels(document: Document) -> Mapping[str, Any]:
    return document["metadata"].get("labels") or {}


def _made_by_users(documents: Iterable[Document]) -> frozenset[str]:
    """Names of objects that were made by users rather than by Outlast."""
    return frozenset(
        pod_status.name(each) for each in documents if _labels(each).get("app.kubernetes.io/managed-by") != "outlast"
    )


def _logs(cluster: api.Cluster, namespace: str, pods: Iterable[Document]) -> dict[str, list[str]]:
    """The last lines of the logs of pods whose worker runs or has ended, failed pods first."""

    def order(pod: Document) -> tuple[bool, str]:
        return bool((pod_status.termination(pod) or {}).get("exitCode")), str(pod["metadata"].get("creationTimestamp", ""))

    found: dict[str, list[str]] = {}
    begun = [pod for pod in pods if pod_status.termination(pod) or pod_status.any_running(pod)]
    for pod in sorted(begun, key=order, reverse=True)[:_LOGS]:
        again = any((each.get("lastState") or {}).get("terminated") for each in pod_status.statuses(pod))
        name = pod_status.name(pod)
        options = api.LogOptions(container=pod_status.container_name(pod), tail=_LINES, previous=again)
        try:
            found[name] = list(cluster.logs(name, options, namespace=namespace))
        except (Absent, Forbidden, Refused, Unanswered) as error:
            found[name] = [f"(the log cannot be read: {error})"]
    return found


# For a place for jobs


def place(cluster: api.Cluster) -> Snapshot:
    """The snapshot of the cluster's namespace; nothing is changed. Raises Unanswered or Unauthorized if the cluster cannot be
    queried."""
    read = _Reader(cluster, cluster.namespace)
    served = frozenset(kind for kind in _OPTIONAL if cluster.serves(kind))
    rights = (*RIGHTS, *(_ELASTIC if kinds.ELASTIC_JOB in served else ()))
    return Snapshot(
        namespace=cluster.namespace,
        version=cluster.version(),
        home=read.one(kinds.NAMESPACE, cluster.namespace),
        served=served,
        lacking=tuple(each for each in rights if not cluster.may(each.verb, each.kind, subresource=each.subresource)),
        operator=_operator(read),
        rivals=tuple(rivals(cluster)),
        nodes=read(kinds.NODE),
        classes=read(kinds.STORAGE_CLASS),
        quotas=read(kinds.QUOTA),
        trial=_trial(cluster),
        unseen=read.unseen,
    )


def holder(binding: Document) -> str:
    """The namespace of the operator to which a binding gives rights; empty if there is none."""
    accounts = [each for each in binding.get("subjects") or () if each.get("name") == OPERATOR]
    return str(accounts[0].get("namespace", "")) if accounts else ""


def _operator(read: _Reader) -> Document | None:
    """The operator's Deployment: in the namespace of its binding, else in any namespace, as far as we may read Deployments."""
    where = holder(read.one(kinds.CLUSTER_ROLE_BINDING, OPERATOR) or {})
    named = [each for each in _deployments(read.cluster) if pod_status.name(each) == OPERATOR] if not where else []
    return named[0] if named else read.one(kinds.DEPLOYMENT, OPERATOR, where or OPERATOR_NAMESPACE)


def rivals(cluster: api.Cluster) -> list[str]:
    """Running Deployments of controllers that the operator replaces, as `namespace/name`, as far as we may read Deployments."""
    running = [each for each in _deployments(cluster) if each["spec"].get("replicas", 1)]
    theirs = [each["metadata"] for each in running if any(one.functions.is_replaced_controller(each) for one in dropins.DROP_INS)]
    return [f"{meta['namespace']}/{meta['name']}" for meta in theirs]


def _deployments(cluster: api.Cluster) -> list[Document]:
    """All Deployments in the cluster; if we may not list them, the Deployments with the rivals' usual names."""
    with contextlib.suppress(Forbidden):
        return cluster.list_(kinds.DEPLOYMENT, everywhere=True)
    found = []
    for namespace, name in (each.replaced_deployment.split("/") for each in dropins.DROP_INS):
        with contextlib.suppress(Absent, Forbidden):
            found.append(cluster.get(kinds.DEPLOYMENT, name, namespace=namespace))
    return found


def _trial(cluster: api.Cluster) -> ClusterError | None:
    """The API server's refusal of a small worker, for quotas, LimitRanges, Pod Security, policies or webhooks; None if it admits
    the worker."""
    try:
        cluster.apply(sample_pod.worker(namespace=cluster.namespace), dry_run=True)
    except (Absent, Forbidden, Refused) as error:
        return error
    return None
