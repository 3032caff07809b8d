"""Implements the functions of `api.dropins` for ElasticJobs of `elastic.pytorch.org`. Pure.

A job is translated to an Outlast ElasticJob without agents, for `operator.decide`. The original job's status has the fields of
the archived controller, and the operator's own status under `job`. Pods that the archived controller created continue to train.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import yaml

from outlast.base.errors import OutlastError
from outlast.job import accelerators, contract
from outlast.job.status import State
from outlast.kubernetes.api import document_parsing, pod_status
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.scheduling import placement
from outlast.kubernetes.operator import decide, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.observed_job import Limits, PlainJob
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.torchelastic import torchrun_pod
from outlast.kubernetes.torchelastic.torchrun_pod import sizes

__all__ = ["definition", "final_state", "is_replaced_controller", "processes", "reconcile", "scale_patch", "sizes"]

Document = dict[str, Any]
_CONTROLLER = re.compile(r"(^|/)torchelastic/(kubernetes|elasticjob-controller)\b")
"""Matches images built from https://github.com/pytorch/elastic/tree/master/kubernetes."""


def definition() -> Document:
    document: Document = yaml.safe_load(resources.files(__package__).joinpath("definition.yaml").read_text())
    return document


def processes(job: Document) -> int:
    """Return the number of processes per worker, from torchrun's arguments and variables."""
    container: Document = next((each for each in torchrun_pod.containers(job) if each["name"] == torchrun_pod.torchrun(job)), {})
    words = " ".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))
    argument = re.search(r"--nproc[-_]per[-_]node[= ](\w+)", words)
    variable = next((str(e.get("value")) for e in container.get("env") or () if e["name"] == "PET_NPROC_PER_NODE"), "")
    count = argument[1] if argument else variable
    if count in ("gpu", "auto"):
        limits = (container.get("resources") or {}).get("limits") or {}
        count = next((str(amount) for device, amount in limits.items() if accelerators.is_accelerator(device)), "1")
    return int(count) if count.isdecimal() else 1


def final_state(job: Document) -> str | None:
    """Return `Succeeded` or `Failed`, or None if the job has not ended. Conditions are read, too, because the archived controller
    wrote no state."""
    status = job.get("status") or {}
    true_conditions = [each["type"] for each in status.get("conditions") or () if each["status"] == "True"]
    return next((each for each in ("Succeeded", "Failed") if each == status.get("state") or each in true_conditions), None)


def scale_patch(replicas: int) -> Document:
    return {"replicaSpecs": {"Worker": {"replicas": replicas}}}


def is_replaced_controller(deployment: Document) -> bool:
    """Return whether a Deployment is the archived controller."""
    images = [each.get("image") or "" for each in deployment["spec"]["template"]["spec"]["containers"]]
    return deployment["metadata"]["name"] == "elastic-job-k8s-controller" or any(map(_CONTROLLER.search, images))


def reconcile(limits: Limits, cached: CachedJob, now: float, _: ClusterFeatures) -> Plan:
    assert cached.job is not None, "reconcilers are only called for jobs that exist"
    job, translated = cached.job, None
    if document_parsing.UNREADABLE not in job:
        try:
            translated = translate(job)
        except OutlastError as error:
            job = {**job, document_parsing.UNREADABLE: str(error)}
    if translated is None and cached.pods:
        return Plan()  # the job was readable when its pods were created: they continue
    job_with_status = {**job, "status": _stored_status(job)}
    snapshot = observed_job.take_snapshot(dataclasses.replace(cached, job=job_with_status), now, None, limits, plain=translated)
    plan = decide.decide(snapshot)
    if job["metadata"].get("deletionTimestamp"):
        return plan
    status = _status(job, dict(plan.status or job_with_status["status"]), snapshot)
    return dataclasses.replace(plan, status=status if status != job.get("status") else None)


def translate(job: Document) -> PlainJob:
    """Translate the job to an equivalent Outlast ElasticJob whose workers have no agent."""
    minimum, replicas, maximum = (min(each, contract.MOST_WORKERS) for each in sizes(job))
    spec = {
        "module": "torch.distributed.run",
        "workers": {"min": minimum, "replicas": replicas, "max": maximum},
        "restarts": {"limit": torchrun_pod.count(job["spec"], "backoffLimit", torchrun_pod.MAX_RESTARTS)},
        "cleanPodPolicy": "All" if job["spec"].get("cleanPodPolicy") == "All" else "Running",
        # The archived controller's definition accepted a deadline of 0, which means none.
        "activeDeadlineSeconds": job["spec"].get("activeDeadlineSeconds") or None,
        "ttlSecondsAfterFinished": job["spec"].get("ttlSecondsAfterFinished"),
    }
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}}
    elastic_job, make_pod = {**head, "spec": spec}, functools.partial(torchrun_pod.pod, job)
    return PlainJob(elastic_job, torchrun_pod.nnodes(job), torchrun_pod.policy(job), torchrun_pod.service(job), make_pod)


def unsupported(job: Document) -> Iterator[str]:
    """Yield sentences about a job's features that the operator does not support."""
    fields, worker, name = job["spec"], torchrun_pod.worker(job), job["metadata"]["name"]
    if len(name) > names.MAX_LENGTH:
        problem = f"the job's name has {len(name)} characters, and labels hold at most {names.MAX_LENGTH}"
        yield f"no worker is created: {problem}; give it a shorter one"
    backend, place = torchrun_pod.annotation(job, torchrun_pod.RENDEZVOUS), fields.get("rdzvEndpoint")
    if place and not backend:
        yield f"rdzvEndpoint {place} is not used: workers meet at worker 0 ({torchrun_pod.endpoint(job)})"
    if backend and not torchrun_pod.etcd(job):
        requirement = "it must be etcd" if backend != "etcd" else "it needs a rdzvEndpoint, e.g. etcd:2379"
        where = f"workers meet at worker 0 ({torchrun_pod.endpoint(job)})"
        yield f"the annotation {torchrun_pod.RENDEZVOUS} ({backend}) is not used: {requirement}; {where}"
    if (node_kind := torchrun_pod.annotation(job, torchrun_pod.WORKER0)) not in (None, placement.ON_DEMAND):
        yield f"the annotation {torchrun_pod.WORKER0} ({node_kind}) is not used: it must be {placement.ON_DEMAND}"
    for kind in fields["replicaSpecs"]:
        if kind != "Worker":
            yield f"replicaSpecs.{kind} is not used: torchrun has workers only; add its replicas to those of replicaSpecs.Worker"
    if (gang := (fields.get("schedulingPolicy") or {}).get("minAvailable")) is not None:
        yield f"schedulingPolicy.minAvailable ({gang}) is not used: workers start one by one, and training with minReplicas"
    requested, (minimum, used, maximum) = torchrun_pod.count(worker, "replicas", 1), sizes(job)
    if requested != used:
        yield f"replicas ({requested}) is not within minReplicas and maxReplicas ({minimum} to {maximum}): {used} is used"
    policy, template_policy = torchrun_pod.policy(job), worker["template"]["spec"].get("restartPolicy")
    if template_policy and template_policy != torchrun_pod.restart_policy(job):
        yield f"restartPolicy {template_policy} of the template is not used: replicaSpecs.Worker.restartPolicy is {policy}"
    if policy == "Always":
        yield "restartPolicy Always restarts workers that have succeeded, so the job never ends; write ExitCode or OnFailure"
    by_name = {each["name"]: each for each in torchrun_pod.containers(job)}
    if (container_name := torchrun_pod.torchrun(job)) is None:
        problem = f"none of the containers ({', '.join(by_name)}) is called {torchrun_pod.CONTAINER}"
        yield f"{problem}, so none is set up for torchrun; rename its container"
    elif flags := [arg for arg in by_name[container_name].get("args") or () if str(arg).startswith(("--rdzv", "--nnodes"))]:
        yield f"arguments of torchrun override the job: {' '.join(flags)} stay as they are"


def _stored_status(job: Document) -> Document:
    """Return the status that the operator has stored, or else one that is derived from what earlier controllers wrote."""
    status = job.get("status") or {}
    if "job" in status:
        return dict(status["job"])
    ended, conditions = final_state(job), status.get("conditions") or ()
    times = [status.get("completionTime"), *(each.get("lastTransitionTime") for each in conditions if each["type"] == ended)]
    derived = {
        "state": ended or status.get("state"),
        "startTime": status.get("startTime"),
        "completionTime": next(filter(None, [*times, job["metadata"].get("creationTimestamp")]), None) if ended else None,
        "restarts": status.get("restarts"),
        "judged": {"pods": status.get("judged"), "restarted": status.get("started")},
        "conditions": [each for each in conditions if each["type"] != "Limited"],
    }
    return {key: value for key, value in derived.items() if value is not None}


def _status(job: Document, operator_status: Document, snapshot: observed_job.JobSnapshot) -> Document:
    old_status = job.get("status") or {}
    pods = [pod for pod in snapshot.pods if not pod.terminating]
    counts = {"succeeded": sum(pod.succeeded for pod in pods), "failed": sum(pod.ended and not pod.succeeded for pod in pods)}
    active = len(pods) - sum(counts.values())
    if "completionTime" in operator_status:  # counts do not decrease when pods are deleted
        old_counts = (old_status.get("replicaStatuses") or {}).get("Worker") or {}
        counts = {key: max(count, int(old_counts.get(key) or 0)) for key, count in counts.items()}
    state = operator_status.get("state", State.PENDING)
    return {
        **{key: operator_status[key] for key in ("startTime", "completionTime") if key in operator_status},
        "state": "Created" if state == State.PENDING else state,
        "selector": ",".join(f"{key}={value}" for key, value in torchrun_pod.selector(snapshot.name).items()),
        "replicaStatuses": {"Worker": {"active": active, **counts}},
        "restarts": operator_status.get("restarts", 0),
        "conditions": _conditions(old_status.get("conditions") or (), operator_status, snapshot),
        "job": operator_status,
    }


def _conditions(
    old_conditions: Sequence[Document], operator_status: Document, snapshot: observed_job.JobSnapshot
) -> list[Document]:
    """Return the operator's conditions, preceded by `Limited` if the operator cannot do all that the job asks for. `Limited`
    comes first, because clients read the last true condition."""
    conditions = [each for each in operator_status["conditions"] if each["status"] == "True" or each["type"] == "Running"]
    messages = [*unsupported(dict(snapshot.document)), snapshot.refusal] if snapshot.plain else []
    if message := "; ".join(filter(None, messages)):
        since = next(
            (each["lastTransitionTime"] for each in old_conditions if each["type"] == "Limited"), pod_status.rfc3339(snapshot.now)
        )
        limited = {"type": "Limited", "status": "True", "reason": "NotHonoured", "message": message}
        conditions.insert(0, {**limited, "lastTransitionTime": since})
    return conditions
