"""Rights of a job's workers. Those of the operator, the node watcher and users are in `rbac.yaml` and `node-watch.yaml`."""

from __future__ import annotations

from outlast.job import contract
from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEASE, ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from outlast.kubernetes.manifests.render_request import Document


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
    leases = {
        "apiGroups": [LEASE.group],
        "resources": [LEASE.plural],
        "verbs": ["create", "patch"],
        "resourceNames": [contract.worker_name(job, index) for index in range(max_workers)],
    }
    own_job = {
        "apiGroups": [ELASTIC_JOB.group],
        "resources": [ELASTIC_JOB.plural],
        "verbs": ["get", "list", "watch"],
        "resourceNames": [job],
    }
    role = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": name}
    subject = {"kind": SERVICE_ACCOUNT.kind, "name": bound_account or name, "namespace": namespace}
    return [
        SERVICE_ACCOUNT.document(meta, automountServiceAccountToken=False),
        ROLE.document(meta, rules=[leases, own_job]),
        ROLE_BINDING.document(meta, roleRef=role, subjects=[subject]),
    ]
