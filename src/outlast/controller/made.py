"""The documents that the operator makes for a job: its workers' pods, and what they need beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outlast import contract, spec
from outlast.controller.observe import Seen
from outlast.manifests import disruption, gang, labels, names, objects, places, pods, rbac, variables
from outlast.manifests.request import Request

Document = dict[str, Any]


def setup(seen: Seen) -> tuple[Document, ...]:
    """What must be there before the first pod. Raises InvalidJob for a job that no pods can be made of."""
    request = _request(seen)
    pods.template(request, _worker(seen, request))
    return (
        *objects.claims(request),  # nobody's: they may hold data that others want
        *_members(seen, request),
        _owned(seen, objects.service(request)),
        _budget(seen, request),
        *(_owned(seen, document) for document in gang.of(request, seen.name).documents),
    )


def changed(seen: Seen) -> tuple[Document, ...]:
    """What a change of the job's workers changes of that."""
    request = _request(seen)
    return (
        *(document for document in _members(seen, request) if document["kind"] == "Role"),
        _budget(seen, request),
        *(_owned(seen, document) for document in gang.of(request, seen.name).documents),
    )


def pod(seen: Seen, index: int, generation: int, avoided: Sequence[str]) -> Document:
    """The pod of a worker, on none of these nodes."""
    request = _request(seen)
    made = _owned(seen, pods.pod(request, _worker(seen, request, index), index=index, generation=generation))
    made["spec"]["hostname"] = made["metadata"]["name"]  # only so has it a name behind the Service
    if avoided:
        _avoid(made["spec"], avoided)
    return made


def checkpoints(job: spec.Job) -> str:
    """The URL above the job's checkpoints, empty when its output is in no store."""
    store = places.store(job)
    return f"{store}/{contract.CHECKPOINTS}" if store else ""


def _request(seen: Seen) -> Request:
    assert seen.job is not None
    return Request(seen.job, names.Names(seen.name), seen.run, carried=True)


def _worker(seen: Seen, request: Request, index: int = 0) -> pods.Worker:
    return pods.Worker(
        index=variables.plain(str(index)),
        rendezvous=f"{contract.KUBERNETES}{seen.name}",
        subdomain=request.names.service,
        account=rbac.account(seen.name),
        gang=gang.of(request, seen.name),
    )


def _members(seen: Seen, request: Request) -> list[Document]:
    most = request.spec.workers.max
    return rbac.members(seen.name, _namespace(seen), most, labels.common(request.job), seen.owner)


def _budget(seen: Seen, request: Request) -> Document:
    return disruption.budget(seen.name, _namespace(seen), request.spec.workers.min, labels.common(request.job), seen.owner)


def _namespace(seen: Seen) -> str:
    return str(seen.document["metadata"]["namespace"])


def _owned(seen: Seen, document: Document) -> Document:
    meta = {**document["metadata"], "namespace": _namespace(seen), "ownerReferences": [seen.owner]}
    return {**document, "metadata": meta}


def _avoid(pod: Document, nodes: Sequence[str]) -> None:
    """Keep a pod off these nodes: in every term, since one that holds is enough."""
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    affinity = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]})
    for term in required["nodeSelectorTerms"]:
        term["matchExpressions"] = [*term.get("matchExpressions", []), expression]
