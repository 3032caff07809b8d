"""The Kubernetes side of a shared file system: its StorageClass, PersistentVolumes and claims, applied, listed and deleted.

`manifests.storage` renders them. An object of the wished name that leads to the same file system is used as it is, whoever made
it; one that leads elsewhere is an error. Only objects with our labels are deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.installation import Done
from outlast.errors import Absent, Forbidden, NotServed, OutlastError
from outlast.kube import kinds
from outlast.kube.kinds import Kind, kind_of
from outlast.manifests import storage
from outlast.manifests.request import Document

if TYPE_CHECKING:
    from outlast.kube import Cluster

_OPTIONS = {kinds.STORAGE_CLASS: "--class", kinds.VOLUME: "--pv", kinds.CLAIM: "--claim"}


@dataclass(frozen=True)
class Claim:
    """A claim on a file system, and who uses it."""

    volume: str
    namespace: str
    name: str
    phase: str
    """Bound | Released | Available ..., of the volume."""
    pods: tuple[str, ...] = ()


def check(cluster: Cluster, wanted: Sequence[Document]) -> None:
    """Raises OutlastError when a name is taken by an object that leads elsewhere, or the claim's namespace does not exist."""
    for document in wanted:
        meta, kind = document["metadata"], kind_of(document)
        if "namespace" in meta and not cluster.has_namespace(meta["namespace"]):
            raise OutlastError(f"there is no namespace {meta['namespace']}; create it, or choose another with -n")
        there = cluster.find(kind, meta["name"], namespace=meta.get("namespace"))
        if there is not None and (why := storage.differs(document, there)):
            raise OutlastError(f"{kind} {meta['name']} exists: {why}; choose another {_OPTIONS[kind]}, or delete it")


def bring(cluster: Cluster, wanted: Sequence[Document], *, dry_run: bool = False) -> Iterator[Done]:
    """Create what is missing, and yield what happened to each object."""
    check(cluster, wanted)
    for document in wanted:
        meta, kind = document["metadata"], kind_of(document)
        there = cluster.find(kind, meta["name"], namespace=meta.get("namespace"))
        if there is None:
            if not dry_run:
                cluster.apply(document)
            yield Done("created", document)
            continue
        if kind == kinds.VOLUME and there.get("status", {}).get("phase") == "Released":
            # It remembers a claim that was deleted, by its uid, and would wait for that one for ever.
            if not dry_run:
                cluster.patch(kind, meta["name"], {"spec": {"claimRef": {"uid": None, "resourceVersion": None}}})
            yield Done("changed", document, "its claim was deleted; it can be claimed again")
            continue
        yield Done("unchanged", document)


def has_driver(cluster: Cluster, type: str) -> bool:
    """Whether the cluster has the CSI driver that mounts such file systems; True when we may not know."""
    try:
        return cluster.find(kinds.CSI_DRIVER, storage.DRIVERS[type]) is not None
    except Forbidden:
        return True


def claims(cluster: Cluster, id: str) -> list[Claim]:
    """All volumes that lead to a file system, whoever made them, with their claims and the pods that use those."""
    found = []
    for volume in cluster.list_(kinds.VOLUME):
        handle = (volume["spec"].get("csi") or {}).get("volumeHandle", "")
        if handle.partition(":")[0] != id:
            continue
        claim = volume["spec"].get("claimRef") or {}
        namespace, name = claim.get("namespace", ""), claim.get("name", "")
        phase = volume.get("status", {}).get("phase", "Pending")
        pods = cluster.list_(kinds.POD, namespace=namespace) if namespace and phase != "Released" else []
        users = tuple(sorted(pod["metadata"]["name"] for pod in pods if name in storage.claimed(pod)))
        found.append(Claim(volume["metadata"]["name"], namespace, name, phase, users))
    return found


def ours(cluster: Cluster, name: str) -> list[Document]:
    """The objects that we have made for a file system, in the order of deletion."""
    selected = ",".join(f"{key}={value}" for key, value in storage.labels(name).items())
    found: list[Document] = []
    for kind in (kinds.CLAIM, kinds.VOLUME, kinds.STORAGE_CLASS):
        found += [_with_kind(kind, each) for each in cluster.list_(kind, labels=selected, everywhere=kind.namespaced)]
    return found


def check_unused(found: Sequence[Claim], doomed: Sequence[Document], id: str) -> None:
    """Raises OutlastError when pods use a file system that is to be deleted, or somebody else's volume leads to it."""
    using = [f"{pod} (claim {each.name} in {each.namespace})" for each in found for pod in each.pods]
    if using:
        raise OutlastError(f"file system {id} is in use by {', '.join(using[:5])}; end them, and delete it then")
    known = {document["metadata"]["name"] for document in doomed if document["kind"] == kinds.VOLUME.kind}
    if others := [each.volume for each in found if each.volume not in known]:
        raise OutlastError(
            f"PersistentVolume {', '.join(others)} leads to file system {id} and was not made by Outlast; delete it first"
        )


def remove(cluster: Cluster, doomed: Sequence[Document], *, dry_run: bool = False) -> Iterator[Done]:
    """Delete these objects: claims, volumes, and a StorageClass unless another volume has it."""
    for document in doomed:
        meta, kind = document["metadata"], kind_of(document)
        if kind == kinds.STORAGE_CLASS:
            gone = {each["metadata"]["name"] for each in doomed if each["kind"] == kinds.VOLUME.kind}
            used = [
                each["metadata"]["name"]
                for each in cluster.list_(kinds.VOLUME)
                if each["spec"].get("storageClassName") == meta["name"] and each["metadata"]["name"] not in gone
            ]
            if used:
                yield Done("kept", document, f"PersistentVolume {used[0]} has it")
                continue
        with contextlib.suppress(Absent, NotServed):
            if not dry_run:
                cluster.delete(kind, meta["name"], namespace=meta.get("namespace"))
        yield Done("deleted", document)


def _with_kind(kind: Kind, document: Document) -> Document:
    """A document of a list, which names no kind."""
    return {"apiVersion": kind.api_version, "kind": kind.kind, **document}
