"""Downloads a dataset to a claim or a store, in a pod on a cluster."""

from __future__ import annotations

from outlast.base.errors import Absent, OutlastError
from outlast.job import ownership
from outlast.job.contract import Label
from outlast.kubernetes.api import kinds
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.jobs.job_documents import Workloads
from outlast.kubernetes.manifests import dataset_job


def get(workloads: Workloads, request: dataset_job.Download) -> str:
    """Create the Job that downloads a dataset, and return a sentence about it. An earlier Job that has ended is replaced. Raises
    OutlastError."""
    cluster, document = workloads.cluster, dataset_job.document(request)
    if not cluster.has_namespace():
        raise workloads.no_namespace()
    name, (to, claim, _) = request.name, request.target()
    if claim and cluster.find(kinds.CLAIM, claim) is None:
        raise Absent(
            f"there is no claim {claim} in namespace {cluster.namespace}; create it, or choose another (--claim NAME:/PATH)"
        )
    existing = cluster.find(kinds.JOB, name)
    ownership.check(
        existing,
        {Label.DATASET: name},
        instead="bring the dataset to another namespace (-n), or have that Job renamed or removed",
    )
    if existing is not None:
        command = existing["spec"]["template"]["spec"]["containers"][0].get("command") or [""]
        if job_status.final_state(existing) is None:
            if command == document["spec"]["template"]["spec"]["containers"][0]["command"]:
                return f"Job {name} brings it already"
            raise OutlastError(
                f"Job {name} brings it to another place ({command[-1]}); wait for its end, or: outlast cancel {name}"
            )
        workloads.delete(kinds.JOB, existing, grace_s=None)
        workloads.wait_until_gone(kinds.JOB, existing)
    document["metadata"]["namespace"] = cluster.namespace
    cluster.create(document)
    return f"Job {name} brings {request.dataset.partition('#')[0]} to {to}"
