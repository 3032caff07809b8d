"""The pods and the Service of an ElasticJob of `elastic.pytorch.org`: the job's pod template, with variables (`PET_*`) for
torchrun.

Variables that the user has set are kept. Worker 0 hosts torch's store, so no etcd is needed. A job whose image contains Outlast
can use etcd (`RENDEZVOUS`): torch's own back ends use API v2, which etcd 3.6 no longer has. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import owner_references
from outlast.kubernetes.api.kinds import LEGACY_JOB
from outlast.kubernetes.manifests import configmaps_and_service, names
from outlast.kubernetes.manifests.scheduling import disruption, placement
from outlast.kubernetes.operator.observed_job import NNODES

Document = dict[str, Any]
CONTAINER = "elasticjob-worker"
"""Name of the container that runs torchrun if the pod has several."""
RENDEZVOUS = f"{contract.GROUP}/rendezvous"
"""Annotation of a job: `etcd` for a rendezvous through the etcd v3 at its rdzvEndpoint, with `--rdzv-backend=outlast`."""
WORKER0 = f"{contract.GROUP}/worker-0"
"""Annotation of a job: `on-demand` keeps worker 0, which hosts the rendezvous, off spot machines."""
MAX_RESTARTS = 100
"""The value of --max-restarts for torchrun, and the default of backoffLimit."""
_CONF = {
    "last_call_timeout": 5,  # s that a world of fewer than maxReplicas waits for more; torch: 30
    "join_timeout": 600,
    "read_timeout": 300,  # s for worker 0 to be there: images take time to come; torch: 60
    "keep_alive_interval": 1,  # s; with the next line a lost worker is missed after 5 s and not 15
    "keep_alive_max_attempt": 5,
}
"""Options of torch's rendezvous; torch before 2.9 ignores the last two, which it does not know.
https://docs.pytorch.org/docs/stable/elastic/rendezvous.html"""


def worker(job: Document) -> Document:
    """`replicaSpecs.Worker` of the job; empty if the spec cannot be read (`wire.UNREADABLE`)."""
    found: Document = (job["spec"].get("replicaSpecs") or {"Worker": {"template": {"spec": {"containers": []}}}})["Worker"]
    return found


def containers(job: Document) -> Sequence[Document]:
    found: Sequence[Document] = worker(job)["template"]["spec"]["containers"]
    return found


def torchrun(job: Document) -> str | None:
    """The name of the container that runs torchrun; None if there are several and none has the usual name."""
    there = [str(each["name"]) for each in containers(job)]
    return CONTAINER if CONTAINER in there else there[0] if len(there) == 1 else None


def annotation(job: Document, name: str) -> str | None:
    found: str | None = (job["metadata"].get("annotations") or {}).get(name)
    return found


def count(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A number in the spec. Null counts as absent, as the archived definition accepted it. Raises OutlastError for anything
    else."""
    found = fields.get(name)
    if found is not None and not isinstance(found, int):
        raise OutlastError(f"its {name} ({found!r}) is not a whole number; correct it")
    return default if found is None else found


def sizes(job: Document) -> tuple[int, int, int]:
    """Minimum, requested and maximum number of workers; the requested number is 0 or between the other two."""
    asked = count(worker(job), "replicas", 1)
    least = count(job["spec"], "minReplicas", 0) or max(1, asked)
    most = max(least, count(job["spec"], "maxReplicas", 0) or max(least, asked))
    return least, min(max(asked, least), most) if asked else 0, most


def nnodes(job: Document) -> str:
    """The value of --nnodes for torchrun: `1:4`."""
    least, _, most = sizes(job)
    return f"{least}:{most}"


def policy(job: Document) -> str:
    """The job's restartPolicy, which says after which failures workers are restarted."""
    return str(worker(job).get("restartPolicy") or "ExitCode")


def restart_policy(job: Document) -> str:
    """The restartPolicy of the job's pods: if the operator decides about failures, the kubelets must not restart containers."""
    return "Never" if policy(job) == "ExitCode" else policy(job)


def selector(name: str) -> dict[str, str]:
    """The labels that select the pods of the job called `name`, including pods created by the archived torchelastic
    controller."""
    return {"group-name": LEGACY_JOB.group, "job-name": names.fit(name)}


def etcd(job: Document) -> str:
    """The rendezvous endpoint of a job that uses etcd: `etcd://host:port`; else empty."""
    scheme, _, place = str(job["spec"].get("rdzvEndpoint") or "").rpartition("://")
    wanted = annotation(job, RENDEZVOUS) == "etcd" and place
    return f"{'etcds' if scheme in ('https', 'etcds') else 'etcd'}://{place}" if wanted else ""


def endpoint(job: Document) -> str:
    """The rendezvous endpoint: worker 0 by its full DNS name, as the Service's own name resolves to any worker."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    return f"{_host(name, 0)}.{_service(name)}.{namespace}.svc.{contract.CLUSTER_DOMAIN}:{contract.Pod.RENDEZVOUS_PORT}"


def service(job: Document) -> Document:
    """The headless Service that gives workers their DNS names even before they are ready."""
    name = job["metadata"]["name"]
    meta = _metadata(job, _service(name), selector(name))
    return configmaps_and_service.headless(meta, selector(name), contract.Pod.RENDEZVOUS_PORT)


def pod(job: Document, index: int) -> Document:
    """The pod of a worker: the user's template with the worker's name, labels and the variables for torchrun."""
    name, template = job["metadata"]["name"], worker(job)["template"]
    given, spec = template.get("metadata") or {}, template["spec"]
    marks = {"replica-type": "worker", "replica-index": str(index), Label.WORKER: str(index)}
    meta = _metadata(job, contract.worker_name(name, index), {**(given.get("labels") or {}), **selector(name), **marks})
    meta["annotations"] = {**disruption.UNDISTURBED, **(given.get("annotations") or {}), NNODES: nnodes(job)}
    made = {
        **spec,
        "hostname": _host(name, index),
        "subdomain": _service(name),
        "restartPolicy": restart_policy(job),
        "containers": [
            {**each, "env": _env(job, index, each.get("env") or [])} if each["name"] == torchrun(job) else each
            for each in spec["containers"]
        ],
    }
    if index == 0 and annotation(job, WORKER0) == placement.ON_DEMAND:
        made["affinity"] = placement.off_spot(spec.get("affinity") or {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": made}


def _metadata(job: Document, name: str, labels: Mapping[str, str]) -> Document:
    namespace, of = job["metadata"]["namespace"], names.fit(job["metadata"]["name"])
    owners = [owner_references.reference(job)]
    return {"name": name, "namespace": namespace, "labels": {**labels, Label.JOB: of}, "ownerReferences": owners}


def _env(job: Document, index: int, own: list[Document]) -> list[Document]:
    """The container's variables: the user's, then those for torchrun that the user has not set."""
    told = {
        "PET_NNODES": nnodes(job),
        "PET_RDZV_ID": f"{job['metadata']['name']}-{job['metadata']['uid'][:8]}",
        "PET_MAX_RESTARTS": str(MAX_RESTARTS),
    }
    if place := etcd(job):
        conf: Document = {name: _CONF[name] for name in ("last_call_timeout", "join_timeout")}
        told |= {"PET_RDZV_BACKEND": "outlast", "PET_RDZV_ENDPOINT": place}
    else:
        conf = {**_CONF, "is_host": "true" if index == 0 else "false"}
        told |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint(job)}
        # A new worker would wait forever for an address that rank 0 publishes in its first world only (torch 2.13).
        told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    told["PET_RDZV_CONF"] = ",".join(f"{key}={value}" for key, value in conf.items())
    there = {each["name"] for each in own}
    return [*own, *({"name": name, "value": value} for name, value in told.items() if name not in there)]


def _host(job: str, index: int) -> str:
    suffix = contract.worker_name("", index)
    return names.fit(job.replace(".", "-"), names.LONGEST - len(suffix)) + suffix


def _service(job: str) -> str:
    return names.fit(f"{job.replace('.', '-')}-rdzv")
