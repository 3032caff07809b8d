"""The documents that the operator makes for a job: its workers' pods, and what they need beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outlast import contract, spec
from outlast.kube.kinds import Kind
from outlast.manifests import disruption, gang, kueue, labels, names, objects, pods, rbac, rendezvous, variables, volumes
from outlast.manifests.kueue import Priority
from outlast.manifests.request import Request
from outlast.manifests.topologies import elasticjob
from outlast.operator.snapshot import Seen

Document = dict[str, Any]


def setup(seen: Seen) -> tuple[Document, ...]:
    """What must be there before the first pod. Raises InvalidJob for a job that no pods can be made of."""
    request = _request(seen)
    elasticjob.documents(request)  # whoever applies by kubectl has not been told what `outlast submit` refuses
    worker = pods.pod(request, _worker(seen, request), index=0, generation=0, file="")
    return (
        *objects.claims(request),  # nobody's: they may hold data that others want
        *_members(seen, request, bearer=worker["spec"].get("serviceAccountName") or "default"),
        _owned(seen, objects.service(request)),
        _budget(seen, request),
        *(_owned(seen, document) for document in _gang(seen, request).documents),
    )


def changed(seen: Seen) -> tuple[Document, ...]:
    """What a change of the job's workers changes of that."""
    request = _request(seen)
    return (
        *(document for document in _members(seen, request) if document["kind"] == "Role"),
        _budget(seen, request),
        *(_owned(seen, document) for document in _gang(seen, request).documents),
    )


def workload(seen: Seen, kind: Kind, name: str, count: int, least: int, priority: Priority) -> Document:
    """The Workload that asks for so many workers, see `manifests.kueue`."""
    request = _request(seen)
    meta = labels.metadata(request, name)
    meta["labels"] = {**meta["labels"], kueue.JOB_UID: seen.uid}
    template = pods.template(request, _worker(seen, request))
    queue = kueue.queue(seen.document)
    made = kueue.workload(kind, meta, queue=queue, template=template, count=count, least=least, priority=priority)
    return _owned(seen, made)


def workers(seen: Seen, indices: Sequence[int], generation: int, avoided: Sequence[str]) -> Iterator[Document]:
    """The pods of these workers, rather not on these nodes."""
    request = _request(seen)
    file = volumes.file(request.job)  # to write YAML takes longer than all else here
    for index in indices:
        pod = pods.pod(request, _worker(seen, request, index), index=index, generation=generation, file=file)
        made = _owned(seen, pod)
        made["spec"]["hostname"] = made["metadata"]["name"]  # only so has it a name behind the Service
        if avoided:
            _avoid(made["spec"], avoided)
        yield made


def checkpoints(job: spec.Job) -> str:
    """The URL above the job's checkpoints, empty when its output is in no store."""
    store = volumes.store(job)
    return f"{store}/{contract.CHECKPOINTS}" if store else ""


def _request(seen: Seen) -> Request:
    assert seen.job is not None
    fresh = (seen.document["metadata"].get("annotations") or {}).get(contract.Annotation.FRESH) == "true"
    return Request(seen.job, names.Names(seen.name), seen.run, carried=True, fresh=fresh)


def _worker(seen: Seen, request: Request, index: int = 0) -> pods.Worker:
    return pods.Worker(
        index=variables.plain(str(index)),
        rendezvous=_endpoint(seen, request),
        subdomain=request.names.service,
        account=rbac.account(seen.name),
        gang=_gang(seen, request),
    )


def _endpoint(seen: Seen, request: Request) -> str:
    """Who decides for the workers: the operator, or one of them that is elected in an etcd."""
    if request.spec.rendezvous.backend == "etcd":
        return rendezvous.endpoint(request, "", "")
    return f"{contract.KUBERNETES}{seen.name}"


def _gang(seen: Seen, request: Request) -> gang.Gang:
    return gang.of(request, seen.name, seen.gang)


def _members(seen: Seen, request: Request, *, bearer: str = "") -> list[Document]:
    # Workers that are still to save and leave need their Leases until they have, whatever may be wanted now.
    world = seen.memory.world.members if seen.memory.world else ()
    most = max([request.spec.workers.max, *(1 + index for index in (*(pod.index for pod in seen.pods), *world))])
    return rbac.members(seen.name, _namespace(seen), most, labels.common(request.job), seen.owner, bearer=bearer)


def _budget(seen: Seen, request: Request) -> Document:
    least = disruption.least(request.spec.workers)
    return disruption.budget(seen.name, _namespace(seen), least, labels.common(request.job), seen.owner)


def _namespace(seen: Seen) -> str:
    return str(seen.document["metadata"]["namespace"])


def _owned(seen: Seen, document: Document) -> Document:
    meta = {**document["metadata"], "namespace": _namespace(seen), "ownerReferences": [seen.owner]}
    return {**document, "metadata": meta}


def _avoid(pod: Document, nodes: Sequence[str]) -> None:
    """Keep a pod off these nodes where there are others: one that is found nowhere would wait for ever."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    preferred = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    preferred.append({"weight": 100, "preference": {"matchFields": fields}})
