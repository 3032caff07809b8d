"""A worker's pod, with its command, security settings, resources and probes.

The pod satisfies the restricted Pod Security Standard (https://kubernetes.io/docs/concepts/security/pod-security-standards/), and
its root file system is read-only. The user's `template` is merged over it last. A worker is alive while a step or a startup phase
makes progress, and ready while it is in a world. The agent itself ends hangs, so the liveness probe is only for an agent that
does not answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outlast.job import contract, spec
from outlast.job.contract import Annotation, Label, Pod
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import labels, overlay, resources, variables
from outlast.kubernetes.manifests import volumes as places
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job
from outlast.kubernetes.manifests.scheduling import gang, placement
from outlast.worker.launch import relocatable

DO_NOT_DISRUPT = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations that keep autoscalers from removing a pod's node just to save costs. They do not prevent interruptions and drains.
https://karpenter.sh/docs/concepts/disruption/#pod-level-controls
https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
"""
AGENT = "outlast-agent"
"""Volume of the agent in pods whose image has no Outlast, and the init container that copies it; see `launch.relocatable`."""


@dataclass(frozen=True)
class Worker:
    """The properties of a worker's pod that depend on the topology."""

    index: variables.Source
    rendezvous: str
    restart: Literal["Never", "Always"] = "Never"
    subdomain: str = ""
    """Name of the headless Service that gives the pod its DNS name."""
    has_peers: bool = True
    stay: bool = False
    """Whether the worker keeps running after it has succeeded; see `contract.Env.STAY`."""
    account: str = ""
    """ServiceAccount of a worker that uses the API server. If it is empty, the pod has no token."""
    gang: gang.Gang = gang.NONE
    on_demand: bool = False
    """Whether the worker avoids spot machines, whatever the job specifies."""


def template(request: Request, worker: Worker) -> Document:
    """Return the workers' PodTemplateSpec. Raises InvalidJob if there is no image, or if the user's template cannot be merged."""
    volumes, mounts = places.volumes(request)
    if injected := request.spec.injected():
        volumes.append({"name": AGENT, "emptyDir": {}})
        mounts.append({"name": AGENT, "mountPath": Pod.INJECTED, "readOnly": True})
    base: Document = {
        "metadata": {"labels": {**labels.NO_SIDECAR, **labels.worker(request), **worker.gang.labels}},
        "spec": {
            "restartPolicy": worker.restart,
            "terminationGracePeriodSeconds": math.ceil(request.spec.interruption.grace.total_seconds()) + Pod.LAST_PUSH_S,
            "automountServiceAccountToken": bool(worker.account),
            **({"serviceAccountName": worker.account} if worker.account else {}),
            "enableServiceLinks": False,  # a Service called outlast-... would set OUTLAST_..._PORT
            **({"subdomain": worker.subdomain} if worker.subdomain else {}),
            **({"schedulerName": worker.gang.scheduler} if worker.gang.scheduler else {}),
            "securityContext": places.pod_security(),
            **placement.pod(request.job, has_peers=worker.has_peers, on_demand=worker.on_demand),
            **({"initContainers": []} if injected else {}),
            "containers": [_container(request, worker, mounts)],
            "volumes": volumes,
        },
    }
    if worker.gang.annotations:
        base["metadata"]["annotations"] = dict(worker.gang.annotations)
    own_labels = labels.selector(request.job.metadata.name)
    if injected:
        merged = with_user_template(request.job, base, own_labels)["spec"].get("containers") or ()
        base["spec"]["initContainers"] = [_agent_copier(request.agent_image, merged)]
    return with_user_template(request.job, base, own_labels)


def pod(request: Request, worker: Worker, *, index: int, generation: int, file: str) -> Document:
    """Return one worker's pod for the operator, with the job file in an annotation."""
    request = dataclasses.replace(request, job_file_in_annotation=True)
    templated = template(request, worker)
    meta = labels.metadata(request, contract.worker_name(request.job.metadata.name, index))
    meta["labels"] = {**templated["metadata"].pop("labels"), Label.WORKER: str(index), Label.GENERATION: str(generation)}
    own = templated["metadata"].pop("annotations", {})
    meta["annotations"] = {**DO_NOT_DISRUPT, **own, Annotation.JOB_FILE: file}
    # As in Kubernetes, the `name` of a template is ignored.
    return kinds.POD.document({**templated["metadata"], **meta}, spec=templated["spec"])


def failure_policy() -> Document:
    """Return the pod failure policy of a Job. The Job ignores interruptions, and fails at once on misconfiguration or when
    workers have given up. Other failures count towards `backoffLimit`. 143 is the exit code of an agent that got SIGTERM before
    it could handle the signal. https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy"""

    def on_exit(action: str, *codes: int) -> Document:
        return {"action": action, "onExitCodes": {"containerName": Pod.TRAINER, "operator": "In", "values": list(codes)}}

    return {
        "rules": [
            on_exit("FailJob", contract.Exit.MISCONFIGURED.value, contract.Exit.GIVEN_UP.value),
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            on_exit("Ignore", contract.Exit.INTERRUPTED.value, 143),
        ]
    }


def job_limits(fields: spec.Spec) -> Document:
    """Return the fields of a `batch/v1` Job that suspend it, limit its failures and duration, and delete it after its end."""
    limits: Document = {
        **({"suspend": True} if fields.suspend else {}),  # never false: Kueue sets it for jobs in its queues
        "backoffLimit": fields.restarts.limit,
        "podReplacementPolicy": "Failed",  # one worker of an index at a time: the old one may still upload
        "podFailurePolicy": failure_policy(),
    }
    if fields.active_deadline_seconds:
        limits["activeDeadlineSeconds"] = fields.active_deadline_seconds
    if fields.ttl_seconds_after_finished is not None:
        limits["ttlSecondsAfterFinished"] = fields.ttl_seconds_after_finished
    return limits


def _container(request: Request, worker: Worker, mounts: list[Document]) -> Document:
    secrets = [{"secretRef": {"name": secret.name}} for secret in request.spec.secrets if not secret.to]
    env = variables.container_env(request, index=worker.index, rendezvous=worker.rendezvous, stay=worker.stay)
    program = [*relocatable.command(Pod.INJECTED), "-m", "outlast"] if request.spec.injected() else ["outlast"]
    return {
        "name": Pod.TRAINER,
        "image": request.image(),
        "command": [*program, "agent"],
        "workingDir": Pod.CODE,
        "env": env,
        **({"envFrom": secrets} if secrets else {}),  # variables in `env` take precedence
        "ports": [
            {"name": "probes", "containerPort": Pod.PROBE_PORT},
            {"name": "rendezvous", "containerPort": Pod.RENDEZVOUS_PORT},
        ],
        "resources": resources.share(request.job).container(),
        "startupProbe": _probe("/healthz", period_s=2, failures=60),  # long enough for a busy machine
        "livenessProbe": _probe("/healthz", period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", period_s=5, failures=1),
        "securityContext": places.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the log's last lines are in the status of a pod that failed
        "volumeMounts": mounts,
    }


def _agent_copier(image: str, containers: Sequence[Document]) -> Document:
    trainer = next((each for each in containers if each["name"] == Pod.TRAINER), {})
    share = trainer.get("resources") or {}  # the larger container counts, so the pod requests no more
    return {
        "name": AGENT,
        "image": image,
        "command": ["python3", "-m", "outlast", "inject", Pod.INJECTED],
        "resources": {
            kind: {name: each[name] for name in ("cpu", "memory") if name in each}  # no devices
            for kind, each in share.items()
            if kind in ("limits", "requests") and each
        },
        "securityContext": places.container_security(),
        "volumeMounts": [{"name": AGENT, "mountPath": Pod.INJECTED}],
    }


def _probe(path: str, *, period_s: int, failures: int) -> Document:
    get = {"path": path, "port": "probes"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def with_user_template(job: spec.Job, base: Document, required_labels: dict[str, str]) -> Document:
    """Return `base` merged with the user's template, which cannot change the required labels. Raises InvalidJob."""
    try:
        result = overlay.merge(base, job.spec.template)
    except ValueError as error:
        raise invalid_job(job, str(error)) from error
    meta = result.get("metadata")
    if not isinstance(meta, dict) or not isinstance(meta.get("labels"), dict):
        raise invalid_job(job, "template.metadata.labels must be a mapping of names to values; correct or remove it")
    if not isinstance(meta.get("annotations", {}), dict):
        raise invalid_job(job, "template.metadata.annotations must be a mapping of names to values; correct or remove it")
    if not isinstance(result.get("spec"), dict):
        raise invalid_job(job, "template.spec must be a mapping, what a PodSpec has; correct or remove it")
    return {**result, "metadata": {**meta, "labels": {**meta["labels"], **required_labels}}}
