"""The environment of a worker's container. A variable comes after the variables that it refers to by `$(NAME)`."""

from __future__ import annotations

from outlast.job import contract
from outlast.job.contract import Env, Pod
from outlast.job.spec import substitution
from outlast.kubernetes.manifests import resources, volumes
from outlast.kubernetes.manifests.render_request import Document, Request

KEY = "key"
"""Key in the Secret with which a job's workers authenticate each other."""
Source = str | dict[str, object]
"""A variable's value, or the source from which Kubernetes takes it, such as `{"fieldRef": ...}`."""


def field_source(path: str) -> Source:
    """Return the source for a field of the pod itself (https://kubernetes.io/docs/concepts/workloads/pods/downward-api/)."""
    return {"fieldRef": {"fieldPath": path}}


def has_peers(request: Request, rendezvous: str) -> bool:
    """Return whether the job may have several workers."""
    if rendezvous.startswith("c10d://"):
        return not rendezvous.startswith("c10d://localhost:")
    return request.spec.workers.max > 1


def container_env(request: Request, *, index: Source, rendezvous: str, stay: bool) -> list[Document]:
    """Return the container's `env`. References to variables with known values are replaced here. Other references are escaped, so
    that Kubernetes leaves them to the agent."""
    standard = _standard(request, index=index, rendezvous=rendezvous, stay=stay)
    defined = {name: source for name, source in standard.items() if isinstance(source, str)}
    own = {name: escaped(value) for name, value in substitution.values(request.spec.env, defined).items()}
    return [
        {"name": name, "value" if isinstance(source, str) else "valueFrom": source}
        for name, source in {**standard, **own}.items()
    ]


def escaped(value: str) -> str:
    """Return a value escaped for Kubernetes, where `$$` means `$` and `$(NAME)` refers to a variable."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def _standard(request: Request, *, index: Source, rendezvous: str, stay: bool) -> dict[str, Source]:
    fields, name = request.spec, request.job.metadata.name
    output = volumes.output(fields, name)
    store = volumes.store_url(request.job)
    key: Source = {"secretKeyRef": {"name": request.names.service, "key": KEY, "optional": not request.key_required}}
    return {
        Env.NAMESPACE: field_source("metadata.namespace"),
        Env.ADDRESS: field_source("status.podIP"),
        Env.NODE: field_source("spec.nodeName"),
        Env.ZONE: field_source("metadata.labels['topology.kubernetes.io/zone']"),  # copied from the node since Kubernetes 1.35
        Env.JOB: name,
        Env.RUN: request.run,
        Env.WORKER: index,
        Env.JOB_FILE: Pod.JOB_FILE,
        Env.CODE: Pod.CODE,
        Env.DATA: Pod.DATA,
        Env.MODELS: Pod.MODELS,
        Env.OUTPUT: output,
        **({Env.STORE: escaped(store)} if store else {}),
        Env.CACHE: Pod.CACHE,
        Env.STATE: Pod.STATE,
        Env.LEDGER: f"{output}/{contract.LEDGER}",
        Env.NOTICE: f"{Pod.STATE}/{contract.NOTICE}",
        **{name: escaped(value) for name, value in fields.checkpoint.variables().items()},
        **{name: escaped(value) for name, value in fields.tracking.variables().items()},
        Env.PROBE_PORT: str(Pod.PROBE_PORT),
        Env.RENDEZVOUS: rendezvous,
        **({Env.RENDEZVOUS_KEY: key} if has_peers(request, rendezvous) else {}),
        **({Env.MEMBER: field_source("metadata.uid")} if request.job_file_in_annotation else {}),
        **({Env.STAY: "1"} if stay else {}),
        **({Env.FRESH: "1"} if request.fresh else {}),
        # What programs expect, or what makes results the same on every machine
        "HOME": Pod.HOME,
        "USER": "outlast",
        "OMP_NUM_THREADS": str(resources.share(request.job).threads),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        **({"FI_PROVIDER": "efa"} if request.spec.resources.efa else {}),
    }
