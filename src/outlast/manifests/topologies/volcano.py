"""One pod per worker, gang-scheduled: a Job of Volcano (https://volcano.sh/en/docs/vcjob/).

Volcano creates the PodGroup of the Job from `minAvailable` and `queue`, and its plugin `svc` the headless Service. Every restart
of a pod counts towards `maxRetry`, also after an interruption: Volcano has no action that does not count.
"""

from __future__ import annotations

from outlast import contract
from outlast.manifests import gang, labels, objects, pods, rendezvous, scheduling, variables
from outlast.manifests.request import Document, Request, wrong

_INDEX = "metadata.annotations['volcano.sh/task-index']"
_TASK = "worker"


def documents(request: Request) -> list[Document]:
    """The Job and its ConfigMap. Raises InvalidJob for a suspended job: Volcano has no field for that."""
    if request.spec.suspend:
        raise wrong(request.job, "suspend is true, and no Job of Volcano begins so; remove it, and use vcctl job suspend")
    if not request.spec.workers.replicas:
        raise wrong(request.job, "workers.replicas (0) suspends the job, and no Job of Volcano begins so; say how many")
    scheduling.refuse_pin(request, "a Job of Volcano")
    ganged = request.spec.scheduling.model_copy(update={"gang": "volcano"})
    request = request.at_most(request.spec.workers.replicas).but(scheduling=ganged)
    workers = request.spec.workers
    name = request.names.workload(f"-{_TASK}-{workers.replicas}")
    worker = pods.Worker(
        index=variables.of_field(_INDEX),
        rendezvous=rendezvous.endpoint(request, f"{name}-{_TASK}-0", name),
        gang=gang.Gang(scheduler="volcano"),
    )
    # A Job of Volcano fails with the maxRetry-th restart, and 0 would mean 3.
    limits: Document = {"maxRetry": request.spec.restarts.limit + 1}
    if request.spec.ttl_seconds_after_finished is not None:
        limits["ttlSecondsAfterFinished"] = request.spec.ttl_seconds_after_finished
    return [
        *objects.claims(request),
        objects.config(request),
        {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": labels.workload(request, name),
            "spec": {
                "schedulerName": "volcano",
                "minAvailable": workers.min,
                **gang.volcano_queue(request.spec),
                **limits,
                "plugins": {"svc": ["--publish-not-ready-addresses=true", "--disable-network-policy=true"]},
                "policies": _policies(),
                "tasks": [
                    {
                        "name": _TASK,
                        "replicas": workers.replicas,
                        "minAvailable": workers.min,
                        "template": pods.template(request, worker),
                    }
                ],
            },
        },
    ]


def _policies() -> list[Document]:
    """The first match applies: misconfiguration ends the job, anything else replaces the pod."""
    return [
        {"exitCode": contract.Exit.MISCONFIGURED.value, "action": "TerminateJob"},
        {"exitCode": contract.Exit.GIVEN_UP.value, "action": "TerminateJob"},
        {"event": "PodEvicted", "action": "RestartPod"},
        {"event": "PodFailed", "action": "RestartPod"},
        {"event": "TaskCompleted", "action": "CompleteJob"},
    ]
