"""The objects of an installation: namespace, CRDs, the operator and its rights; optionally the node watcher, and monitoring.

    files()   {"operator.yaml": [documents], ...}    as in `deploy/`, and as `outlast install` applies them

The operator has exactly the rights that it uses: no wildcards, no Secrets. It may create Roles for the workers of a job, but only
with rights that it has itself (no `escalate`, no `bind`).
"""

from __future__ import annotations

from outlast.job import contract
from outlast.job.contract import OPERATOR, OPERATOR_NAMESPACE, Pod
from outlast.kubernetes.api import dropins
from outlast.kubernetes.manifests import volumes, worker_pod
from outlast.kubernetes.manifests.installed import crd, monitoring, nodewatch_daemonset, rbac
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE, Document
from outlast.kubernetes.manifests.scheduling import placement

CONTAINER = "operator"
LABELS = {
    "app.kubernetes.io/name": "outlast",
    "app.kubernetes.io/part-of": "outlast",
}


def files(
    *, operator_namespace: str = OPERATOR_NAMESPACE, image: str = OPERATOR_IMAGE, on_demand: bool = False
) -> dict[str, list[Document]]:
    """Return the objects, by the name of their file in `deploy/`. `on_demand`: whether the operator avoids spot machines."""
    base = {
        "namespace.yaml": [namespace(operator_namespace)],
        "crd.yaml": [crd.definition(), *(each.functions.definition() for each in dropins.DROP_INS)],
        "rbac.yaml": rbac.operator(_meta(OPERATOR), operator_namespace) + rbac.user_roles(),
        "operator.yaml": [deployment(operator_namespace, image)],
    }
    optional = {
        "node-watch/node-watch.yaml": nodewatch_daemonset.documents(LABELS, image),
        "monitoring/monitoring.yaml": monitoring.documents(LABELS, operator_namespace),
    }
    if on_demand:
        (operator_document,) = base["operator.yaml"]
        template = operator_document["spec"]["template"]["spec"]
        template["affinity"] = placement.avoid_spot(template.get("affinity") or {})
    kustomized = {
        "kustomization.yaml": [_kustomization(list(base), namespace=operator_namespace)],
        "node-watch/kustomization.yaml": [_kustomization(["node-watch.yaml"], namespace=nodewatch_daemonset.NAME)],
        "monitoring/kustomization.yaml": [_kustomization(["monitoring.yaml"], namespace=operator_namespace)],
    }
    return {**base, **optional, **kustomized}


def namespace(name: str = OPERATOR_NAMESPACE) -> Document:
    """Return the operator's namespace, with the restricted Pod Security Standard."""
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {**LABELS, **restricted}},
    }


def deployment(operator_namespace: str = OPERATOR_NAMESPACE, image: str = OPERATOR_IMAGE) -> Document:
    """Return the operator's Deployment, with two replicas: the leader, which holds a Lease, and a standby."""
    labels = _selector("operator")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_meta(OPERATOR), "namespace": operator_namespace},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": _pod_template(
                labels,
                {
                    "serviceAccountName": OPERATOR,
                    "terminationGracePeriodSeconds": 15,
                    "containers": [
                        {
                            "name": CONTAINER,
                            "image": image,
                            "command": ["outlast", "operator"],
                            "env": [
                                _field(contract.Env.NAMESPACE, "metadata.namespace"),
                                _field(contract.Env.POD, "metadata.name"),
                                {"name": contract.Env.PROBE_PORT, "value": str(Pod.PROBE_PORT)},
                            ],
                            "ports": [{"name": "probes", "containerPort": Pod.PROBE_PORT}],
                            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
                            **worker_pod.probes(startup_failures=30, liveness_failures=3),
                            "securityContext": volumes.container_security(),
                            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                        }
                    ],
                    "volumes": [{"name": "tmp", "emptyDir": {}}],
                },
            ),
        },
    }


def _kustomization(resources: list[str], *, namespace: str) -> Document:
    head: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**head, "namespace": namespace, "resources": resources}


def _meta(name: str) -> Document:
    return {"name": name, "labels": dict(LABELS)}


def _selector(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": component}


def _pod_template(labels: dict[str, str], spec: Document) -> Document:
    """Return a pod template: restricted, spread over nodes, and without environment variables for Services, since a Service
    called outlast-... would set OUTLAST_..._PORT."""
    base: Document = {
        "enableServiceLinks": False,
        "securityContext": volumes.pod_security(),
        "topologySpreadConstraints": [placement.spread(labels)],
    }
    return {"metadata": {"labels": {**LABELS, **labels}}, "spec": {**base, **spec}}


def _field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
