"""A job's objects besides its workload: ConfigMaps, the headless Service, claims, the PodDisruptionBudget, and the workers'
Secret and access rights."""

from __future__ import annotations

import base64

from outlast.job import contract, spec
from outlast.job.contract import Env, Pod
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import labels, variables, volumes
from outlast.kubernetes.manifests.names import Names
from outlast.kubernetes.manifests.render_request import Document, Request


def config(request: Request) -> Document:
    """Return the immutable ConfigMap with the job file."""
    return kinds.CONFIG_MAP.document(
        labels.metadata(request, request.names.config), immutable=True, data=volumes.config_data(request)
    )


def code(request: Request) -> list[Document]:
    """Return a list with the ConfigMap that holds the code archive; empty if there is no archive. The ConfigMap is named after
    the archive's checksum."""
    checksum = volumes.checksum(request.spec.code)
    if not (request.code and checksum):
        return []
    data = {volumes.archive(request.spec.code): base64.b64encode(request.code).decode()}
    meta = labels.metadata(request, request.names.code(checksum))
    return [kinds.CONFIG_MAP.document(meta, immutable=True, binaryData=data)]


def service(request: Request) -> Document:
    """Return the headless Service for the workers' DNS names. It includes pods that are in no world and thus not ready."""
    return headless(labels.metadata(request, request.names.service), labels.selector(request.job.metadata.name), "rendezvous")


def headless(meta: Document, selector: dict[str, str], target: str | int) -> Document:
    """Return a headless Service for the rendezvous of pods on the port `target`. It includes pods that are not ready."""
    port = {"name": "rendezvous", "port": Pod.RENDEZVOUS_PORT, "targetPort": target}
    fields = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    return kinds.SERVICE.document(meta, spec=fields)


def key_secret(job: spec.Job, workload: Document, value: str) -> Document | None:
    """Return the Secret with which a workload's workers authenticate each other, or None for a single worker."""
    if not (name := _secret_name(job, workload)):
        return None
    meta: Document = {"name": name, "labels": labels.common(job)}
    if namespace := workload["metadata"].get("namespace"):
        meta["namespace"] = namespace
    # Not `immutable`: a kubelet would give new pods the deleted Secret of an earlier job while pods of that job are on its node.
    return kinds.SECRET.document(meta, stringData={variables.KEY: value})


def _secret_name(job: spec.Job, workload: Document) -> str:
    if workload["kind"] == contract.KIND:
        return Names(job.metadata.name).service if job.spec.workers.max > 1 else ""
    containers = workload["spec"]["template"]["spec"]["containers"]
    env = [each for container in containers for each in container.get("env", ()) if each.get("name") == Env.RENDEZVOUS_KEY]
    return next((each["valueFrom"]["secretKeyRef"]["name"] for each in env if "valueFrom" in each), "")


def claims(request: Request, *, mode: str = "ReadWriteMany") -> list[Document]:
    """Return the claims to create, which are those of volumes with a size. `mode` is the default access mode."""
    claims = volumes.claims(request.spec, mode)
    return [kinds.CLAIM.document(labels.metadata(request, name), spec=claim) for name, claim in claims.items()]


def existing_claim(existing: Document) -> str:
    """Return a sentence about an existing claim, which is used unchanged because it may hold data."""
    meta, size = existing["metadata"], existing["spec"].get("resources", {}).get("requests", {}).get("storage")
    return f"PersistentVolumeClaim {meta['name']} exists and is used as it is{f', with {size}' if size else ''}"


def min_available(workers: spec.Workers) -> int:
    """Return how many workers must remain after evictions: `workers.min`, but never all, because then no node could be
    drained."""
    return max(0, min(workers.min, workers.replicas - 1))


def disruption_budget(job: str, namespace: str, min_available: int, job_labels: dict[str, str], owner: Document) -> Document:
    """Return a job's PodDisruptionBudget. Workers that are not ready may always be evicted, because otherwise a waiting job would
    block a drain. https://kubernetes.io/docs/tasks/run-application/configure-pdb/#unhealthy-pod-eviction-policy"""
    meta = {"name": job, "namespace": namespace, "labels": dict(job_labels), "ownerReferences": [owner]}
    selector = {"matchLabels": labels.selector(job)}
    fields = {"minAvailable": min_available, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
    return kinds.DISRUPTION_BUDGET.document(meta, spec=fields)


def worker_account(job: str) -> str:
    """Return the name of the workers' ServiceAccount, which is also the name of their Role."""
    return f"{job}-worker"


def worker_access(
    job: str, namespace: str, max_workers: int, common: dict[str, str], owner: Document, *, bound_account: str = ""
) -> list[Document]:
    """Return the ServiceAccount, Role and RoleBinding with which a job's workers may write their own Leases and read their job.
    The workers can create no other Leases, because server-side apply, unlike a POST, is authorized with the object's name.
    `bound_account` is the account that gets the rights; it defaults to the returned ServiceAccount."""
    name = worker_account(job)
    meta = {"name": name, "namespace": namespace, "labels": dict(common), "ownerReferences": [owner]}

    def rule(kind: kinds.Kind, verbs: list[str], names: list[str]) -> Document:
        return {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": verbs, "resourceNames": names}

    leases = rule(kinds.LEASE, ["create", "patch"], [contract.worker_name(job, index) for index in range(max_workers)])
    own_job = rule(kinds.ELASTIC_JOB, ["get", "list", "watch"], [job])
    role = {"apiGroup": kinds.ROLE.group, "kind": kinds.ROLE.kind, "name": name}
    subject = {"kind": kinds.SERVICE_ACCOUNT.kind, "name": bound_account or name, "namespace": namespace}
    return [
        kinds.SERVICE_ACCOUNT.document(meta, automountServiceAccountToken=False),
        kinds.ROLE.document(meta, rules=[leases, own_job]),
        kinds.ROLE_BINDING.document(meta, roleRef=role, subjects=[subject]),
    ]
