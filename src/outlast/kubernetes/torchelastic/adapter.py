"""Implements the functions of `api.dropins` for ElasticJobs of `elastic.pytorch.org`; `operator.decide` treats these as jobs
without agents.

The job's fields are translated for `operator.decide`. The resulting status is kept under `job` in the job's own status, whose
other fields are those that the archived controller wrote. Pods and Service belong to the job, so pods of that controller go on
training. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import accelerators, contract
from outlast.job.status import State
from outlast.kubernetes.api import document_parsing
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.scheduling import placement
from outlast.kubernetes.operator import decide, elasticjob_status, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.observed_job import Limits, Plain
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.torchelastic import torchrun_pod
from outlast.kubernetes.torchelastic.definition import definition
from outlast.kubernetes.torchelastic.torchrun_pod import sizes

__all__ = ["definition", "end", "processes", "reconcile", "rival", "scaled", "sizes"]

Document = dict[str, Any]
_CONTROLLER = re.compile(r"(^|/)torchelastic/(kubernetes|elasticjob-controller)\b")
"""Images built from https://github.com/pytorch/elastic/tree/master/kubernetes."""


def processes(job: Document) -> int:
    """Number of processes per worker, from the arguments and variables of torchrun; else 1, the default of torchrun."""
    container: Document = next((each for each in torchrun_pod.containers(job) if each["name"] == torchrun_pod.torchrun(job)), {})
    words = " ".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))
    told = re.search(r"--nproc[-_]per[-_]node[= ](\w+)", words)
    given = next((str(e.get("value")) for e in container.get("env") or () if e["name"] == "PET_NPROC_PER_NODE"), "")
    count = told[1] if told else given
    if count in ("gpu", "auto"):
        limits = (container.get("resources") or {}).get("limits") or {}
        count = next((str(amount) for device, amount in limits.items() if accelerators.is_accelerator(device)), "1")
    return int(count) if count.isdecimal() else 1


def end(job: Document) -> str | None:
    """`Succeeded` or `Failed`; None if the job has not ended. The archived controller wrote only conditions."""
    status = job.get("status") or {}
    told = [each["type"] for each in status.get("conditions") or () if each["status"] == "True"]
    return next((each for each in ("Succeeded", "Failed") if each == status.get("state") or each in told), None)


def scaled(replicas: int) -> Document:
    """The merge patch of a job's spec that changes the number of workers."""
    return {"replicaSpecs": {"Worker": {"replicas": replicas}}}


def rival(deployment: Document) -> bool:
    """Whether a Deployment is the archived controller."""
    images = [each.get("image") or "" for each in deployment["spec"]["template"]["spec"]["containers"]]
    return deployment["metadata"]["name"] == "elastic-job-k8s-controller" or any(map(_CONTROLLER.search, images))


def reconcile(limits: Limits, cached: CachedJob, now: float, _: ClusterFeatures) -> Plan:
    """The plan for one ElasticJob of `elastic.pytorch.org`."""
    assert cached.job is not None, "reconcilers are only called for jobs that exist"
    job, ours = cached.job, None
    if document_parsing.UNREADABLE not in job:
        try:
            ours = plain(job)
        except OutlastError as error:
            job = {**job, document_parsing.UNREADABLE: str(error)}
    if ours is None and cached.pods:
        return Plan()  # it could be read when they were made: they train on
    known = {**job, "status": _remembered(job)}
    seen = observed_job.take(dataclasses.replace(cached, job=known), now, None, limits, plain=ours)
    plan = decide.decide(seen)
    if job["metadata"].get("deletionTimestamp"):
        return plan
    status = _status(job, dict(plan.status or known["status"]), seen)
    return dataclasses.replace(plan, status=status if status != job.get("status") else None)


def plain(job: Document) -> Plain:
    """The job translated for the operator: an equivalent ElasticJob of Outlast whose workers have no agent."""
    least, wanted, most = (min(each, contract.MOST_WORKERS) for each in sizes(job))
    given = {
        "module": "torch.distributed.run",
        "workers": {"min": least, "replicas": wanted, "max": most},
        "restarts": {"limit": torchrun_pod.count(job["spec"], "backoffLimit", torchrun_pod.MAX_RESTARTS)},
        "cleanPodPolicy": "All" if job["spec"].get("cleanPodPolicy") == "All" else "Running",
        # The archived controller's definition accepted a deadline of 0, which means none.
        "activeDeadlineSeconds": job["spec"].get("activeDeadlineSeconds") or None,
        "ttlSecondsAfterFinished": job["spec"].get("ttlSecondsAfterFinished"),
    }
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}}
    ours, make = {**head, "spec": given}, functools.partial(torchrun_pod.pod, job)
    return Plain(ours, torchrun_pod.nnodes(job), torchrun_pod.policy(job), torchrun_pod.service(job), make)


def limits(job: Document) -> Iterator[str]:
    """Sentences about features of a job that the operator cannot honour."""
    fields, worker, name = job["spec"], torchrun_pod.worker(job), job["metadata"]["name"]
    if len(name) > names.LONGEST:
        has = f"the job's name has {len(name)} characters, and labels hold at most {names.LONGEST}"
        yield f"no worker is created: {has}; give it a shorter one"
    asked_for, place = torchrun_pod.annotation(job, torchrun_pod.RENDEZVOUS), fields.get("rdzvEndpoint")
    if place and not asked_for:
        yield f"rdzvEndpoint {place} is not used: workers meet at worker 0 ({torchrun_pod.endpoint(job)})"
    if asked_for and not torchrun_pod.etcd(job):
        need = "it must be etcd" if asked_for != "etcd" else "it needs a rdzvEndpoint, e.g. etcd:2379"
        where = f"workers meet at worker 0 ({torchrun_pod.endpoint(job)})"
        yield f"the annotation {torchrun_pod.RENDEZVOUS} ({asked_for}) is not used: {need}; {where}"
    if (pin := torchrun_pod.annotation(job, torchrun_pod.WORKER0)) not in (None, placement.ON_DEMAND):
        yield f"the annotation {torchrun_pod.WORKER0} ({pin}) is not used: it must be {placement.ON_DEMAND}"
    for kind in fields["replicaSpecs"]:
        if kind == "Master":
            yield (
                "replicaSpecs.Master is not used, its template does not run: torchrun has no master, workers meet at worker 0; "
                "add its replicas to those of replicaSpecs.Worker"
            )
        elif kind != "Worker":
            yield f"replicaSpecs.{kind} is not used: there are workers only"
    if (gang := (fields.get("schedulingPolicy") or {}).get("minAvailable")) is not None:
        yield f"schedulingPolicy.minAvailable ({gang}) is not used: workers start one by one, and training with minReplicas"
    asked, (least, wanted, most) = torchrun_pod.count(worker, "replicas", 1), sizes(job)
    if asked != wanted:
        yield f"replicas ({asked}) is not within minReplicas and maxReplicas ({least} to {most}): {wanted} is used"
    if (own := worker["template"]["spec"].get("restartPolicy")) and own != torchrun_pod.restart_policy(job):
        yield f"restartPolicy {own} of the template is not used: replicaSpecs.Worker.restartPolicy is {torchrun_pod.policy(job)}"
    if torchrun_pod.policy(job) == "Always":
        yield "restartPolicy Always restarts workers that have succeeded, so the job never ends; write ExitCode or OnFailure"
    there = {each["name"]: each for each in torchrun_pod.containers(job)}
    if (told := torchrun_pod.torchrun(job)) is None:
        none = f"none of the containers ({', '.join(there)}) is called {torchrun_pod.CONTAINER}"
        yield f"{none}, so none is set up for torchrun; rename its container"
    elif flags := [arg for arg in there[told].get("args") or () if str(arg).startswith(("--rdzv", "--nnodes"))]:
        yield f"arguments of torchrun override the job: {' '.join(flags)} stay as they are"


def _remembered(job: Document) -> Document:
    """The status as the operator last stored it, or else derived from a status by the archived controller or an earlier
    operator."""
    told = job.get("status") or {}
    if "job" in told:
        return dict(told["job"])
    ended, said = end(job), told.get("conditions") or ()
    times = [told.get("completionTime"), *(each.get("lastTransitionTime") for each in said if each["type"] == ended)]
    found = {
        "state": ended or told.get("state"),
        "startTime": told.get("startTime"),
        "completionTime": next(filter(None, [*times, job["metadata"].get("creationTimestamp")]), None) if ended else None,
        "restarts": told.get("restarts"),
        "judged": {"pods": told.get("judged"), "restarted": told.get("started")},
        "conditions": [each for each in said if each["type"] != "Limited"],
    }
    return {key: value for key, value in found.items() if value is not None}


def _status(job: Document, ours: Document, seen: observed_job.JobSnapshot) -> Document:
    """The status in the form in which the archived controller wrote it, with the operator's own status under `job`."""
    told = job.get("status") or {}
    there = [pod for pod in seen.pods if not pod.terminating]
    counts = {"succeeded": sum(pod.succeeded for pod in there), "failed": sum(pod.over and not pod.succeeded for pod in there)}
    active = len(there) - sum(counts.values())
    if "completionTime" in ours:  # the counts stay when pods are deleted
        before = (told.get("replicaStatuses") or {}).get("Worker") or {}
        counts = {key: max(count, int(before.get(key) or 0)) for key, count in counts.items()}
    state = ours.get("state", State.PENDING)
    return {
        **{key: ours[key] for key in ("startTime", "completionTime") if key in ours},
        "state": "Created" if state == State.PENDING else state,
        "selector": ",".join(f"{key}={value}" for key, value in torchrun_pod.selector(seen.name).items()),
        "replicaStatuses": {"Worker": {"active": active, **counts}},
        "restarts": ours.get("restarts", 0),
        "conditions": _conditions(told.get("conditions") or (), ours, seen),
        "job": ours,
    }


def _conditions(told: Sequence[Document], ours: Document, seen: observed_job.JobSnapshot) -> list[Document]:
    """The operator's conditions, preceded by `Limited` if it applies: the current condition is the last that is true."""
    found = [each for each in ours["conditions"] if each["status"] == "True" or each["type"] == "Running"]
    limited = [*limits(dict(seen.document)), seen.refused] if seen.plain else []
    if message := "; ".join(filter(None, limited)):
        since = next((each["lastTransitionTime"] for each in told if each["type"] == "Limited"), elasticjob_status.text(seen.now))
        said = {"type": "Limited", "status": "True", "reason": "NotHonoured", "message": message}
        found.insert(0, {**said, "lastTransitionTime": since})
    return found
