"""Installs, upgrades and removes Outlast's objects in a cluster, for `outlast install` and `uninstall`.

Documents are applied server-side, so an upgrade changes only what differs, and an interrupted installation can be repeated. The
definition of ElasticJob is applied before the objects that need it. It is deleted only on demand, because all jobs are deleted
with it. An existing namespace is left as it is, and none is deleted, because it may hold objects of others. A cluster has only
one operator, because the operator's roles are cluster-wide.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.base.errors import Absent, ClusterError, NotServed, OutlastError
from outlast.job import ownership
from outlast.job.contract import OPERATOR, OPERATOR_NAMESPACE
from outlast.kubernetes import diagnosis
from outlast.kubernetes.api import apply_documents, dropins, kinds, pod_status, within
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.diagnosis import cluster as conditions
from outlast.kubernetes.diagnosis import gather_evidence
from outlast.kubernetes.manifests.installed import operator_deployment
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE, Document

if TYPE_CHECKING:
    from outlast.kubernetes.api import Cluster
    from outlast.kubernetes.diagnosis import Finding

_ESTABLISHED_S, _DELETED_S, _POLL_S = 60.0, 120.0, 0.5


@dataclass(frozen=True)
class Outcome:
    action: str
    """One of created, changed, unchanged, deleted, kept and absent."""
    document: Document
    reason: str = ""

    def __str__(self) -> str:
        meta = self.document["metadata"]
        where = f" in {meta['namespace']}" if "namespace" in meta else ""
        return f"{self.action:9}  {self.document['kind']} {meta['name']}{where}" + (f": {self.reason}" if self.reason else "")


def documents(
    *, namespace: str = OPERATOR_NAMESPACE, image: str = OPERATOR_IMAGE, watch: bool = False, on_demand: bool = False
) -> list[Document]:
    """Return all documents to install, in order of creation. `watch` adds the node watcher, and `on_demand` keeps the operator
    off spot machines."""
    files = operator_deployment.files(operator_namespace=namespace, image=image, on_demand=on_demand)
    names = ["namespace.yaml", "crd.yaml", "rbac.yaml", "operator.yaml", *(["node-watch/node-watch.yaml"] if watch else [])]
    return [document for name in names for document in files[name]]


# Installing


def ensure(cluster: Cluster, desired: Sequence[Document], *, dry_run: bool = False) -> Iterator[Outcome]:
    """Apply the documents in order, and yield each outcome. Raises OutlastError, before any change, if the cluster has another
    operator or a controller that the operator replaces, and ClusterError if a document cannot be applied."""
    _check_other_controllers(cluster)
    shared = [kind.resource for kind in dropins.KINDS]  # another controller may have created the definition
    for document in desired:
        if document["kind"] == kinds.CLUSTER_ROLE_BINDING.kind and (namespace := gather_evidence.operator_namespace(document)):
            _check_single_operator(cluster, namespace)
    own = [each for each in desired if each["kind"] != kinds.NAMESPACE.kind and each["metadata"]["name"] not in shared]
    apply_documents.check(cluster, own, instead="have it renamed or removed, or install into another --namespace")
    created_namespace = ""
    """The namespace that a dry run would create. It does not exist yet, so the server cannot check objects in it."""
    for document in desired:
        if dry_run and created_namespace and document["metadata"].get("namespace") == created_namespace:
            yield Outcome("created", document)
            continue
        old = apply_documents.existing(cluster, document)
        if old is not None and old["metadata"].get("deletionTimestamp"):
            old = None if dry_run else _after_deletion(cluster, document)
        if old is not None and not ownership.owned(old):
            yield Outcome("unchanged", document, "it was there before")
            continue
        if document["kind"] == kinds.NAMESPACE.kind:
            created_namespace = document["metadata"]["name"] if old is None else ""
        yield Outcome(apply_documents.apply(cluster, document, old=old, dry_run=dry_run).what, document)
        if document["kind"] == kinds.CRD.kind and not dry_run:
            _wait_established(cluster, document["metadata"]["name"])


def _check_other_controllers(cluster: Cluster) -> None:
    if rivals := gather_evidence.conflicting_controllers(cluster):
        raise OutlastError(
            f"{', '.join(rivals)} runs here and makes the pods of ElasticJobs of another API, as the operator would; "
            f"stop it first: {conditions.stop(rivals)}. Its definition and its jobs stay, and train on"
        )


def _check_single_operator(cluster: Cluster, namespace: str) -> None:
    other = gather_evidence.operator_namespace(cluster.find(kinds.CLUSTER_ROLE_BINDING, OPERATOR) or {})
    if other and other != namespace and cluster.find(kinds.DEPLOYMENT, OPERATOR, namespace=other):
        raise OutlastError(
            f"the operator of this cluster is in namespace {other}; pass --namespace {other}, "
            f"or take it away first: outlast uninstall --namespace {other}"
        )


def _after_deletion(cluster: Cluster, document: Document) -> Document | None:
    """Wait until an object is deleted. Returns None, or the object that has taken its place."""
    with within(_DELETED_S) as stop:
        while (now := apply_documents.existing(cluster, document)) and now["metadata"].get("deletionTimestamp"):
            if stop.wait(_POLL_S):
                title = f"{document['kind']} {document['metadata']['name']}"
                raise ClusterError(f"{title} is still being deleted; kubectl describe says what holds it; install again then")
    return now


def _wait_established(cluster: Cluster, name: str) -> None:
    established = lambda definition: pod_status.condition(definition, "Established") is not None  # noqa: E731
    if wait_for(cluster, kinds.CRD, name, established, timeout_s=_ESTABLISHED_S) is None:
        remedy = f"kubectl describe crd {name} says why; install again then"
        raise ClusterError(f"the API server does not serve {name} after {_ESTABLISHED_S:.0f} s; {remedy}")


def wait_for(
    cluster: Cluster, kind: Kind, name: str, holds: Callable[[Document], bool], *, timeout_s: float, namespace: str | None = None
) -> Document | None:
    """Return an object once `holds` is true for it; None on timeout."""
    with within(timeout_s) as stop:
        for change in cluster.watch(kind, stop=stop, namespace=namespace, fields=f"metadata.name={name}"):
            if change.type != "deleted" and holds(change.document):
                return change.document
    return None


def wait(cluster: Cluster, workload: Document, *, timeout_s: float) -> list[Finding]:
    """Wait until the workload of the operator or the node watcher runs, and return no findings. On timeout, return findings that
    explain why it does not run."""
    kind, meta = kind_of(workload), workload["metadata"]
    name, namespace = meta["name"], meta["namespace"]

    def runs(now: Document) -> bool:
        status = now.get("status", {})
        evidence = status.get("observedGeneration", 0) >= now["metadata"].get("generation", 0)
        if kind == kinds.DAEMON_SET:
            names = ("updatedNumberScheduled", "numberAvailable")
            return bool(evidence and all(status.get(each, 0) == status.get("desiredNumberScheduled") for each in names))
        return bool(
            evidence and status.get("updatedReplicas", 0) == status.get("availableReplicas", 0) == now["spec"]["replicas"]
        )

    if wait_for(cluster, kind, name, runs, timeout_s=timeout_s, namespace=namespace):
        return []
    selector = ",".join(f"{key}={value}" for key, value in workload["spec"]["selector"]["matchLabels"].items())
    evidence = gather_evidence.workload(cluster, name, namespace, labels=selector, kind=kind)
    return [cause for cause in diagnosis.causes(evidence, time.time()) if cause.name != "absent"]


# Removing


def jobs(cluster: Cluster) -> list[str]:
    """Return Outlast's ElasticJobs as `namespace/name`. Raises Forbidden if the user may not list them."""
    elastic_jobs: list[Document] = []
    for kind in dropins.ELASTIC_JOBS:
        definition = cluster.find(kinds.CRD, kind.resource)
        if definition is not None and not ownership.owned(definition):
            continue
        with contextlib.suppress(NotServed, Absent):
            elastic_jobs += cluster.list_(kind, everywhere=True)
    return [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in elastic_jobs]


def remove(cluster: Cluster, *, namespace: str = OPERATOR_NAMESPACE, crds: bool = False) -> Iterator[Outcome]:
    """Delete what `ensure` created, in reverse order. The definitions, and with them all jobs, are deleted only if `crds` is
    true. Raises OutlastError, before any change, if the operator is in another namespace."""
    _check_single_operator(cluster, namespace)
    installed = documents(namespace=namespace, watch=True)
    desired = [each for each in installed if each["kind"] != kinds.CRD.kind]
    definitions = [kinds.CRD.document({"name": kind.resource}) for kind in dropins.ELASTIC_JOBS]
    remaining: list[Document] = []
    for each in definitions:
        old = apply_documents.existing(cluster, each)
        if crds:
            yield _delete(cluster, each, old)
        elif old is not None and ownership.owned(old):
            remaining.append(each)
    for document in reversed(desired):
        old = apply_documents.existing(cluster, document)
        if old is None:
            if not document["metadata"]["name"].startswith(operator_deployment.NODE_WATCH):
                yield Outcome("absent", document)
        elif document["kind"] == kinds.NAMESPACE.kind:
            remedy = f"kubectl delete namespace {document['metadata']['name']}"
            yield Outcome("kept", document, f"if nothing else is in it, delete it with: {remedy}")
        elif remaining and document["metadata"]["name"] in operator_deployment.USER_ROLES:
            yield Outcome("kept", document, "users have their rights to ElasticJobs from it; --crds removes it")
        else:
            yield _delete(cluster, document, old)
    for each in remaining:
        yield Outcome("kept", each, "ElasticJobs would be deleted with it; --crds removes it")


def _delete(cluster: Cluster, document: Document, old: Document | None) -> Outcome:
    if old is not None and not ownership.owned(old):
        return Outcome("kept", document, "somebody else made it")
    meta = document["metadata"]
    try:
        cluster.delete(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except Absent:
        return Outcome("absent", document)
    return Outcome("deleted", document)


def check_namespace(name: str) -> str:
    """Return a namespace's name if the operator may be installed in it. Raises OutlastError for the namespaces of Kubernetes
    itself."""
    if name in ("default", "kube-system", "kube-public", "kube-node-lease"):
        raise OutlastError(f"--namespace {name}: that one is the cluster's own; choose another")
    return name
