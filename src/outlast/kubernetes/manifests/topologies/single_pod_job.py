"""One pod with all the GPUs: a `batch/v1` Job. The simplest topology, without rendezvous."""

from __future__ import annotations

from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels, rendezvous_endpoint, variables, worker_pod
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job
from outlast.kubernetes.manifests.scheduling import placement


def documents(request: Request) -> list[Document]:
    """Return the Job and its ConfigMap. Raises InvalidJob if the job needs more than one worker."""
    if request.spec.workers.min > 1:
        least = request.spec.workers.min
        raise invalid_job(
            request.job, f"workers.min ({least}) is more than the one pod of this topology; render it as indexed-job"
        )
    request = request.with_zero_as_suspended().limited_to(1)
    worker = worker_pod.Worker(
        index=variables.literal_source("0"),
        rendezvous=rendezvous_endpoint.single_worker_endpoint(request),
        has_peers=False,
        on_demand=request.spec.scheduling.worker0 == placement.ON_DEMAND,
    )
    fields = {**worker_pod.job_limits(request.spec), "template": worker_pod.template(request, worker)}
    return [
        *configmaps_and_service.claims(request, mode="ReadWriteOnce"),
        configmaps_and_service.config(request),
        kinds.JOB.document(labels.workload(request, request.names.workload("-00000")), spec=fields),
    ]
