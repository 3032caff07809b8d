"""Renders a job's pods and the objects that they need. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from outlast.job import contract, spec
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.manifests import configmaps_and_service, labels, names, topologies, volumes, worker_pod
from outlast.kubernetes.manifests.render_request import Request
from outlast.kubernetes.manifests.scheduling import gang, kueue, placement
from outlast.kubernetes.manifests.scheduling.kueue import Priority
from outlast.kubernetes.operator.observed_job import JobSnapshot

Document = dict[str, Any]


def prerequisites(snapshot: JobSnapshot) -> tuple[Document, ...]:
    """Return the objects that must exist before the first pod. Raises InvalidJob."""
    request = _request(snapshot)
    topologies.elasticjob(request)  # validates jobs from kubectl, which `outlast submit` has not checked
    worker = worker_pod.pod(request, _worker(snapshot, request), index=0, generation=0, file="")
    return (
        *configmaps_and_service.claims(request),  # claims have no owner, as they may hold data that other jobs need
        *_worker_access(snapshot, request, bound_account=worker["spec"].get("serviceAccountName") or "default"),
        _with_owner(snapshot, configmaps_and_service.service(request)),
        _budget(snapshot, request),
        *(_with_owner(snapshot, document) for document in _gang(snapshot, request).documents),
    )


def updated_prerequisites(snapshot: JobSnapshot) -> tuple[Document, ...]:
    """Return the prerequisites that depend on the number of workers."""
    request = _request(snapshot)
    return (
        *(document for document in _worker_access(snapshot, request) if document["kind"] == "Role"),
        _budget(snapshot, request),
        *(_with_owner(snapshot, document) for document in _gang(snapshot, request).documents),
    )


def workload(snapshot: JobSnapshot, kind: Kind, name: str, count: int, min_count: int, priority: Priority) -> Document:
    """Return a Workload that requests quota for `count` workers; see `manifests.scheduling.kueue`."""
    request = _request(snapshot)
    meta = labels.metadata(request, name)
    meta["labels"] = {**meta["labels"], kueue.JOB_UID: snapshot.uid}
    template = worker_pod.template(request, _worker(snapshot, request))
    queue = kueue.queue_name(snapshot.document)
    document = kueue.workload(kind, meta, queue=queue, template=template, count=count, min_count=min_count, priority=priority)
    return _with_owner(snapshot, document)


def workers(snapshot: JobSnapshot, indices: Sequence[int], generation: int, avoid: Sequence[str]) -> Iterator[Document]:
    """Yield the pods of these workers. They prefer nodes that are not in `avoid`."""
    if snapshot.plain is not None:
        yield from (snapshot.plain.pod(index) for index in indices)
        return
    # Not in the template of a Kueue Workload, which must not change once quota is reserved.
    key_required = _annotations(snapshot).get(contract.Annotation.KEY) == snapshot.uid
    request = dataclasses.replace(_request(snapshot), key_required=key_required)
    file = volumes.job_file(request.job)  # dumping YAML is the slowest part of this
    for index in indices:
        pod = worker_pod.pod(request, _worker(snapshot, request, index), index=index, generation=generation, file=file)
        document = _with_owner(snapshot, pod)
        document["spec"]["hostname"] = document["metadata"]["name"]  # without it, the pod has no DNS name behind the Service
        if avoid:
            _prefer_other_nodes(document["spec"], avoid)
        yield document


def checkpoints_url(job: spec.Job) -> str:
    store = volumes.store_url(job)
    return f"{store}/{contract.CHECKPOINTS}" if store else ""


def _request(snapshot: JobSnapshot) -> Request:
    assert snapshot.job is not None
    job = snapshot.job
    if job.spec.rendezvous.backend == "etcd":  # in a job from kubectl; the operator decides anyway
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"rendezvous": spec.Rendezvous()})})
    fresh = _annotations(snapshot).get(contract.Annotation.FRESH) == "true"
    image = snapshot.limits.agent_image
    return Request(job, names.Names(snapshot.name), snapshot.run, agent_image=image, job_file_in_annotation=True, fresh=fresh)


def _annotations(snapshot: JobSnapshot) -> dict[str, str]:
    return snapshot.document["metadata"].get("annotations") or {}


def _worker(snapshot: JobSnapshot, request: Request, index: int = 0) -> worker_pod.Worker:
    return worker_pod.Worker(
        index=str(index),
        rendezvous=f"{contract.KUBERNETES}{snapshot.name}",
        subdomain=request.names.service,
        account=configmaps_and_service.worker_account(snapshot.name),
        gang=_gang(snapshot, request),
        on_demand=index == 0 and request.spec.scheduling.worker0 == placement.ON_DEMAND,
    )


def _gang(snapshot: JobSnapshot, request: Request) -> gang.Gang:
    return gang.of(request, snapshot.name, snapshot.gang)


def _worker_access(snapshot: JobSnapshot, request: Request, *, bound_account: str = "") -> list[Document]:
    # Workers that are still saving before they leave need their Leases, even if fewer workers are desired now.
    world = snapshot.status.world.members if snapshot.status.world else ()
    max_workers = max([request.spec.workers.max, *(1 + index for index in (*(pod.index for pod in snapshot.pods), *world))])
    return configmaps_and_service.worker_access(
        snapshot.name, _namespace(snapshot), max_workers, labels.common(request.job), snapshot.owner, bound_account=bound_account
    )


def _budget(snapshot: JobSnapshot, request: Request) -> Document:
    min_available = configmaps_and_service.min_available(request.spec.workers)
    return configmaps_and_service.disruption_budget(
        snapshot.name, _namespace(snapshot), min_available, labels.common(request.job), snapshot.owner
    )


def _namespace(snapshot: JobSnapshot) -> str:
    return str(snapshot.document["metadata"]["namespace"])


def _with_owner(snapshot: JobSnapshot, document: Document) -> Document:
    meta = {**document["metadata"], "namespace": _namespace(snapshot), "ownerReferences": [snapshot.owner]}
    return {**document, "metadata": meta}


_LOOSE_SKEW = 1000
"""A large maxSkew makes the scheduler care less about an even spread of pods."""


def _prefer_other_nodes(pod: Document, nodes: Sequence[str]) -> None:
    """Make a pod prefer other nodes. It does not require them, because it would stay pending if there were none."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    preferred = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    preferred.append({"weight": 100, "preference": {"matchFields": fields}})
    for spread in pod.get("topologySpreadConstraints", ()):
        if spread["whenUnsatisfiable"] == "ScheduleAnyway":  # it would pull just as strongly to the node whose worker is gone
            spread["maxSkew"] = _LOOSE_SKEW
