"""The topologies of a job on Kubernetes. Each is a function that renders a request to documents.

    elasticjob     the ElasticJob itself, for the operator
    job            a `batch/v1` Job with one pod, which has all GPUs and needs no rendezvous
    indexed-job    an Indexed Job with one pod per worker
    statefulset    a StatefulSet with one pod per worker, for clusters whose users may not create Jobs

Without the operator, jobs do not scale by themselves. Kubernetes counts failures by exit code, so progress does not reset the
restart budget, and `restarts.window` has no effect.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.job.contract import S3_SECRET, Env, Pod
from outlast.kubernetes.api import document_parsing, kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels, variables, volumes, worker_pod
from outlast.kubernetes.manifests.names import Names, digest
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE, Document, Request, invalid_job
from outlast.kubernetes.manifests.scheduling import gang, placement


def elasticjob(request: Request) -> list[Document]:
    """Return the ElasticJob and its claims. Raises InvalidJob if the operator could not render the job's pods."""
    job = request.job
    request.image()  # raises InvalidJob
    if files := volumes.files(job.spec):
        raise invalid_job(
            job, f"environment ({files[0]}) is on this machine, which pods do not see; put it into the code, in a store"
        )
    if job.spec.rendezvous.backend == "etcd":
        raise invalid_job(
            job, "rendezvous.backend is etcd, but the operator decides here; leave rendezvous out, or say --as indexed-job"
        )
    document = volumes.document(job).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if job.spec.suspend:
        document["spec"]["suspend"] = True
    if (size := len(json.dumps(document["spec"]))) > document_parsing.MAX_BYTES:
        limit = document_parsing.MAX_BYTES >> 10
        raise invalid_job(job, f"spec takes {size >> 10} KiB; at most {limit} KiB are read: put what is long into the code")
    meta = {**document["metadata"], "labels": {**labels.common(job), **labels.queue_label(job.spec)}}
    if job.metadata.namespace:
        meta["namespace"] = job.metadata.namespace
    if request.fresh:
        meta["annotations"] = {**(meta.get("annotations") or {}), contract.Annotation.FRESH: "true"}
    return [*configmaps_and_service.claims(request), kinds.ELASTIC_JOB.document(meta, spec=document["spec"])]


def single_pod_job(request: Request) -> list[Document]:
    """Return the Job, its ConfigMap and its claims. Raises InvalidJob if the job needs more than one worker."""
    if (least := request.spec.workers.min) > 1:
        raise invalid_job(
            request.job, f"workers.min ({least}) is more than the one pod of this topology; render it as indexed-job"
        )
    request = request.with_zero_as_suspended().limited_to(1)
    worker = worker_pod.Worker(
        index="0",
        rendezvous=_endpoint(request, "localhost"),
        has_peers=False,
        on_demand=request.spec.scheduling.worker0 == placement.ON_DEMAND,
    )
    fields = {**worker_pod.job_limits(request.spec), "template": worker_pod.template(request, worker)}
    return [
        *configmaps_and_service.claims(request, mode="ReadWriteOnce"),
        configmaps_and_service.config(request),
        kinds.JOB.document(labels.workload(request, request.names.workload("-00000")), spec=fields),
    ]


def indexed_job(request: Request) -> list[Document]:
    """Return the Indexed Job and its other objects. `backoffLimitPerIndex` is not used, because its limit would end a single
    index and thereby the world of all workers."""
    placement.reject_on_demand(request, "an Indexed Job")
    request = request.with_zero_as_suspended()
    replicas = request.spec.workers.replicas
    request = request.limited_to(replicas)
    name = request.names.workload(f"-{replicas}")
    pod_group = gang.of(request, name)
    worker = worker_pod.Worker(
        index=variables.field_source("metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        rendezvous=_endpoint(request, _worker_0(request, name)),
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
    workload = kinds.JOB.document(labels.workload(request, name, annotations=_partial_admission(request.spec)), spec=fields)
    return _of_several_pods(request, pod_group, workload)


def _partial_admission(fields: spec.Spec) -> dict[str, str]:
    """Return the annotations that allow Kueue to admit as few as `workers.min` workers
    (https://kueue.sigs.k8s.io/docs/tasks/run/jobs/)."""
    if not labels.queue_label(fields) or fields.workers.min == fields.workers.replicas:
        return {}
    return {
        "kueue.x-k8s.io/job-min-parallelism": str(fields.workers.min),
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    }


def statefulset(request: Request) -> list[Document]:
    """Return the StatefulSet and its other objects.

    Its pods restart whatever their exit code, so a worker that has succeeded keeps running (`contract.Env.STAY`). All pods start
    at once, because a pod becomes ready only in a world with the others. For the same reason there is no rolling update: a change
    takes effect when all pods are deleted together (`kubectl delete pods -l outlast.dev/job=NAME`). `kubectl scale` works from
    `workers.min` to `workers.max`.
    """
    placement.reject_on_demand(request, "a StatefulSet")
    request = request.with_zero_as_suspended()
    name = request.job.metadata.name  # at most 51 characters, and no digest: a StatefulSet is mutable
    pod_group = gang.of(request, name)
    worker = worker_pod.Worker(
        index=variables.field_source("metadata.labels['apps.kubernetes.io/pod-index']"),
        rendezvous=_endpoint(request, _worker_0(request, name)),
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
    return _of_several_pods(request, pod_group, kinds.STATEFUL_SET.document(labels.workload(request, name), spec=fields))


def _endpoint(request: Request, host: str) -> str:
    """Return the endpoint for OUTLAST_RENDEZVOUS where workers meet without an operator, such as `c10d://host:port`: that of the
    job, or worker 0 at `host`. Raises InvalidJob if the job's endpoint cannot be used."""
    rendezvous = request.spec.rendezvous
    if rendezvous.endpoint is None:
        return f"c10d://{host}:{Pod.RENDEZVOUS_PORT}"
    scheme, _, address = rendezvous.endpoint.rpartition("://")
    schemes = contract.SCHEMES[rendezvous.backend]
    if scheme not in schemes:
        allowed = " or ".join(f"{each}://" for each in schemes if each)
        raise invalid_job(
            request.job, f"rendezvous.endpoint ({rendezvous.endpoint}) begins with {scheme}://; write {address}, or {allowed}"
        )
    if rendezvous.backend == "c10d" and address.rpartition(":")[0].split(".")[0] == request.names.service:
        remedy = "leave rendezvous out: it is pod 0 then"
        raise invalid_job(
            request.job, f"rendezvous.endpoint ({address}) is the Service of all pods, and each would be host; {remedy}"
        )
    return f"{schemes[scheme]}://{address.rstrip('/')}"


def _worker_0(request: Request, workload: str) -> str:
    """Return worker 0's full DNS name (https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/). The name of the
    Service would not do, because it resolves to every pod: each would consider itself the store's host and wait forever."""
    return f"{workload}-0.{request.names.service}.$({Env.NAMESPACE}).svc.{contract.CLUSTER_DOMAIN}"


def _of_several_pods(request: Request, pod_group: gang.Gang, workload: Document) -> list[Document]:
    return [
        *configmaps_and_service.claims(request),
        configmaps_and_service.config(request),
        configmaps_and_service.service(request),
        *pod_group.documents,
        workload,
    ]


TOPOLOGIES: Mapping[str, Callable[[Request], list[Document]]] = {
    "elasticjob": elasticjob,
    "job": single_pod_job,
    "indexed-job": indexed_job,
    "statefulset": statefulset,
}
_OPERATOR_ONLY = ("startup_deadline_seconds", "clean_pod_policy", "managed_by")
_IGNORED = {
    "job": _OPERATOR_ONLY,
    "indexed-job": _OPERATOR_ONLY,
    "statefulset": (*_OPERATOR_ONLY, "active_deadline_seconds", "ttl_seconds_after_finished"),
}


def render(
    job: spec.Job,
    topology: str = "elasticjob",
    *,
    run: str | None = None,
    files: Mapping[str, str] | None = None,
    code: bytes = b"",
    fresh: bool = False,
    agent_image: str = OPERATOR_IMAGE,
) -> list[Document]:
    """Return a job's objects, in the order to apply them.

    `run` identifies this submission and defaults to a digest of the job. `files` has the contents of the files that
    `volumes.files` lists, keyed by path, and `code` is the archive for a ConfigMap. A `fresh` run ignores checkpoints. Pods whose
    image has no Outlast copy it from `agent_image`. Raises InvalidJob if the topology cannot render the job, and OutlastError for
    an unknown topology.
    """
    if topology not in TOPOLOGIES:
        raise OutlastError(f"there is no topology {topology}; choose one of {', '.join(TOPOLOGIES)}")
    documents = TOPOLOGIES[topology]
    request = Request(job, Names(job.metadata.name), run or _run(job), files or {}, code, fresh, agent_image)
    # `suspend` may change during a run, but the names of the objects must not.
    draft = documents(request.with_spec(suspend=False))
    named = dataclasses.replace(request, names=Names(job.metadata.name, digest(draft)))
    return [*configmaps_and_service.code(named), *documents(named)]


def warnings(job: spec.Job, topology: str) -> list[str]:
    """Return warnings about lost output, missing credentials, and fields that the topology ignores."""
    sentences = []
    if volumes.output_is_lost(job):
        sentences.append(
            f"output is neither in a store nor on a volume at {Pod.OUTPUT}; what pods save ends with them; give output: "
            f"s3://bucket/runs, or volumes: [{{claim: NAME, to: {Pod.OUTPUT}}}]"
        )
    if places := volumes.urls_without_credentials(job.spec):
        sentences.append(
            f"pods are given no credentials for {', '.join(places)}: env, secrets and serviceAccountName are empty; "
            f"unless the role of their nodes may use it: {S3_SECRET}"
        )
    for name, field in spec.Spec.model_fields.items():
        if name in _IGNORED.get(topology, ()) and getattr(job.spec, name) != field.default:
            sentences.append(f"{field.alias} has no meaning in the topology {topology}")
    return sentences


def _run(job: spec.Job) -> str:
    return f"{job.metadata.name}-{digest(spec.dump(volumes.document(job)))}"
