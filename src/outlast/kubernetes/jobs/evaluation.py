"""Runs a job's module with `--evaluate` on a cluster, in a separate pod."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from outlast.base.backoff import RANDOM
from outlast.base.errors import OutlastError
from outlast.job import ownership
from outlast.job.contract import Label
from outlast.job.logs import LogLine
from outlast.kubernetes import api, manifests
from outlast.kubernetes.api import apply_documents, dropins, kinds, pod_status, workload_template
from outlast.kubernetes.jobs import job_status, parcel
from outlast.kubernetes.jobs import logs as podlogs
from outlast.kubernetes.jobs.job_documents import Workloads, has_claim, job_name, workload_in
from outlast.kubernetes.manifests import evaluation_job, worker_pod

Document = api.Document


def evaluate(workloads: Workloads, name: str, args: Sequence[str], *, show: Callable[[LogLine], None]) -> int:
    """Run the job's module with `--evaluate` in a separate pod, show the pod's log, and return its exit code."""
    cluster, workload = workloads.cluster, workloads.existing(name)[0]
    if dropins.has(workload):
        raise OutlastError(f"{name} is of {workload['apiVersion']} and has a script of its own; evaluate with that")
    if not has_claim(workload) and not workloads.store_url(name):
        raise OutlastError(f"the output of {name} is in its pods only; give it one in a store, or a volume, and train again")
    unique = f"{RANDOM.getrandbits(32):08x}"
    job = cluster.create(evaluation_job.document(name, _template(workloads, workload), args, unique=unique))
    title = job["metadata"]["name"]
    print(f"outlast | Job {title} evaluates {name}", file=sys.stderr, flush=True)

    def over() -> bool:
        return job_status.final_state(cluster.get(kinds.JOB, title)) is not None

    def say(sentence: str) -> None:
        print(f"outlast | {sentence.replace('worker 0', 'the evaluation')}", file=sys.stderr, flush=True)

    labels = f"batch.kubernetes.io/job-name={title}"
    try:
        for line in podlogs.Follower(cluster, labels, over, say=say).lines():
            show(line)
    except KeyboardInterrupt:
        cluster.delete(kinds.JOB, title)
        raise
    ends = [end for pod in cluster.list_(kinds.POD, labels=labels) if (end := pod_status.end(pod)) is not None]
    if not ends:
        raise OutlastError(f"Job {title} ended without a pod; look at it with: kubectl describe job {title}")
    return ends[-1].code if ends[-1].code >= 0 else 1


def _template(workloads: Workloads, workload: Document) -> Document:
    """Return the workers' pod template. Raises OutlastError if the job file comes from another version of Outlast."""
    if workload["kind"] != "ElasticJob":
        return workload_template.template(workload)
    if (job := workloads.job(workload)) is None:
        raise OutlastError(
            f"the job file of {job_name(workload)} is of another version of Outlast; install that, or this one there"
        )
    single_worker = {
        "workers": job.spec.workers.model_copy(update={"min": 1, "replicas": 1, "max": 1, "step": None, "sizes": None})
    }
    run = str((workload.get("status") or {}).get("run") or "") or None
    single = job.model_copy(update={"spec": job.spec.model_copy(update=single_worker)})
    documents = manifests.render(single, "job", run=run, agent_image=_agent_image(workloads.own_pods(workload)))
    for document in documents:
        if kinds.kind_of(document) is kinds.CONFIG_MAP:
            old = apply_documents.existing(workloads.cluster, document)
            ownership.check(old, {Label.JOB: job_name(workload)}, instead="have it renamed or removed")
            workloads.adopt(apply_documents.apply(workloads.cluster, document, old=old).new, workload)
    template: Document = workload_in(documents)["spec"]["template"]
    return template


def _agent_image(pods: Sequence[Document]) -> str:
    """Return the image from which the job's pods have copied Outlast: the operator's, which only the operator knows."""
    containers = [each for pod in pods for each in pod["spec"].get("initContainers") or ()]
    return next((str(each["image"]) for each in containers if each["name"] == worker_pod.AGENT), parcel.operator_image())
