"""What Outlast keeps in a cluster: brought there, brought up to date, taken away. Called by `outlast install` and `uninstall`.

`manifests.install` says what there is to be. Each document is applied whole (server-side), so that doing it again changes
nothing, a newer version changes what is different, and a power failure in between is mended by doing it again. The definition of
ElasticJob comes first of what needs it, and is waited for. It goes last and only when asked: all jobs go with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast import kinds
from outlast.contract import OPERATOR, OPERATOR_NAMESPACE
from outlast.errors import Absent, ClusterError, Forbidden, NotServed, OutlastError
from outlast.kinds import Kind, kind_of
from outlast.manifests import install
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.diagnosis import Cause
    from outlast.kube import Cluster

_ESTABLISHED_S = 60.0
_PART = "app.kubernetes.io/part-of"


@dataclass(frozen=True)
class Done:
    """What happened to one document."""

    what: str
    """created | changed | unchanged | deleted | kept | absent"""
    document: Document
    why: str = ""

    def __str__(self) -> str:
        meta = self.document["metadata"]
        where = f" in {meta['namespace']}" if "namespace" in meta else ""
        return f"{self.what:9}  {self.document['kind']} {meta['name']}{where}" + (f": {self.why}" if self.why else "")


def documents(*, namespace: str = OPERATOR_NAMESPACE, image: str = install.IMAGE, etcd: bool = False) -> list[Document]:
    """All that is to be there, in the order in which it can be made."""
    files = install.files(into=namespace, image=image)
    names = ["namespace.yaml", "crd.yaml", "rbac.yaml", *(["etcd/etcd.yaml"] if etcd else []), "operator.yaml"]
    return [document for name in names for document in files[name]]


# Bringing it there


def bring(cluster: Cluster, wanted: Sequence[Document], *, dry_run: bool = False) -> Iterator[Done]:
    """Make true what is wanted, and say what that changed, one document after the other. Raises ClusterError."""
    new: set[str] = set()
    for document in wanted:
        old = _there(cluster, document)
        where = document["metadata"].get("namespace", "")
        if dry_run and old is None and where in new:
            yield Done("created", document)  # its namespace is still to come: the server cannot be asked
            continue
        made = cluster.apply(document, dry_run=dry_run)
        if old is None:
            new.add(document["metadata"]["name"])
            yield Done("created", document)
        else:
            yield Done("unchanged" if same(old, made) else "changed", document)
        if document["kind"] == kinds.CRD.kind and not dry_run:
            _wait_established(cluster, document["metadata"]["name"])


def same(old: Document, new: Document) -> bool:
    """Whether applying a document has changed nothing that anybody could notice."""

    def content(document: Document) -> Document:
        meta = {key: document["metadata"].get(key) for key in ("labels", "annotations", "finalizers", "ownerReferences")}
        return {**{key: value for key, value in document.items() if key != "status"}, "metadata": meta}

    return content(old) == content(new)


def _there(cluster: Cluster, document: Document) -> Document | None:
    meta = document["metadata"]
    try:
        return cluster.get(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except Absent:
        return None


def _wait_established(cluster: Cluster, name: str) -> None:
    """Wait until the API server serves what a definition defines. Raises ClusterError when it does not in time."""

    def established(definition: Document) -> bool:
        states = {each["type"]: each for each in definition.get("status", {}).get("conditions") or ()}
        if (refused := states.get("NamesAccepted", {})).get("status") == "False":
            raise ClusterError(f"the definition {name} is not accepted: {refused.get('message')}; remove what has its names")
        return bool(states.get("Established", {}).get("status") == "True")

    if await_(cluster, kinds.CRD, name, established, timeout_s=_ESTABLISHED_S) is None:
        raise ClusterError(f"the API server does not serve {name} after {_ESTABLISHED_S:.0f} s; look at it, and install again")


def await_(
    cluster: Cluster,
    kind: Kind,
    name: str,
    until: Callable[[Document], bool],
    *,
    timeout_s: float,
    namespace: str | None = None,
) -> Document | None:
    """The document as soon as it is as wished; None when it is not within `timeout_s`."""
    from outlast import kube

    with kube.within(timeout_s) as stop:
        for change in cluster.watch(kind, stop=stop, namespace=namespace, fields=f"metadata.name={name}"):
            if change.type != "deleted" and until(change.document):
                return change.document
    return None


def wait(cluster: Cluster, namespace: str, *, timeout_s: float) -> list[Cause]:
    """Wait until the operator runs; otherwise why it does not."""

    def available(deployment: Document) -> bool:
        status, spec = deployment.get("status", {}), deployment["spec"]
        seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        return bool(seen and status.get("updatedReplicas", 0) == status.get("availableReplicas", 0) == spec["replicas"])

    if await_(cluster, kinds.DEPLOYMENT, OPERATOR, available, timeout_s=timeout_s, namespace=namespace):
        return []
    from outlast import diagnosis
    from outlast.diagnosis import evidence

    seen = evidence.around(cluster, OPERATOR, namespace, labels="app.kubernetes.io/component=operator", kind=kinds.DEPLOYMENT)
    return [cause for cause in diagnosis.causes(seen, time.time()) if cause.rule != "absent"]


# Taking it away


def jobs(cluster: Cluster) -> list[str]:
    """All ElasticJobs of the cluster, as `namespace/name`. Raises Forbidden: who may not see them must not delete them."""
    try:
        found = cluster.list_(kinds.ELASTIC_JOB, everywhere=True)
    except (NotServed, Absent):
        return []
    return [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found]


def definition(name: str = "elasticjobs.outlast.dev") -> Document:
    """Enough of the definition of ElasticJob to name it."""
    return {"apiVersion": kinds.CRD.api_version, "kind": kinds.CRD.kind, "metadata": {"name": name}}


def remove(cluster: Cluster, *, namespace: str = OPERATOR_NAMESPACE, crds: bool = False) -> Iterator[Done]:
    """Take away what `bring` made, the last first, and say what became of it. The definition only with `crds`: jobs go, too."""
    wanted = [each for each in documents(namespace=namespace, etcd=True) if each["kind"] != kinds.CRD.kind]
    if crds:
        yield _delete(cluster, definition())
    for document in reversed(wanted):
        old = _there(cluster, document)
        if old is None:
            if document["metadata"]["name"] != install.ETCD:
                yield Done("absent", document)
        elif (reason := _not_ours(cluster, old, namespace)) and document["kind"] == kinds.NAMESPACE.kind:
            yield Done("kept", document, reason)
        else:
            yield _delete(cluster, document)
    if not crds and _there(cluster, definition()):
        yield Done("kept", definition(), "ElasticJobs would be deleted with it; --crds removes it")


def _delete(cluster: Cluster, document: Document) -> Done:
    meta = document["metadata"]
    try:
        cluster.delete(kind_of(document), meta["name"], namespace=meta.get("namespace"))
    except Absent:
        return Done("absent", document)
    return Done("deleted", document)


def _not_ours(cluster: Cluster, namespace: Document, name: str) -> str:
    """Why a namespace must not be deleted; empty when all in it is ours."""
    if namespace["kind"] != kinds.NAMESPACE.kind:
        return ""
    if namespace["metadata"].get("labels", {}).get(_PART) != "outlast":
        return "it was not made by `outlast install`"
    others = []
    for kind in (kinds.DEPLOYMENT, kinds.STATEFUL_SET, kinds.JOB, kinds.CLAIM, kinds.ELASTIC_JOB):
        try:
            found = cluster.list_(kind, namespace=name)
        except (NotServed, Absent, Forbidden):
            continue
        others += [
            f"{kind} {each['metadata']['name']}" for each in found if each["metadata"].get("labels", {}).get(_PART) != "outlast"
        ]
    claims = [each for each in others if each.startswith(str(kinds.CLAIM))]
    if others and others != claims:
        return f"there is more in it: {', '.join(others[:5])}"
    return f"etcd's volumes are still in it: {', '.join(claims)}; delete it with kubectl" if claims else ""


def check_namespace(name: str) -> str:
    """The name, when it may be that of our namespace. Raises OutlastError."""
    if name in ("default", "kube-system", "kube-public", "kube-node-lease"):
        raise OutlastError(f"--namespace {name}: Outlast would change the labels of that namespace; choose another")
    return name
