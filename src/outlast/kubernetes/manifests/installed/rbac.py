"""Rights of the operator, of the users of a namespace, and of a job's workers."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.job import contract
from outlast.job.contract import OPERATOR
from outlast.kubernetes.api import dropins
from outlast.kubernetes.api.kinds import ELASTIC_JOB
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import kueue

_RBAC, _LEASES = "rbac.authorization.k8s.io", "coordination.k8s.io"
_GROUPS = (contract.GROUP, *(kind.group for kind in dropins.KINDS))
"""API groups of ElasticJobs and of the drop-ins' jobs."""
_READ = ["get", "list", "watch"]
_WATCH = ["list", "watch"]
_LABELS = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/part-of": "outlast"}


def operator(meta: Document, namespace: str) -> list[Document]:
    """Return the operator's ServiceAccount, with exactly the rights that it uses: in all namespaces, and on its own Lease."""
    jobs = ELASTIC_JOB.plural
    get_or_create = ["get", "create"]
    rules = [
        _rule(_GROUPS, [jobs], [*_READ, "delete"]),  # delete: after their TTL
        _rule(_GROUPS, [f"{jobs}/status"], ["update"]),
        _rule(
            _GROUPS, [f"{jobs}/finalizers"], ["update"]
        ),  # to set owner references, where OwnerReferencesPermissionEnforcement is on
        _rule("", ["pods"], [*_READ, "create", "delete", "patch"]),
        _rule("", ["services", "persistentvolumeclaims", "serviceaccounts"], get_or_create),
        _rule(
            _RBAC, ["roles"], [*get_or_create, "patch"]
        ),  # for workers; the API server lets nobody grant rights that they do not have
        _rule(_RBAC, ["rolebindings"], get_or_create),
        _rule(_LEASES, ["leases"], ["list", "watch", "create", "patch"]),  # to create and patch: it gives that to workers
        _rule("policy", ["poddisruptionbudgets"], [*get_or_create, "patch"]),
        _rule("", ["events"], [*get_or_create, "patch"]),
        _rule("", ["nodes"], _WATCH),
        _rule(["scheduling.x-k8s.io", "scheduling.volcano.sh"], ["podgroups"], [*get_or_create, "patch"]),
        _rule(kueue.GROUP, ["workloads"], [*_READ, "create", "patch", "delete"]),
        _rule(kueue.GROUP, ["workloads/status"], ["update"]),
        _rule(kueue.GROUP, ["resourceflavors", "workloadpriorityclasses"], _WATCH),
        _rule("scheduling.k8s.io", ["priorityclasses"], _WATCH),
    ]
    namespaced = {**meta, "namespace": namespace}
    own = [
        {**_rule(_LEASES, ["leases"], ["get", "update"]), "resourceNames": [OPERATOR]},
        _rule(_LEASES, ["leases"], ["create"]),
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": namespaced},
        _role("ClusterRole", meta, rules),
        _binding("ClusterRoleBinding", meta, "ClusterRole", OPERATOR, namespace),
        _role("Role", namespaced, own),
        _binding("RoleBinding", namespaced, "Role", OPERATOR, namespace),
    ]


def node_watch(meta: Document, namespace: str) -> list[Document]:
    """Return the node watcher's ServiceAccount, with exactly the rights that it uses: to mark nodes, and to evict their pods.

    RBAC cannot limit an account to its own node, so the rights apply to all nodes.
    """
    rules = [
        _rule("", ["nodes"], ["get", "patch"]),
        _rule("", ["pods"], ["list", "delete"]),  # delete: when a PodDisruptionBudget can be respected no longer
        _rule("", ["pods/eviction"], ["create"]),
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**meta, "namespace": namespace}},
        _role("ClusterRole", meta, rules),
        _binding("ClusterRoleBinding", meta, "ClusterRole", str(meta["name"]), namespace),
    ]


def user_roles() -> list[Document]:
    """Return the roles for ElasticJobs, for everyone who may view, edit or administer a namespace: the cluster's own roles
    aggregate them.

    https://kubernetes.io/docs/reference/access-authn-authz/rbac/#aggregated-clusterroles
    """
    view = [_rule(_GROUPS, [ELASTIC_JOB.plural, f"{ELASTIC_JOB.plural}/status", f"{ELASTIC_JOB.plural}/scale"], _READ)]
    edit = [
        _rule(_GROUPS, [ELASTIC_JOB.plural], [*_READ, "create", "update", "patch", "delete", "deletecollection"]),
        _rule(_GROUPS, [f"{ELASTIC_JOB.plural}/scale"], ["get", "update", "patch"]),
        _rule(_GROUPS, [f"{ELASTIC_JOB.plural}/status"], _READ),
    ]
    return [
        _role("ClusterRole", _aggregated("view", "view"), view),
        _role("ClusterRole", _aggregated("edit", "edit", "admin"), edit),
    ]


def account(job: str) -> str:
    """Return the name of the account of a job's workers, and of its Role."""
    return f"{job}-worker"


def worker_access(
    job: str, namespace: str, max_workers: int, labels: dict[str, str], owner: Document, *, bound_account: str = ""
) -> list[Document]:
    """Return the rights of one job's workers: to create and change their Leases, each by its name, and to read their job.
    Rights to create objects by name work because the workers use server-side apply, which is authorized with the object's
    name, unlike a POST. `bound_account` is the account of the workers' pods; default: the account that is created here."""
    name = account(job)
    meta = {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": [owner]}
    rules = [
        {
            **_rule(_LEASES, ["leases"], ["create", "patch"]),
            "resourceNames": [contract.worker_name(job, index) for index in range(max_workers)],
        },
        {**_rule(contract.GROUP, [ELASTIC_JOB.plural], _READ), "resourceNames": [job]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta, "automountServiceAccountToken": False},
        _role("Role", meta, rules),
        _binding("RoleBinding", meta, "Role", bound_account or name, namespace),
    ]


def _aggregated(name: str, *into: str) -> Document:
    aggregation = {f"{_RBAC}/aggregate-to-{role}": "true" for role in into}
    return {"name": f"outlast-{name}", "labels": {**_LABELS, **aggregation}}


def _role(kind: str, meta: Document, rules: list[Document]) -> Document:
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": meta, "rules": rules}


def _binding(kind: str, meta: Document, role: str, account: str, namespace: str) -> Document:
    """Return the binding of a role to an account; it has the same name as the role."""
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": meta,
        "roleRef": {"apiGroup": _RBAC, "kind": role, "name": meta["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }


def _rule(groups: str | Sequence[str], resources: list[str], verbs: list[str]) -> Document:
    return {
        "apiGroups": [groups] if isinstance(groups, str) else list(groups),
        "resources": list(resources),
        "verbs": list(verbs),
    }
