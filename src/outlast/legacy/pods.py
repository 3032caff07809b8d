"""ElasticJobs of `elastic.pytorch.org/v1alpha1`: their CustomResourceDefinition, and the pods and the Service of a job.

They are the jobs of torchelastic's archived controller and work unchanged. A pod's container runs plain `torchrun`, configured by
its variables (`PET_*`); those that the user has set stay. Worker 0 hosts torch's store, so no etcd is needed. A job whose image
contains Outlast can use its etcd (`RENDEZVOUS`): torch's own backends speak v2, which etcd 3.6 no longer has.

https://github.com/pytorch/elastic/tree/master/kubernetes
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outlast import accelerators, contract
from outlast.contract import Label
from outlast.kube import ownership
from outlast.kube.kinds import LEGACY_JOB
from outlast.manifests import cel, crd, disruption, names, objects, scheduling
from outlast.manifests.crd import Schema
from outlast.manifests.request import Document

CONTAINER = "elasticjob-worker"
"""Name of the container that runs torchrun, if there are several."""
NNODES = f"{contract.GROUP}/nnodes"
"""Annotation of a pod: --nnodes of its torchrun, `1:4`. Workers with different values do not find each other."""
RENDEZVOUS = f"{contract.GROUP}/rendezvous"
"""Annotation of a job: `etcd` for a rendezvous at its rdzvEndpoint, an etcd v3, with `--rdzv-backend=outlast`."""
WORKER0 = f"{contract.GROUP}/worker-0"
"""Annotation of a job: `on-demand` for a worker 0, where the others meet, that runs on no spot machine."""
MAX_RESTARTS = 100
"""--max-restarts of torchrun, and the default of backoffLimit."""
_PORT = contract.Pod.RENDEZVOUS_PORT
_CONF = {
    "last_call_timeout": 5,  # s that a world of fewer than maxReplicas waits for more; torch: 30
    "join_timeout": 600,
    "read_timeout": 300,  # s for worker 0 to be there: images take time to come; torch: 60
    "keep_alive_interval": 1,  # s; with the next line a lost worker is missed after 5 s and not 15
    "keep_alive_max_attempt": 5,
}
"""https://docs.pytorch.org/docs/stable/elastic/rendezvous.html; torch before 2.9 does not know the last two, and ignores them."""


# ------------------------------------------------------------------------------------------------------------ a job's fields


def workers(job: Mapping[str, Any]) -> Document:
    """`replicaSpecs.Worker`; empty if the spec cannot be read (`wire.UNREADABLE`)."""
    found: Document = (job["spec"].get("replicaSpecs") or {"Worker": {"template": {"spec": {"containers": []}}}})["Worker"]
    return found


def sizes(job: Mapping[str, Any]) -> tuple[int, int, int]:
    """Minimum, wanted (in between, or 0) and maximum number of workers."""
    asked = int(workers(job).get("replicas", 1))
    least = int(job["spec"].get("minReplicas") or max(1, asked))
    most = max(least, int(job["spec"].get("maxReplicas") or max(least, asked)))
    return least, min(max(asked, least), most) if asked else 0, most


def nnodes(job: Mapping[str, Any]) -> str:
    """--nnodes of torchrun: `1:4`."""
    least, _, most = sizes(job)
    return f"{least}:{most}"


def end(job: Mapping[str, Any]) -> str | None:
    """`Succeeded` or `Failed`; None while it has not ended. The archived controller wrote conditions only."""
    status = job.get("status") or {}
    told = [each["type"] for each in status.get("conditions") or () if each["status"] == "True"]
    return next((each for each in ("Succeeded", "Failed") if each == status.get("state") or each in told), None)


def processes(job: Mapping[str, Any]) -> int:
    """Processes per worker, from the arguments and variables of torchrun; else 1, its default."""
    name = torchrun(job)
    container: Document = next((each for each in workers(job)["template"]["spec"]["containers"] if each["name"] == name), {})
    words = " ".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))
    told = re.search(r"--nproc[-_]per[-_]node[= ](\w+)", words)
    given = next((str(e.get("value")) for e in container.get("env") or () if e["name"] == "PET_NPROC_PER_NODE"), "")
    count = told[1] if told else given
    if count in ("gpu", "auto"):
        limits = (container.get("resources") or {}).get("limits") or {}
        count = next((str(amount) for device, amount in limits.items() if accelerators.known(device)), "1")
    return int(count) if count.isdecimal() else 1


def restart_policy(job: Mapping[str, Any]) -> str:
    return str(workers(job).get("restartPolicy") or "ExitCode")


def selector(job: str) -> dict[str, str]:
    """Selector of a job's pods."""
    return {"group-name": LEGACY_JOB.group, "job-name": names.fit(job)}


def nameless(job: Mapping[str, Any]) -> bool:
    """Whether its name is too long for the label that selects its pods."""
    return len(job["metadata"]["name"]) > names.LONGEST


def endpoint(job: Mapping[str, Any]) -> str:
    """Rendezvous endpoint: worker 0 by its full name. The Service's own name resolves to any worker."""
    meta = job["metadata"]
    host = f"{_host(meta['name'], 0)}.{_service(meta['name'])}.{meta['namespace']}.svc.{contract.CLUSTER_DOMAIN}"
    return f"{host}:{_PORT}"


def etcd(job: Mapping[str, Any]) -> str | None:
    """The rendezvous endpoint of a job that uses an etcd: `etcd://host:port`; else None."""
    wanted = (job["metadata"].get("annotations") or {}).get(RENDEZVOUS) == "etcd"
    scheme, _, place = str(job["spec"].get("rdzvEndpoint") or "").rpartition("://")
    return f"{'etcds' if scheme in ('https', 'etcds') else 'etcd'}://{place}" if wanted and place else None


def limits(job: Mapping[str, Any]) -> Iterator[str]:
    """What of a job cannot be honoured, as sentences."""
    spec, template = job["spec"], workers(job)["template"]
    if nameless(job):
        has = f"the job's name has {len(job['metadata']['name'])} characters, and labels hold at most {names.LONGEST}"
        yield f"no worker is created: {has}; give it a shorter one"
    asked_for = (job["metadata"].get("annotations") or {}).get(RENDEZVOUS)
    if (place := spec.get("rdzvEndpoint")) and not asked_for:
        yield f"rdzvEndpoint {place} is not used: workers meet at worker 0 ({endpoint(job)})"
    if asked_for and not etcd(job):
        need = "it must be etcd" if asked_for != "etcd" else "it needs a rdzvEndpoint, e.g. etcd:2379"
        yield f"the annotation {RENDEZVOUS} ({asked_for}) is not used: {need}; workers meet at worker 0 ({endpoint(job)})"
    if (pin := (job["metadata"].get("annotations") or {}).get(WORKER0)) and not _pinned(job):
        yield f"the annotation {WORKER0} ({pin}) is not used: it must be {scheduling.ON_DEMAND}"
    for kind in spec["replicaSpecs"]:
        if kind == "Master":
            yield (
                "replicaSpecs.Master is not used, its template does not run: torchrun has no master, workers meet at worker 0; "
                "add its replicas to those of replicaSpecs.Worker"
            )
        elif kind != "Worker":
            yield f"replicaSpecs.{kind} is not used: there are workers only"
    if (gang := (spec.get("schedulingPolicy") or {}).get("minAvailable")) is not None:
        yield f"schedulingPolicy.minAvailable ({gang}) is not used: workers start one by one, and training with minReplicas"
    asked, (least, wanted, most) = int(workers(job).get("replicas", 1)), sizes(job)
    if asked != wanted:
        yield f"replicas ({asked}) is not within minReplicas and maxReplicas ({least} to {most}): {wanted} is used"
    if (own := template["spec"].get("restartPolicy")) and own != _pod_policy(job):
        yield f"restartPolicy {own} of the template is not used: replicaSpecs.Worker.restartPolicy is {restart_policy(job)}"
    if restart_policy(job) == "Always":
        yield "restartPolicy Always restarts workers that have succeeded, so the job never ends; write ExitCode or OnFailure"
    told = [each for each in template["spec"]["containers"] if each["name"] == torchrun(job)]
    if not told:
        there = ", ".join(each["name"] for each in template["spec"]["containers"])
        yield f"none of the containers ({there}) is called {CONTAINER}, so none is set up for torchrun; rename its container"
    elif own_flags := [arg for arg in told[0].get("args") or () if str(arg).startswith(("--rdzv", "--nnodes"))]:
        yield f"arguments of torchrun override the job: {' '.join(own_flags)} stay as they are"


# --------------------------------------------------------------------------------------------------------------- pods and Service


def service(job: Mapping[str, Any]) -> Document:
    """The headless Service that gives workers their DNS names, also before they are ready."""
    name = job["metadata"]["name"]
    meta = {
        "name": _service(name),
        "namespace": job["metadata"]["namespace"],
        "labels": {**selector(name), Label.JOB: names.fit(name)},
        "ownerReferences": [ownership.reference(job)],
    }
    return objects.headless(meta, selector(name), _PORT)


def pod(job: Mapping[str, Any], index: int) -> Document:
    """The pod of a worker: the user's template with its name, labels and the variables of torchrun."""
    name, template = job["metadata"]["name"], workers(job)["template"]
    given = template.get("metadata") or {}
    labelled = {
        **(given.get("labels") or {}),
        **selector(name),
        "replica-type": "worker",
        "replica-index": str(index),
        Label.JOB: names.fit(name),
        Label.WORKER: str(index),
    }
    told = torchrun(job)
    containers = [
        {**each, "env": _env(job, index, each.get("env") or [])} if each["name"] == told else each
        for each in template["spec"]["containers"]
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": contract.worker_name(name, index),
            "namespace": job["metadata"]["namespace"],
            "labels": labelled,
            "annotations": {**disruption.UNDISTURBED, **(given.get("annotations") or {}), NNODES: nnodes(job)},
            "ownerReferences": [ownership.reference(job)],
        },
        "spec": {
            **template["spec"],
            "hostname": _host(name, index),
            "subdomain": _service(name),
            "restartPolicy": _pod_policy(job),
            "containers": containers,
            **({"affinity": scheduling.off_spot(template["spec"].get("affinity") or {})} if index == 0 and _pinned(job) else {}),
        },
    }


def _pinned(job: Mapping[str, Any]) -> bool:
    return (job["metadata"].get("annotations") or {}).get(WORKER0) == scheduling.ON_DEMAND


def _env(job: Mapping[str, Any], index: int, own: list[Document]) -> list[Document]:
    """The container's variables: the user's, then those of torchrun that the user has not set."""
    meta, there = job["metadata"], {each["name"] for each in own}
    told = {
        "PET_NNODES": nnodes(job),
        "PET_RDZV_ID": f"{meta['name']}-{meta['uid'][:8]}",
        "PET_MAX_RESTARTS": str(MAX_RESTARTS),
        **_where(job, index),
    }
    return [*own, *({"name": name, "value": value} for name, value in told.items() if name not in there)]


def _where(job: Mapping[str, Any], index: int) -> dict[str, str]:
    """Rendezvous variables of torchrun."""
    if named := etcd(job):
        waits = {name: _CONF[name] for name in ("last_call_timeout", "join_timeout")}
        return {"PET_RDZV_BACKEND": "outlast", "PET_RDZV_ENDPOINT": named, "PET_RDZV_CONF": _options(waits)}
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": endpoint(job),
        "PET_RDZV_CONF": _options({**_CONF, "is_host": "true" if index == 0 else "false"}),
        # A new worker would wait for ever for an address that rank 0 publishes in its first world only (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _options(conf: Mapping[str, object]) -> str:
    """In the format of --rdzv-conf."""
    return ",".join(f"{key}={value}" for key, value in conf.items())


def torchrun(job: Mapping[str, Any]) -> str | None:
    """The name of the container with torchrun; none when there are several and none has the usual name."""
    there = [str(each["name"]) for each in workers(job)["template"]["spec"]["containers"]]
    return CONTAINER if CONTAINER in there else there[0] if len(there) == 1 else None


def _pod_policy(job: Mapping[str, Any]) -> str:
    policy = restart_policy(job)
    return "Never" if policy == "ExitCode" else policy


def _host(job: str, index: int) -> str:
    suffix = contract.worker_name("", index)
    return names.fit(job.replace(".", "-"), names.LONGEST - len(suffix)) + suffix


def _service(job: str) -> str:
    return names.fit(f"{job.replace('.', '-')}-rdzv")


# --------------------------------------------------------------------------------------------------- CustomResourceDefinition


def definition() -> Document:
    """The CustomResourceDefinition."""
    columns = [
        crd.column("Min", ".spec.minReplicas", "integer"),
        crd.column("Max", ".spec.maxReplicas", "integer"),
        crd.column("Desired", ".spec.replicaSpecs.Worker.replicas", "integer"),
        crd.column("State", ".status.state"),
        crd.column("Age", ".metadata.creationTimestamp", "date"),
    ]
    wanted, there = ".spec.replicaSpecs.Worker.replicas", ".status.replicaStatuses.Worker.active"
    return crd.resource(LEGACY_JOB, schema(), columns, wanted, there, {})


def schema() -> Schema:
    """The structural schema of the archived controller's Go types, with checks in CEL that it lacked."""
    return {
        "type": "object",
        "description": "A training job of torchelastic: its workers run torchrun, and their number may change.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec(),
            "status": _status(),
        },
    }


def _spec() -> Schema:
    most = "self.maxReplicas"
    replicas = "self.replicaSpecs.Worker.replicas"
    return {
        "type": "object",
        "description": "What to run, and with how many workers.",
        "required": ["replicaSpecs"],
        "properties": {
            "rdzvEndpoint": crd.known("string", f"Address of an etcd v3. It is used when the annotation {RENDEZVOUS} says etcd."),
            "minReplicas": crd.known("integer", "Training goes on with no fewer workers. Default: replicas.", minimum=1),
            "maxReplicas": crd.known("integer", "Training takes no more workers. Default: replicas.", minimum=1),
            "replicaSpecs": {
                "type": "object",
                "description": "What to run.",
                "required": ["Worker"],
                "properties": {"Worker": _replicas()},
                # Other types are kept, so that the status can report that they are not used.
                "x-kubernetes-preserve-unknown-fields": True,
            },
            "activeDeadlineSeconds": crd.known(
                "integer", "The job fails when it has run for longer. Default: no limit.", minimum=1
            ),
            "backoffLimit": crd.known(
                "integer", f"The job fails after more restarts of its workers than this. Default: {MAX_RESTARTS}.", minimum=0
            ),
            "cleanPodPolicy": crd.known(
                "string",
                "Which pods are deleted when the job ends; running ones always are. Default: None.",
                enum=["All", "Running", "None"],
            ),
            "schedulingPolicy": crd.part(
                "For gang schedulers. It is not used.", minAvailable=crd.known("integer", "Workers that are started all or none.")
            ),
            "ttlSecondsAfterFinished": crd.known(
                "integer", "A finished job is deleted after this time. Default: it is kept.", minimum=0
            ),
        },
        "x-kubernetes-validations": [
            cel.rule(
                f"!has(self.minReplicas) || !has({most}) || self.minReplicas <= {most}",
                "minReplicas is above maxReplicas; swap them or raise maxReplicas",
                at=".minReplicas",
            ),
            cel.rule(
                f"!has(self.minReplicas) || {replicas} == 0 || {replicas} >= self.minReplicas",
                "replicas is below minReplicas; raise replicas or lower minReplicas",
                at=".replicaSpecs.Worker.replicas",
            ),
            cel.rule(
                f"!has({most}) || {replicas} <= {most}",
                "replicas is above maxReplicas; lower replicas or raise maxReplicas",
                at=".replicaSpecs.Worker.replicas",
            ),
        ],
    }


def _replicas() -> Schema:
    wanted = crd.known("integer", "How many are wanted; 0 suspends the job. Default: 1.", minimum=0, maximum=10_000, default=1)
    policy = crd.known(
        "string",
        "Never, OnFailure, Always: as of pods. ExitCode: pods that ended with 130, 137, 138 or 143, were lost, or never "
        "began, are replaced; any other failure fails the job. Default: ExitCode.",
        enum=["Always", "OnFailure", "Never", "ExitCode"],
    )
    properties = {"replicas": wanted, "restartPolicy": policy, "template": _template()}
    return crd.known("object", "The workers.", required=["template"], properties=properties)


def _template() -> Schema:
    named = {"type": "object", "required": ["name"], "x-kubernetes-preserve-unknown-fields": True}
    env = {"type": "array", "nullable": True, "items": {**named, "properties": {"name": {"type": "string"}}}}
    container = {**named, "properties": {"name": {"type": "string"}, "env": env}}
    containers = crd.known("array", "The containers.", minItems=1, items=container)
    texts = {
        kind: {"type": "object", "nullable": True, "additionalProperties": {"type": "string"}}
        for kind in ("labels", "annotations")
    }
    parts = {
        "metadata": crd.part("Labels and annotations of the pods.", **texts),
        "spec": {"required": ["containers"], **crd.part("A PodSpec.", containers=containers)},
    }
    where = f"The pods. torchrun runs in the only container, or in the one that is called {CONTAINER}."
    return {"required": ["spec"], **crd.part(where, **parts)}


def _status() -> Schema:
    counts = {
        "active": crd.known("integer", "Pods that exist and have not ended."),
        "succeeded": crd.known("integer", "Pods that have succeeded."),
        "failed": crd.known("integer", "Pods that have failed."),
    }
    condition = {
        "type": {"type": "string"},
        "status": {"type": "string"},
        "reason": {"type": "string"},
        "message": {"type": "string"},
        "lastUpdateTime": {"type": "string", "format": "date-time"},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    }
    return crd.part(
        "What is known of the job, written by the operator.",
        state=crd.known("string", "Created, Running, Restarting, Suspended, Succeeded or Failed."),
        selector=crd.known("string", "Label selector of the pods, for the scale subresource."),
        restarts=crd.known("integer", "Restarts that count against backoffLimit."),
        judged=crd.many("string", "Uids of failed pods that are counted already."),
        started=crd.known(
            "object",
            "Container restarts by kubelets that are counted already, by the uid of the pod.",
            additionalProperties={"type": "integer"},
        ),
        replicaStatuses=crd.known(
            "object", "Number of pods by state.", additionalProperties={"type": "object", "properties": counts}
        ),
        startTime=crd.time("When the first pods were created."),
        completionTime=crd.time("When the job ended."),
        lastReconcileTime=crd.time("Written by the archived controller."),
        conditions=crd.known(
            "array",
            "Created, Running, Restarting, Succeeded, Failed; Limited says what cannot be honoured.",
            items={"type": "object", "required": ["type", "status"], "properties": condition},
        ),
    )
