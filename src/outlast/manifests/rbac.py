"""Who may do what: the operator, the users of a namespace, and a worker's pods."""

from __future__ import annotations

from outlast import contract
from outlast.contract import OPERATOR
from outlast.manifests import crd
from outlast.manifests.request import Document

WORKER = "outlast-worker"
"""The ServiceAccount that pods of workers may have, and its Role."""
_READ = ["get", "list", "watch"]
_LABELS = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/part-of": "outlast"}


def operator(meta: Document, namespace: str) -> list[Document]:
    """The operator's account and what it may do in all namespaces."""
    jobs = crd.PLURAL
    rules = [
        _rule(contract.GROUP, [jobs], [*_READ, "patch"]),
        _rule(contract.GROUP, [f"{jobs}/status"], ["get", "patch", "update"]),
        _rule(contract.GROUP, [f"{jobs}/finalizers"], ["update"]),  # to own what it makes, where that is enforced
        _rule("", ["pods"], [*_READ, "create", "delete", "patch"]),
        _rule("", ["services", "configmaps"], [*_READ, "create", "delete", "patch"]),
        _rule("", ["persistentvolumeclaims"], [*_READ, "create"]),
        _rule("", ["nodes", "namespaces"], _READ),
        _rule("", ["events"], ["create", "patch"]),
        _rule("events.k8s.io", ["events"], ["create", "patch"]),
        _rule("coordination.k8s.io", ["leases"], [*_READ, "create", "update", "patch", "delete"]),
        _rule("scheduling.x-k8s.io", ["podgroups"], [*_READ, "create", "delete", "patch"]),
        _rule("scheduling.volcano.sh", ["podgroups"], [*_READ, "create", "delete", "patch"]),
        _rule("apiextensions.k8s.io", ["customresourcedefinitions"], _READ),
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "namespace": namespace}},
        _role("ClusterRole", meta, rules),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": OPERATOR},
            "subjects": [{"kind": "ServiceAccount", "name": OPERATOR, "namespace": namespace}],
        },
    ]


def users() -> list[Document]:
    """ElasticJobs for all who may view, edit or administer a namespace; these roles add themselves to the cluster's own.

    https://kubernetes.io/docs/reference/access-authn-authz/rbac/#aggregated-clusterroles
    """
    view = [_rule(contract.GROUP, [crd.PLURAL, f"{crd.PLURAL}/status", f"{crd.PLURAL}/scale"], _READ)]
    edit = [
        _rule(contract.GROUP, [crd.PLURAL], [*_READ, "create", "update", "patch", "delete", "deletecollection"]),
        _rule(contract.GROUP, [f"{crd.PLURAL}/scale"], ["get", "update", "patch"]),
        _rule(contract.GROUP, [f"{crd.PLURAL}/status"], _READ),
    ]
    return [
        _role("ClusterRole", _aggregated("view", "view"), view),
        _role("ClusterRole", _aggregated("edit", "edit", "admin"), edit),
    ]


def worker() -> list[Document]:
    """What a worker's pods may be given, in the namespace where this is applied: to say on Leases that they are there, to read
    the world that was decided, and to read their job. No right to change pods."""
    meta = {"name": WORKER, "labels": dict(_LABELS)}
    rules = [
        _rule("coordination.k8s.io", ["leases"], ["get", "list", "watch", "create", "update", "patch"]),
        _rule("", ["configmaps"], ["get", "watch"]),
        _rule(contract.GROUP, [crd.PLURAL], ["get"]),
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta, "automountServiceAccountToken": False},
        _role("Role", meta, rules),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": WORKER},
            "subjects": [{"kind": "ServiceAccount", "name": WORKER}],
        },
    ]


def _aggregated(name: str, *into: str) -> Document:
    more = {f"rbac.authorization.k8s.io/aggregate-to-{role}": "true" for role in into}
    return {"name": f"outlast-{name}", "labels": {**_LABELS, **more}}


def _role(kind: str, meta: Document, rules: list[Document]) -> Document:
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": meta, "rules": rules}


def _rule(group: str, resources: list[str], verbs: list[str]) -> Document:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
