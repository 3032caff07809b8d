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


def plain(value: str) -> Source:
    """A literal value."""
    return {"value": value}


def of_field(path: str) -> Source:
    """The value of a field of the pod itself (https://kubernetes.io/docs/concepts/workloads/pods/downward-api/)."""
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def several(request: Request, rendezvous: str) -> bool:
    """Whether there may be several workers, which must authenticate one another."""
    if rendezvous.startswith("c10d://"):
        return not rendezvous.startswith("c10d://localhost:")
    return request.spec.workers.max > 1


def container(request: Request, *, index: Source, rendezvous: str, stay: bool) -> list[Document]:
    """The container's `env`. References to variables whose values are known are replaced here; all others are escaped, so that
    the agent, not Kubernetes, replaces them."""
    ours = {**_contract(request, index=index, rendezvous=rendezvous, stay=stay), **_process(request)}
    known = {name: str(source["value"]) for name, source in ours.items() if "value" in source}
    found = {**ours, **own(request.spec, known)}
    return [{"name": name, **source} for name, source in found.items()]


def own(fields: spec.Spec, defined: Mapping[str, str]) -> dict[str, Source]:
    """The job's own variables, which may refer to the variables in `defined`."""
    return {name: plain(literal(value)) for name, value in substitution.values(fields.env, defined).items()}


def from_secrets(fields: spec.Spec) -> list[Document]:
    """The container's `envFrom`: Secrets as environment variables. Variables in `env` take precedence."""
    return [{"secretRef": {"name": secret.name}} for secret in fields.secrets if not secret.to]


def literal(value: str) -> str:
    """A value escaped for Kubernetes, in which `$$` means `$`, and `$(NAME)` refers to a variable."""
    return value.replace("$", "$$") if "$(" in value or "$$" in value else value


def of_secret(name: str, key: str) -> Source:
    """The value of a key in a Secret, either of which may be missing."""
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}


def _contract(request: Request, *, index: Source, rendezvous: str, stay: bool) -> dict[str, Source]:
    """The variables of `contract.Env`."""
    fields, name = request.spec, request.job.metadata.name
    output = volumes.output(fields, name)
    store = volumes.store(request.job)
    return {
        Env.NAMESPACE: of_field("metadata.namespace"),
        Env.ADDRESS: of_field("status.podIP"),
        Env.NODE: of_field("spec.nodeName"),
        Env.ZONE: of_field("metadata.labels['topology.kubernetes.io/zone']"),  # copied from the node since Kubernetes 1.35
        Env.JOB: plain(name),
        Env.RUN: plain(request.run),
        Env.WORKER: index,
        Env.JOB_FILE: plain(Pod.JOB_FILE),
        Env.CODE: plain(Pod.CODE),
        Env.DATA: plain(Pod.DATA),
        Env.MODELS: plain(Pod.MODELS),
        Env.OUTPUT: plain(output),
        **({Env.STORE: plain(literal(store))} if store else {}),
        Env.CACHE: plain(Pod.CACHE),
        Env.STATE: plain(Pod.STATE),
        Env.LEDGER: plain(f"{output}/{contract.LEDGER}"),
        Env.NOTICE: plain(f"{Pod.STATE}/{contract.NOTICE}"),
        **{name: plain(literal(value)) for name, value in fields.checkpoint.variables().items()},
        **{name: plain(literal(value)) for name, value in fields.tracking.variables().items()},
        Env.PROBE_PORT: plain(str(Pod.PROBE_PORT)),
        Env.RENDEZVOUS: plain(rendezvous),
        **({Env.RENDEZVOUS_KEY: of_secret(request.names.service, KEY)} if several(request, rendezvous) else {}),
        **({Env.MEMBER: of_field("metadata.uid")} if request.carried else {}),
        **({Env.STAY: plain("1")} if stay else {}),
        **({Env.FRESH: plain("1")} if request.fresh else {}),
    }


def _process(request: Request) -> dict[str, Source]:
    """Variables that programs expect: a writable home, a user name (the pod's user ID has none), and settings that make results
    the same on every machine."""
    return {
        "HOME": plain(Pod.HOME),
        "USER": plain("outlast"),
        "OMP_NUM_THREADS": plain(str(resources.share(request.job).threads)),
        "PYTHONHASHSEED": plain("0"),
        "PYTHONUNBUFFERED": plain("1"),
        **({"FI_PROVIDER": plain("efa")} if request.spec.resources.efa else {}),
    }
