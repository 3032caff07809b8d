"""Reads the objects of a `Snapshot` from a cluster. Objects of kinds that are forbidden or not installed are left out."""

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

_LOG_LINES = 40
_MAX_LOGS = 6
"""Maximum number of logs to read. The logs of failed pods are read first."""

RIGHTS = (
    *(Right(verb, kinds.JOB) for verb in ("create", "list", "delete", "patch")),
    *(Right(verb, kind) for kind in (kinds.CONFIG_MAP, kinds.SERVICE) for verb in ("create", "patch")),
    Right("list", kinds.POD),
    Right("watch", kinds.POD),
    Right("get", kinds.POD, "log"),
    Right("create", kinds.POD, "exec", required=False),
    *(Right(verb, kinds.SECRET, required=False) for verb in ("get", "create", "patch")),  # the workers' key
    *(Right("list", kind, required=False) for kind in (kinds.EVENT, kinds.CLAIM, kinds.NODE, kinds.STORAGE_CLASS)),
)
_ELASTIC_JOB_RIGHTS = tuple(Right(verb, kinds.ELASTIC_JOB) for verb in ("create", "list", "patch", "delete"))


class _Reader:
    """Reads a namespace's objects, and records the kinds that the user may not read."""

    def __init__(self, cluster: api.Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.forbidden: dict[str, str] = {}

    def __call__(self, kind: Kind, labels: str = "") -> tuple[Document, ...]:
        try:
            return tuple(self.cluster.list_(kind, namespace=self.namespace, labels=labels))
        except (NotServed, Absent):
            return ()
        except Forbidden as error:
            # The server checks rights before the kind, so it also forbids kinds that are not installed.
            if kind.group not in kinds.INSTALLED_BY or self.cluster.serves(kind):
                self.forbidden[kind.resource] = str(error)
            return ()

    def one(self, kind: Kind, name: str, namespace: str | None = None) -> Document | None:
        """Return one object, or None if it is absent, forbidden or not served."""
        try:
            return self.cluster.find(kind, name, namespace=namespace)
        except NotServed:
            return None
        except Forbidden as error:
            self.forbidden[kind.resource] = str(error)
            return None


# For a job


def job(cluster: api.Cluster, name: str) -> Snapshot:
    """Return a job's snapshot. Raises NotFound if the job has no objects, or another ClusterError."""
    namespace_, selector = cluster.namespace, f"{Label.JOB}={name}"
    read = _Reader(cluster, namespace_)
    workloads = [each for kind in dropins.ELASTIC_JOBS for each in read(kind) if pod_status.name(each) == name]
    workloads += [each for kind in (kinds.JOB, kinds.STATEFUL_SET) for each in read(kind, selector)]
    # Use the newest workload, but prefer an ElasticJob to objects that its operator has created.
    workloads.sort(key=lambda each: (each.get("kind") == kinds.ELASTIC_JOB.kind, each["metadata"]["creationTimestamp"]))
    workload = workloads[-1] if workloads else {}
    run = workload.get("metadata", {}).get("labels", {}).get(Label.RUN)
    pods = [pod for pod in read(kinds.POD, selector) if not run or pod["metadata"]["labels"].get(Label.RUN, run) == run]
    if not workload and not pods:
        if not cluster.has_namespace(namespace_):
            raise NotFound(f"there is no namespace {namespace_}; correct --namespace (kubectl get namespaces)")
        if kinds.POD.resource in read.forbidden:
            raise Forbidden(read.forbidden[kinds.POD.resource])
        raise NotFound(f"there is no job {name} in namespace {namespace_}; `outlast list` shows those there are")
    return _snapshot(read, name, workload, pods)


def workload(cluster: api.Cluster, name: str, namespace: str, *, labels: str, kind: Kind) -> Snapshot:
    """Return the snapshot of a workload that is not a job. `labels` selects its pods."""
    read = _Reader(cluster, namespace)
    document = next((each for each in read(kind) if pod_status.name(each) == name), {})
    return _snapshot(read, name, document, read(kinds.POD, labels))


def _snapshot(read: _Reader, name: str, workload: Document, pods: Iterable[Document]) -> Snapshot:
    pods = tuple(pods)
    groups = [*read(kinds.POD_GROUP), *read(kinds.VOLCANO_GROUP)]
    # A list of Secrets contains their data. Read it only while a scheduled pod waits, possibly for a Secret.
    needs_secrets = any(pod_status.phase(pod) == "Pending" and pod["spec"].get("nodeName") for pod in pods)
    queue = workload.get("metadata", {}).get("labels", {}).get("kueue.x-k8s.io/queue-name")
    snapshot = Snapshot(
        name=name,
        namespace=read.namespace,
        workload=workload,
        pods=pods,
        events=read(kinds.EVENT),
        nodes=read(kinds.NODE),
        claims=read(kinds.CLAIM),
        kueue_workloads=tuple(each for each in read(kinds.WORKLOAD) if owned_by(each, workload)),
        queues=read(kinds.LOCAL_QUEUE) if queue else (),
        pod_groups=tuple(each for each in groups if _labels(each).get(Label.JOB) == name or owned_by(each, workload)),
        secrets=_made_by_users(read(kinds.SECRET)) if needs_secrets else frozenset(),
        config_maps=_made_by_users(read(kinds.CONFIG_MAP)),
        logs=_logs(read.cluster, read.namespace, pods),
        forbidden=read.forbidden,
    )
    return replace(snapshot, defined=True, operator=_operator(read)) if snapshot.unreconciled() else snapshot


def _labels(document: Document) -> Mapping[str, Any]:
    return document["metadata"].get("labels") or {}


def _made_by_users(documents: Iterable[Document]) -> frozenset[str]:
    return frozenset(
        pod_status.name(each) for each in documents if _labels(each).get("app.kubernetes.io/managed-by") != "outlast"
    )


def _logs(cluster: api.Cluster, namespace: str, pods: Iterable[Document]) -> dict[str, list[str]]:

    def order(pod: Document) -> tuple[bool, str]:
        return bool((pod_status.termination(pod) or {}).get("exitCode")), str(pod["metadata"].get("creationTimestamp", ""))

    logs: dict[str, list[str]] = {}
    started = [pod for pod in pods if pod_status.termination(pod) or pod_status.any_running(pod)]
    for pod in sorted(started, key=order, reverse=True)[:_MAX_LOGS]:
        restarted = any((each.get("lastState") or {}).get("terminated") for each in pod_status.statuses(pod))
        name = pod_status.name(pod)
        early = "" if pod_status.has_started(pod) else (pod_status.termination(pod) or {}).get("container", "")
        options = api.LogOptions(container=early or pod_status.container_name(pod), tail=_LOG_LINES, previous=restarted)
        try:
            logs[name] = list(cluster.logs(name, options, namespace=namespace))
        except (Absent, Forbidden, Refused, Unanswered) as error:
            logs[name] = [f"(the log cannot be read: {error})"]
    return logs


# For a namespace


def namespace(cluster: api.Cluster) -> Snapshot:
    """Return the namespace's snapshot. Raises Unanswered or Unauthorized."""
    read = _Reader(cluster, cluster.namespace)
    defined = cluster.serves(kinds.ELASTIC_JOB)
    rights = (*RIGHTS, *(_ELASTIC_JOB_RIGHTS if defined else ()))
    return Snapshot(
        namespace=cluster.namespace,
        version=cluster.version(),
        defined=defined,
        missing_rights=tuple(each for each in rights if not cluster.may(each.verb, each.kind, subresource=each.subresource)),
        operator=_operator(read),
        conflicting_controllers=tuple(conflicting_controllers(cluster)),
        nodes=read(kinds.NODE),
        storage_classes=read(kinds.STORAGE_CLASS),
        dry_run_error=_dry_run_error(cluster),
        forbidden=read.forbidden,
    )


def operator_namespace(binding: Document) -> str:
    """Return the operator's namespace from its ClusterRoleBinding; empty if the binding does not name the operator."""
    operators = [each for each in binding.get("subjects") or () if each.get("name") == OPERATOR]
    return str(operators[0].get("namespace", "")) if operators else ""


def _operator(read: _Reader) -> Document | None:
    """Return the operator's Deployment from the namespace in its ClusterRoleBinding, or else from any namespace that can be
    read."""
    namespace_ = operator_namespace(read.one(kinds.CLUSTER_ROLE_BINDING, OPERATOR) or {})
    deployments = [each for each in _deployments(read.cluster) if pod_status.name(each) == OPERATOR] if not namespace_ else []
    return deployments[0] if deployments else read.one(kinds.DEPLOYMENT, OPERATOR, namespace_ or OPERATOR_NAMESPACE)


def conflicting_controllers(cluster: api.Cluster) -> list[str]:
    """Return running Deployments of controllers that the operator replaces, as `namespace/name`."""
    running = [each for each in _deployments(cluster) if each["spec"].get("replicas", 1)]
    conflicting = [
        each["metadata"] for each in running if any(one.functions.is_replaced_controller(each) for one in dropins.DROP_INS)
    ]
    return [f"{meta['namespace']}/{meta['name']}" for meta in conflicting]


def _deployments(cluster: api.Cluster) -> list[Document]:
    with contextlib.suppress(Forbidden):
        return cluster.list_(kinds.DEPLOYMENT, everywhere=True)
    return []


def _dry_run_error(cluster: api.Cluster) -> ClusterError | None:
    """Return the error with which the API server refuses a small worker in a dry run, or None if it would admit one."""
    try:
        cluster.apply(sample_pod.worker(namespace=cluster.namespace), dry_run=True)
    except (Absent, Forbidden, Refused) as error:
        return error
    return None
