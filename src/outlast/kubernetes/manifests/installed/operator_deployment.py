"""The objects of an installation: namespace, CRDs, the operator and its rights, and optionally the node watcher.

    files()   {"operator.yaml": [documents], ...}    as in `deploy/`, and as `outlast install` applies them

The operator has exactly the rights that it uses: no wildcards, no Secrets. It may create Roles for the workers of a job, but only
with rights that it has itself (no `escalate`, no `bind`).
"""

from __future__ import annotations

from outlast.job import contract
from outlast.job.contract import OPERATOR, OPERATOR_NAMESPACE, Pod
from outlast.kubernetes.api import dropins
from outlast.kubernetes.manifests import volumes, worker_pod
from outlast.kubernetes.manifests.installed import crd, nodewatch_daemonset, rbac
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import placement

IMAGE = "ghcr.io/outlast/operator:0.1"
"""The operator's image, with Outlast but without torch."""
LABELS = {
    "app.kubernetes.io/name": "outlast",
    "app.kubernetes.io/part-of": "outlast",
}


def files(*, into: str = OPERATOR_NAMESPACE, image: str = IMAGE, on_demand: bool = False) -> dict[str, list[Document]]:
    """The objects, by the name of their file in `deploy/`. `into` is the operator's namespace; `on_demand`: whether the operator
    avoids spot machines."""
    base = {
        "namespace.yaml": [namespace(into)],
        "crd.yaml": [crd.definition(), *(each.functions.definition() for each in dropins.DROP_INS)],
        "rbac.yaml": rbac.operator(_meta(OPERATOR), into) + rbac.users(),
        "operator.yaml": [operator(into, image)],
    }
    optional = {
        "node-watch/node-watch.yaml": nodewatch_daemonset.documents(LABELS, image),
    }
    if on_demand:
        (deployment,) = base["operator.yaml"]
        template = deployment["spec"]["template"]["spec"]
        template["affinity"] = placement.off_spot(template.get("affinity") or {})
    kustomized = {
        "kustomization.yaml": [_kustomization(list(base), namespace=into)],
        "node-watch/kustomization.yaml": [_kustomization(["node-watch.yaml"], namespace=nodewatch_daemonset.NAME)],
    }
    return {**base, **optional, **kustomized}


def namespace(name: str = OPERATOR_NAMESPACE) -> Document:
    """The operator's namespace, with the restricted Pod Security Standard."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**LABELS, **restricted}},
    }


def operator(into: str = OPERATOR_NAMESPACE, image: str = IMAGE) -> Document:
    """The operator's Deployment, with two replicas: the leader, which holds a Lease, and a standby."""
    labels = _selected("operator")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_meta(OPERATOR), "namespace": into},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": _pods(
                labels,
                {
                    "serviceAccountName": OPERATOR,
                    "terminationGracePeriodSeconds": 15,
                    "containers": [
                        {
                            "name": "operator",
                            "image": image,
                            "command": ["outlast", "operator"],
                            "env": [
                                _field(contract.Env.NAMESPACE, "metadata.namespace"),
                                _field(contract.Env.POD, "metadata.name"),
                                {"name": contract.Env.PROBE_PORT, "value": str(Pod.PROBE_PORT)},
                            ],
                            "ports": [{"name": "probes", "containerPort": Pod.PROBE_PORT}],
                            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
                            **worker_pod.probes(start=30, live=3),
                            "securityContext": volumes.confined(),
                            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                        }
                    ],
                    "volumes": [{"name": "tmp", "emptyDir": {}}],
                },
            ),
        },
    }


def _kustomization(resources: list[str], *, namespace: str) -> Document:
    found: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**found, "namespace": namespace, "resources": resources}


def _meta(name: str) -> Document:
    return {"name": name, "labels": dict(LABELS)}


def _selected(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": component}


def _pods(labels: dict[str, str], spec: Document) -> Document:
    """A pod template: restricted, spread over nodes, and without environment variables for Services, since a Service called
    outlast-... would set OUTLAST_..._PORT."""
    ours: Document = {
        "enableServiceLinks": False,
        "securityContext": volumes.security(),
        "topologySpreadConstraints": [placement.spread(labels)],
    }
    return {"metadata": {"labels": {**LABELS, **labels}}, "spec": {**ours, **spec}}


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
