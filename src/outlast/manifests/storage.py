"""A file system of a cloud as Kubernetes knows it: StorageClass, PersistentVolume and claim.

Nothing is provisioned: the volume names a file system that exists, and the claim names the volume, and each the other, so that no
other claim can take it. `Retain`: deleting the claim deletes no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast import contract
from outlast.manifests.request import Document

DRIVERS = {"efs": "efs.csi.aws.com", "fsx": "fsx.csi.aws.com"}
"""The CSI drivers, by type of file system."""
VOLUME = f"{contract.GROUP}/volume"
"""Label: the name of the file system, as `outlast volume` knows it."""
_OURS = {"app.kubernetes.io/managed-by": "outlast", "app.kubernetes.io/part-of": "outlast"}


@dataclass(frozen=True)
class Shared:
    """A file system, and the names by which pods find it."""

    type: str
    """efs or fsx."""
    id: str
    """`fs-...`; with an access point of EFS `fs-...::fsap-...`."""
    name: str
    """As `outlast volume` knows it."""
    namespace: str
    storage_class: str
    volume: str
    claim: str
    size: str = "5Gi"
    """Kubernetes wants one. EFS has no limit, and Lustre its own."""
    attributes: Mapping[str, str] = field(default_factory=dict)


def documents(wanted: Shared) -> list[Document]:
    """The three objects, in the order of creation."""
    return [storage_class(wanted), volume(wanted), claim(wanted)]


def labels(name: str) -> dict[str, str]:
    """The labels of the objects of a file system."""
    return {**_OURS, VOLUME: name}


def ours(document: Document, name: str) -> bool:
    """Whether we have made an object for this file system."""
    return labels(name).items() <= (document["metadata"].get("labels") or {}).items()


def differs(wanted: Document, there: Document) -> str:
    """Why an object that exists cannot serve as this one; empty when it can. What it may be used for can never be changed."""

    def meant(document: Document) -> tuple[str, str]:
        if document["kind"] == "StorageClass":
            return "provisioner", document["provisioner"]
        spec = document["spec"]
        if document["kind"] == "PersistentVolume":
            return "file system", (spec.get("csi") or {}).get("volumeHandle", "").partition(":")[0] or "another kind"
        return "volume", spec.get("volumeName") or "none"

    what, has = meant(there)
    return "" if has == meant(wanted)[1] else f"its {what} is {has}, not {meant(wanted)[1]}"


def claimed(pod: Document) -> set[str]:
    """The claims that a pod uses; none when it has finished."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return set()
    volumes = pod["spec"].get("volumes") or ()
    return {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}


def storage_class(wanted: Shared) -> Document:
    """The StorageClass: a name that volume and claim share."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": wanted.storage_class, "labels": labels(wanted.name)},
        "provisioner": DRIVERS[wanted.type],
    }


def volume(wanted: Shared) -> Document:
    """The PersistentVolume. https://github.com/kubernetes-sigs/aws-efs-csi-driver, ".../aws-fsx-csi-driver"."""
    csi: Document = {"driver": DRIVERS[wanted.type], "volumeHandle": wanted.id}
    if wanted.attributes:
        csi["volumeAttributes"] = dict(wanted.attributes)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": wanted.volume, "labels": labels(wanted.name)},
        "spec": {
            "capacity": {"storage": wanted.size},
            "volumeMode": "Filesystem",
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": wanted.storage_class,
            # `flock` is off by default on Lustre, and locks files on all nodes
            **({"mountOptions": ["flock"]} if wanted.type == "fsx" else {}),
            "claimRef": {"namespace": wanted.namespace, "name": wanted.claim},
            "csi": csi,
        },
    }


def claim(wanted: Shared) -> Document:
    """The PersistentVolumeClaim that jobs name."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": wanted.claim, "namespace": wanted.namespace, "labels": labels(wanted.name)},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": wanted.storage_class,
            "volumeName": wanted.volume,
            "resources": {"requests": {"storage": wanted.size}},
        },
    }
