"""The objects of the node watcher: a DaemonSet in a namespace of its own, and its rights.

It needs the host's network: metadata services answer nobody else (AWS: a hop limit of 1). The operator's namespace forbids that.
"""

from __future__ import annotations

from outlast.contract import Env
from outlast.manifests import pods, rbac, volumes
from outlast.manifests.request import Document

NAME = "outlast-node-watch"
"""The DaemonSet, its account, its role and its namespace."""
PORT = 9751
"""Of the probes, on every node; 8080 is taken on many."""
_CRITICAL = "system-node-critical"
_LEVELS = {f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")}


def documents(labels: dict[str, str], image: str, *, queue: str = "") -> list[Document]:
    """All of them, in the order of creation. `queue` is the URL of an SQS queue for messages about notices."""
    meta: Document = {"name": NAME, "labels": dict(labels)}
    here = {**meta, "namespace": NAME}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAME, "labels": {**labels, **_LEVELS}}},
        _quota(here),
        *rbac.node_watch(meta, NAME),
        _daemons(here, labels, image, queue),
    ]


def _quota(meta: Document) -> Document:
    """GKE admits critical pods only to namespaces with a quota for them.

    https://cloud.google.com/kubernetes-engine/docs/concepts/priority-classes
    """
    chosen = {"scopeName": "PriorityClass", "operator": "In", "values": [_CRITICAL]}
    spec = {"hard": {"pods": "15k"}, "scopeSelector": {"matchExpressions": [chosen]}}  # GKE's largest clusters have so many nodes
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": spec}


def _daemons(meta: Document, labels: dict[str, str], image: str, queue: str) -> Document:
    selected = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": "node-watch"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": selected},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {"metadata": {"labels": {**labels, **selected}}, "spec": _pod(image, queue)},
        },
    }


def _pod(image: str, queue: str) -> Document:
    not_machines = {"key": "eks.amazonaws.com/compute-type", "operator": "NotIn", "values": ["fargate", "hybrid"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [not_machines]}]}
    return {
        "serviceAccountName": NAME,
        "enableServiceLinks": False,
        "hostNetwork": True,
        "dnsPolicy": "Default",  # the node's: the cluster's may go with this node
        "priorityClassName": _CRITICAL,
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        "terminationGracePeriodSeconds": 10,
        "securityContext": volumes.security(),
        "containers": [
            {
                "name": "node-watch",
                "image": image,
                "command": ["outlast", "node-watch", *([f"--queue={queue}"] if queue else [])],
                "env": [
                    {"name": Env.NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {"name": Env.PROBE_PORT, "value": str(PORT)},
                ],
                "ports": [{"name": "probes", "containerPort": PORT, "hostPort": PORT}],
                "resources": {"requests": {"cpu": "10m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
                **pods.probes(start=30, live=3),
                "securityContext": volumes.confined(),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
