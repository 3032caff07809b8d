"""AWS node with pods, and the time of its termination notice."""

from __future__ import annotations

from typing import Any

from outlast.kubernetes.api import pod_status

Document = dict[str, Any]


T0 = pod_status.timestamp("2026-01-01T00:00:00Z")


def a_node(**spec: Any) -> Document:
    labels = {"topology.kubernetes.io/zone": "us-west-2a", "node.kubernetes.io/instance-type": "g5.xlarge"}
    labels["karpenter.sh/nodepool"] = "gpu"
    meta = {"name": "n1", "resourceVersion": "7", "labels": labels, "annotations": {"theirs": "kept"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"providerID": "aws:///us-west-2a/i-1", **spec}}


def a_pod(name: str, owner: str = "ReplicaSet", *, grace: int | None = 30, phase: str = "Running", **meta: Any) -> Document:
    api = "outlast.dev/v1alpha1" if owner == "ElasticJob" else "apps/v1"
    owners = [{"apiVersion": api, "kind": owner, "name": "o", "uid": "u", "controller": True}]
    whole = {"name": name, "namespace": "team", "uid": f"uid-{name}", "ownerReferences": owners, **meta}
    spec = {"nodeName": "n1"} if grace is None else {"nodeName": "n1", "terminationGracePeriodSeconds": grace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": whole, "spec": spec, "status": {"phase": phase}}
