"""The objects of the node watcher: a DaemonSet in its own namespace, and its rights. The watcher needs the host's network, since
AWS's metadata service answers only there (a hop limit of 1), and the operator's namespace forbids the host's network."""

from __future__ import annotations

from outlast.job.contract import Env
from outlast.kubernetes.manifests import volumes
from outlast.kubernetes.manifests.installed import rbac
from outlast.kubernetes.manifests.render_request import Document

NAME = "outlast-node-watch"
"""Name of the DaemonSet, its account, its role and its namespace."""
_CRITICAL = "system-node-critical"
_LEVELS = {f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")}


def documents(labels: dict[str, str], image: str) -> list[Document]:
    """Return the node watcher's objects, in the order of creation."""
    meta: Document = {"name": NAME, "labels": dict(labels)}
    namespaced = {**meta, "namespace": NAME}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAME, "labels": {**labels, **_LEVELS}}},
        *rbac.node_watch(meta, NAME),
        _daemonset(namespaced, labels, image),
    ]


def _daemonset(meta: Document, labels: dict[str, str], image: str) -> Document:
    selector = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": "node-watch"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": selector},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {"metadata": {"labels": {**labels, **selector}}, "spec": _pod(image)},
        },
    }


def _pod(image: str) -> Document:
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
        "securityContext": volumes.pod_security(),
        "containers": [
            {
                "name": "node-watch",
                "image": image,
                "command": ["outlast", "node-watch"],
                "env": [{"name": Env.NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                "resources": {"requests": {"cpu": "10m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
                "securityContext": volumes.container_security(),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
