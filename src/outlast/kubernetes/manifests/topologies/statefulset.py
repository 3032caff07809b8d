"""One pod per worker: a StatefulSet, for clusters whose users may not create Jobs.

Its pods restart whatever their exit code, so a worker that has succeeded keeps running (`contract.Env.STAY`). All pods start at
once: if they started in order, the first would wait for the others to form a world with it, and the others would not start before
the first is ready. A change takes effect when the pods are deleted, all together (`kubectl delete pods -l outlast.dev/job=NAME`):
a rolling update would wait until one new pod is ready, and that pod needs a world with the others to become ready.

`kubectl scale` works from `workers.min` to `workers.max`.
"""

from __future__ import annotations

from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels, rendezvous_endpoint, variables, worker_pod
from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.kubernetes.manifests.scheduling import gang, placement

_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def documents(request: Request) -> list[Document]:
    """Return the StatefulSet, its ConfigMap, its Service and claims, and the PodGroup of a gang."""
    placement.reject_on_demand(request, "a StatefulSet")
    request = request.with_zero_as_suspended()
    name = request.job.metadata.name  # at most 51 characters, and no digest: a StatefulSet is mutable
    pod_group = gang.of(request, name)
    worker = worker_pod.Worker(
        index=variables.field_source(_INDEX),
        rendezvous=rendezvous_endpoint.endpoint(request, f"{name}-0", request.names.service),
        restart="Always",
        stay=True,
        gang=pod_group,
    )
    fields = {
        "serviceName": request.names.service,
        "replicas": 0 if request.spec.suspend else request.spec.workers.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": labels.selector(name)},
        "template": worker_pod.template(request, worker),
    }
    return [
        *configmaps_and_service.claims(request),
        configmaps_and_service.config(request),
        configmaps_and_service.service(request),
        *pod_group.documents,
        kinds.STATEFUL_SET.document(labels.workload(request, name), spec=fields),
    ]
