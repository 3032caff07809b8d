"""The topologies of a job on Kubernetes; each module renders one: `documents(request)`.

    elasticjob     the ElasticJob itself, for the operator
    job            one pod with all the GPUs, a `batch/v1` Job
    indexed-job    one pod per worker, an Indexed Job
    statefulset    one pod per worker, a StatefulSet: for clusters without Jobs

Only the first needs an operator. The others do not scale by themselves, and Kubernetes counts their failures, by exit codes:
progress does not reset the budget for restarts, and `restarts.window` has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.contract import S3_SECRET, Pod
from outlast.kubernetes.manifests import configmaps_and_service, volumes
from outlast.kubernetes.manifests.names import Names, digest
from outlast.kubernetes.manifests.render_request import Document, Request
from outlast.kubernetes.manifests.topologies import elasticjob, indexed_job, single_pod_job, statefulset

TOPOLOGIES: Mapping[str, Callable[[Request], list[Document]]] = {
    "elasticjob": elasticjob.documents,
    "job": single_pod_job.documents,
    "indexed-job": indexed_job.documents,
    "statefulset": statefulset.documents,
}
_OPERATOR_ONLY = ("startup_deadline_seconds", "clean_pod_policy", "managed_by")
_IGNORED = {
    "job": _OPERATOR_ONLY,
    "indexed-job": _OPERATOR_ONLY,
    "statefulset": (*_OPERATOR_ONLY, "active_deadline_seconds", "ttl_seconds_after_finished"),
}
"""Fields that each topology ignores. The first fields of each list are read only by the operator."""


def render(
    job: spec.Job,
    topology: str = "elasticjob",
    *,
    run: str | None = None,
    namespace: str | None = None,
    files: Mapping[str, str] | None = None,
    code: bytes = b"",
    fresh: bool = False,
) -> list[Document]:
    """Return the objects of a job, in the order in which to apply them.

    `run` is the id of this submission; default: a digest of the job, so that the same file is the same run. `files` are the
    contents of the files in `volumes.files`, and `code` is the archive of a job whose code is in a ConfigMap. A `fresh` run
    ignores checkpoints, even if another run has not ended. Raises InvalidJob if the topology cannot render the job, OutlastError
    for an unknown topology.
    """
    if topology == "volcano":
        raise OutlastError("Jobs of Volcano are no more; --as elasticjob with scheduling.gang: volcano has its gangs and queues")
    if topology not in TOPOLOGIES:
        raise OutlastError(f"there is no topology {topology}; choose one of {', '.join(TOPOLOGIES)}")
    documents = TOPOLOGIES[topology]
    if namespace:
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"namespace": namespace})})
    request = Request(job, Names(job.metadata.name), run or _run(job), files or {}, code, fresh)
    # `suspend` may change during a run, but the names of the objects must not.
    draft = documents(request.with_spec(suspend=False))
    named = dataclasses.replace(request, names=Names(job.metadata.name, digest(draft)))
    return [*configmaps_and_service.code(named), *documents(named)]


def warnings(job: spec.Job, topology: str) -> list[str]:
    """Return warnings about a job that can be rendered: output that is lost, and fields that the topology ignores."""
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
    """Return a digest of the job as its pods see it: the same on every machine, whether the job is suspended or not."""
    return f"{job.metadata.name}-{digest(spec.dump(volumes.document(job)))}"
