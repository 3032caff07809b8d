"""The objects to install: the namespace, CRDs, the operator and its rights, and optionally the node watcher and monitoring.

They come from the YAML files in this folder, with `<namespace>` and `<image>` filled in; see `crd` for crd.yaml.
"""

from __future__ import annotations

import json
from importlib import resources

import yaml

from outlast.job.contract import OPERATOR_NAMESPACE
from outlast.kubernetes.api import dropins
from outlast.kubernetes.manifests.installed import crd
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE, Document
from outlast.kubernetes.manifests.scheduling import placement

CONTAINER = "operator"
USER_ROLES = ("outlast-view", "outlast-edit")
NODE_WATCH = "outlast-node-watch"
"""Name of the node watcher's DaemonSet, account, role and namespace."""


def files(
    *, operator_namespace: str = OPERATOR_NAMESPACE, image: str = OPERATOR_IMAGE, on_demand: bool = False
) -> dict[str, list[Document]]:
    """Return the objects, keyed by their file in `deploy/`. With `on_demand`, the operator avoids spot machines."""

    def documents(name: str) -> list[Document]:
        text = resources.files(__package__).joinpath(name).read_text()
        return list(yaml.safe_load_all(text.replace("<namespace>", operator_namespace).replace("<image>", image)))

    base = {
        "namespace.yaml": documents("namespace.yaml"),
        "crd.yaml": [crd.definition(), *(each.functions.definition() for each in dropins.DROP_INS)],
        "rbac.yaml": documents("rbac.yaml"),
        "operator.yaml": documents("operator.yaml"),
    }
    if on_demand:
        template = base["operator.yaml"][0]["spec"]["template"]["spec"]
        template["affinity"] = placement.avoid_spot({})
    monitoring = documents("monitoring.yaml")
    dashboard = monitoring[-1]["data"]
    dashboard |= {name: json.dumps(each) for name, each in dashboard.items()}
    return {
        **base,
        "node-watch/node-watch.yaml": documents("node-watch.yaml"),
        "monitoring/monitoring.yaml": monitoring,
        "kustomization.yaml": [_kustomization(list(base), namespace=operator_namespace)],
        "node-watch/kustomization.yaml": [_kustomization(["node-watch.yaml"], namespace=NODE_WATCH)],
        "monitoring/kustomization.yaml": [_kustomization(["monitoring.yaml"], namespace=operator_namespace)],
    }


def _kustomization(resources: list[str], *, namespace: str) -> Document:
    head: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**head, "namespace": namespace, "resources": resources}
