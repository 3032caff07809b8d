"""One pod per worker: an Indexed Job, and a headless Service.

A worker that fails is replaced by a worker with the same index. `backoffLimitPerIndex` is not used: it would end one index, and
with it the world of all other workers.
"""

from __future__ import annotations

from outlast.job import spec
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels, rendezvous_endpoint, variables, worker_pod
from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.kubernetes.manifests.scheduling import gang, placement

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(request: Request) -> list[Document]:
    """Return the Job, its ConfigMap and its Service, and the PodGroup of a gang."""
    placement.reject_on_demand(request, "an Indexed Job")
    request = request.with_zero_as_suspended()
    replicas = request.spec.workers.replicas
    request = request.limited_to(replicas)
    name = request.names.workload(f"-{replicas}")
    pod_group = gang.of(request, name)
    worker = worker_pod.Worker(
        index=variables.field_source(_INDEX),
        rendezvous=rendezvous_endpoint.endpoint(request, f"{name}-0", request.names.service),
        subdomain=request.names.service,
        gang=pod_group,
    )
    fields = {
        "completionMode": "Indexed",
        "completions": replicas,
        "parallelism": replicas,
        **worker_pod.job_limits(request.spec),
        "template": worker_pod.template(request, worker),
    }
    return [
        *configmaps_and_service.claims(request),
        configmaps_and_service.config(request),
        configmaps_and_service.service(request),
        *pod_group.documents,
        kinds.JOB.document(labels.workload(request, name, annotations=_partial_admission(request.spec)), spec=fields),
    ]


def _partial_admission(fields: spec.Spec) -> dict[str, str]:
    """Return the annotation with which Kueue may admit a part of the workers, down to `min`:
    https://kueue.sigs.k8s.io/docs/tasks/run/jobs/."""
    if not labels.queue_label(fields) or fields.workers.min == fields.workers.replicas:
        return {}
    return {
        "kueue.x-k8s.io/job-min-parallelism": str(fields.workers.min),
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    }
