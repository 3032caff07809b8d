"""The pods and the Service of an ElasticJob of `elastic.pytorch.org`. Pure.

A pod is the job's pod template with torchrun's `PET_*` variables, except for those that the user has set. Worker 0 hosts torch's
store, unless the job uses etcd (`RENDEZVOUS`). With etcd, the job's image needs Outlast, because torch's own backends use API v2,
which etcd 3.6 has removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Label
from outlast.kubernetes.api import owner_references
from outlast.kubernetes.api.kinds import LEGACY_JOB, POD
from outlast.kubernetes.manifests import configmaps_and_service, names
from outlast.kubernetes.manifests.scheduling import placement
from outlast.kubernetes.manifests.worker_pod import DO_NOT_DISRUPT
from outlast.kubernetes.operator.observed_job import NNODES

Document = dict[str, Any]
CONTAINER = "elasticjob-worker"
"""Name of the container that runs torchrun in pods with several containers."""
RENDEZVOUS = f"{contract.GROUP}/rendezvous"
"""Annotation on a job. With the value `etcd`, workers meet through the etcd v3 server at rdzvEndpoint, with
`--rdzv-backend=outlast`."""
WORKER0 = f"{contract.GROUP}/worker-0"
"""Annotation on a job. The value `on-demand` keeps worker 0, which hosts the rendezvous, off spot machines."""
MAX_RESTARTS = 100
"""Value of torchrun's --max-restarts, and default of backoffLimit."""
_CONF = {
    "last_call_timeout": 5,  # s for which a world of fewer than maxReplicas workers waits for more; torch's default: 30
    "join_timeout": 600,
    "read_timeout": 300,  # s to wait for worker 0: pulling its image takes time; torch: 60
    "keep_alive_interval": 1,  # s; with the next line, a lost worker is detected after 5 s instead of 15
    "keep_alive_max_attempt": 5,
}
"""Options of torch's rendezvous. torch before 2.9 ignores the last two.
https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""


def worker(job: Document) -> Document:
    """Return `replicaSpecs.Worker` of the job, or one without containers if the spec could not be read."""
    fields: Document = (job["spec"].get("replicaSpecs") or {"Worker": {"template": {"spec": {"containers": []}}}})["Worker"]
    return fields


def containers(job: Document) -> Sequence[Document]:
    specs: Sequence[Document] = worker(job)["template"]["spec"]["containers"]
    return specs


def torchrun(job: Document) -> str | None:
    """Return the name of the container that runs torchrun, or None if that is unclear."""
    container_names = [str(each["name"]) for each in containers(job)]
    return CONTAINER if CONTAINER in container_names else container_names[0] if len(container_names) == 1 else None


def annotation(job: Document, name: str) -> str | None:
    value: str | None = (job["metadata"].get("annotations") or {}).get(name)
    return value


def count(fields: Mapping[str, Any], name: str, default: int) -> int:
    """Return the integer field `name`, or `default` if the field is absent or null. Raises OutlastError for any other value."""
    value = fields.get(name)
    if value is not None and not isinstance(value, int):
        raise OutlastError(f"its {name} ({value!r}) is not a whole number; correct it")
    return default if value is None else value


def sizes(job: Document) -> tuple[int, int, int]:
    """Return the minimum, requested and maximum number of workers. The requested number may be 0."""
    requested = count(worker(job), "replicas", 1)
    minimum = count(job["spec"], "minReplicas", 0) or max(1, requested)
    maximum = max(minimum, count(job["spec"], "maxReplicas", 0) or max(minimum, requested))
    return minimum, min(max(requested, minimum), maximum) if requested else 0, maximum


def nnodes(job: Document) -> str:
    """Return the value of torchrun's --nnodes, such as `1:4`."""
    minimum, _, maximum = sizes(job)
    return f"{minimum}:{maximum}"


def policy(job: Document) -> str:
    """Return the job's restartPolicy, which selects the failures that lead to a restart."""
    return str(worker(job).get("restartPolicy") or "ExitCode")


def restart_policy(job: Document) -> str:
    """Return the pods' restartPolicy. It is `Never` if the operator handles failures, so that the kubelet restarts no
    containers."""
    return "Never" if policy(job) == "ExitCode" else policy(job)


def selector(name: str) -> dict[str, str]:
    """Return the labels that select a job's pods, including those that the archived controller created."""
    return {"group-name": LEGACY_JOB.group, "job-name": names.fit(name)}


def etcd(job: Document) -> str:
    """Return a job's etcd endpoint, such as `etcd://host:port`; empty if the job does not use etcd."""
    scheme, _, place = str(job["spec"].get("rdzvEndpoint") or "").rpartition("://")
    requested = annotation(job, RENDEZVOUS) == "etcd" and place
    return f"{'etcds' if scheme in ('https', 'etcds') else 'etcd'}://{place}" if requested else ""


def endpoint(job: Document) -> str:
    """Return worker 0's full DNS name and port. The Service's name would not do, because it resolves to any worker."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    return f"{_host(name, 0)}.{_service(name)}.{namespace}.svc.{contract.CLUSTER_DOMAIN}:{contract.Pod.RENDEZVOUS_PORT}"


def service(job: Document) -> Document:
    """Return the headless Service for the workers' DNS names."""
    name = job["metadata"]["name"]
    meta = _metadata(job, _service(name), selector(name))
    return configmaps_and_service.headless(meta, selector(name), contract.Pod.RENDEZVOUS_PORT)


def pod(job: Document, index: int) -> Document:
    """Return a worker's pod, which is the user's template with the worker's name and labels and torchrun's variables."""
    name, template = job["metadata"]["name"], worker(job)["template"]
    template_metadata, spec = template.get("metadata") or {}, template["spec"]
    labels = {"replica-type": "worker", "replica-index": str(index), Label.WORKER: str(index)}
    meta = _metadata(
        job, contract.worker_name(name, index), {**(template_metadata.get("labels") or {}), **selector(name), **labels}
    )
    meta["annotations"] = {**DO_NOT_DISRUPT, **(template_metadata.get("annotations") or {}), NNODES: nnodes(job)}
    pod_spec = {
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
        pod_spec["affinity"] = placement.avoid_spot(spec.get("affinity") or {})
    return POD.document(meta, spec=pod_spec)


def _metadata(job: Document, name: str, labels: Mapping[str, str]) -> Document:
    namespace, job_label = job["metadata"]["namespace"], names.fit(job["metadata"]["name"])
    owners = [owner_references.reference(job)]
    return {"name": name, "namespace": namespace, "labels": {**labels, Label.JOB: job_label}, "ownerReferences": owners}


def _env(job: Document, index: int, user_env: list[Document]) -> list[Document]:
    variables = {
        "PET_NNODES": nnodes(job),
        "PET_RDZV_ID": f"{job['metadata']['name']}-{job['metadata']['uid'][:8]}",
        "PET_MAX_RESTARTS": str(MAX_RESTARTS),
    }
    if place := etcd(job):
        conf: Document = {name: _CONF[name] for name in ("last_call_timeout", "join_timeout")}
        variables |= {"PET_RDZV_BACKEND": "outlast", "PET_RDZV_ENDPOINT": place}
    else:
        conf = {**_CONF, "is_host": "true" if index == 0 else "false"}
        variables |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint(job)}
        # A new worker would wait forever for an address that rank 0 publishes in its first world only (torch 2.13).
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    variables["PET_RDZV_CONF"] = ",".join(f"{key}={value}" for key, value in conf.items())
    user_names = {each["name"] for each in user_env}
    return [*user_env, *({"name": name, "value": value} for name, value in variables.items() if name not in user_names)]


def _host(job: str, index: int) -> str:
    suffix = contract.worker_name("", index)
    return names.fit(job.replace(".", "-"), names.MAX_LENGTH - len(suffix)) + suffix


def _service(job: str) -> str:
    return names.fit(f"{job.replace('.', '-')}-rdzv")
