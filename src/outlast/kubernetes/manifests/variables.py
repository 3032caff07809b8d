"""The environment of a worker's container. The order matters: a variable comes after the variables to which it refers by
`$(NAME)`."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.job import contract, spec
from outlast.job.contract import Env, Pod
from outlast.job.spec import substitution
from outlast.kubernetes.manifests import resources, volumes
from outlast.kubernetes.manifests.render_request import Document, Request

KEY = "key"
"""Key in the Secret with which the workers of a job authenticate one another."""
Source = dict[str, object]
"""Source of a variable's value, as in a container: `{"value": "0"}`, or `{"valueFrom": ...}`."""


def literal_source(value: str) -> Source:
    return {"value": value}


def field_source(path: str) -> Source:
    """Return the value of a field of the pod itself (https://kubernetes.io/docs/concepts/workloads/pods/downward-api/)."""
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def has_peers(request: Request, rendezvous: str) -> bool:
    """Return whether there may be several workers, which must authenticate one another."""
    if rendezvous.startswith("c10d://"):
        return not rendezvous.startswith("c10d://localhost:")
    return request.spec.workers.max > 1


def container_env(request: Request, *, index: Source, rendezvous: str, stay: bool) -> list[Document]:
    """Return the container's `env`. References to variables whose values are known are replaced here; all others are escaped,
    so that the agent, not Kubernetes, replaces them."""
    standard = {**_contract(request, index=index, rendezvous=rendezvous, stay=stay), **_process(request)}
    values = {name: str(source["value"]) for name, source in standard.items() if "value" in source}
    env = {**standard, **job_variables(request.spec, values)}
    return [{"name": name, **source} for name, source in env.items()]


def job_variables(fields: spec.Spec, defined: Mapping[str, str]) -> dict[str, Source]:
    """Return the job's own variables, which may refer to the variables in `defined`."""
    return {name: literal_source(escaped(value)) for name, value in substitution.values(fields.env, defined).items()}


def from_secrets(fields: spec.Spec) -> list[Document]:
    """Return the container's `envFrom`: Secrets as environment variables. Variables in `env` take precedence."""
    return [{"secretRef": {"name": secret.name}} for secret in fields.secrets if not secret.to]


def escaped(value: str) -> str:
    """Return a value escaped for Kubernetes, in which `$$` means `$`, and `$(NAME)` refers to a variable."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def secret_source(name: str, key: str) -> Source:
    """Return the value of a key in a Secret, either of which may be missing."""
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}


def _contract(request: Request, *, index: Source, rendezvous: str, stay: bool) -> dict[str, Source]:
    fields, name = request.spec, request.job.metadata.name
    output = volumes.output(fields, name)
    store = volumes.store_url(request.job)
    return {
        Env.NAMESPACE: field_source("metadata.namespace"),
        Env.ADDRESS: field_source("status.podIP"),
        Env.NODE: field_source("spec.nodeName"),
        Env.ZONE: field_source("metadata.labels['topology.kubernetes.io/zone']"),  # copied from the node since Kubernetes 1.35
        Env.JOB: literal_source(name),
        Env.RUN: literal_source(request.run),
        Env.WORKER: index,
        Env.JOB_FILE: literal_source(Pod.JOB_FILE),
        Env.CODE: literal_source(Pod.CODE),
        Env.DATA: literal_source(Pod.DATA),
        Env.MODELS: literal_source(Pod.MODELS),
        Env.OUTPUT: literal_source(output),
        **({Env.STORE: literal_source(escaped(store))} if store else {}),
        Env.CACHE: literal_source(Pod.CACHE),
        Env.STATE: literal_source(Pod.STATE),
        Env.LEDGER: literal_source(f"{output}/{contract.LEDGER}"),
        Env.NOTICE: literal_source(f"{Pod.STATE}/{contract.NOTICE}"),
        **{name: literal_source(escaped(value)) for name, value in fields.checkpoint.variables().items()},
        **{name: literal_source(escaped(value)) for name, value in fields.tracking.variables().items()},
        Env.PROBE_PORT: literal_source(str(Pod.PROBE_PORT)),
        Env.RENDEZVOUS: literal_source(rendezvous),
        **({Env.RENDEZVOUS_KEY: secret_source(request.names.service, KEY)} if has_peers(request, rendezvous) else {}),
        **({Env.MEMBER: field_source("metadata.uid")} if request.job_file_in_annotation else {}),
        **({Env.STAY: literal_source("1")} if stay else {}),
        **({Env.FRESH: literal_source("1")} if request.fresh else {}),
    }


def _process(request: Request) -> dict[str, Source]:
    """Variables that programs expect: a writable home, a user name (the pod's user ID has none), and settings that make results
    the same on every machine."""
    return {
        "HOME": literal_source(Pod.HOME),
        "USER": literal_source("outlast"),
        "OMP_NUM_THREADS": literal_source(str(resources.share(request.job).threads)),
        "PYTHONHASHSEED": literal_source("0"),
        "PYTHONUNBUFFERED": literal_source("1"),
        **({"FI_PROVIDER": literal_source("efa")} if request.spec.resources.efa else {}),
    }
