"""One look at a job: what the documents of the API server say, as values that `decide` asks about. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from outlast import contract, spec
from outlast.contract import LEASE_S, Annotation, Label
from outlast.errors import InvalidJob
from outlast.kube import pods as podwords
from outlast.kube import wire
from outlast.kube.ownership import owned_by
from outlast.manifests import gang, kueue
from outlast.operator import job_status as memory
from outlast.operator import queues
from outlast.operator.job_status import Memory
from outlast.operator.queues import Found
from outlast.rendezvous import failures
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.transports.sockets import Report, is_count, is_number
from outlast.rendezvous.world import Member, Standing
from outlast.status import Failure

Document = Mapping[str, Any]

LEAVING = (
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "cloud.google.com/impending-node-termination",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
)
"""Taints of nodes that will soon be gone."""


HEARD = "heard"
"""Key under which a cache says when, by its own clock, it heard that a Lease was renewed last, or that a node answers no more:
other machines have other clocks."""


LONGEST_S = 600.0
"""No Lease is good for longer, whatever its worker says."""


@dataclass(frozen=True)
class Limits:
    """How long the operator waits for what cannot be known, in seconds."""

    silence_s: float = LEASE_S
    """A member whose Lease was renewed no more for so long is dead."""
    held_s: float = 300.0
    """When most workers fall silent at once though their nodes are well, none is dead before: see decision 17. As long as
    Kubernetes itself tolerates a node that it cannot reach, and several times what a kubelet takes to end an agent that hangs."""
    progress_s: float = 30.0
    """How often steps are written while nothing else is, but for the first step of a world."""
    lost_s: float = 30.0
    """A pod whose node has not answered for so long is lost, and deleted whatever its node says."""


@dataclass(frozen=True)
class Pod:
    """A pod of the job."""

    document: Document
    index: int
    node: str
    node_lost: float | None
    """Since when its node does not answer; of a node that is not there, since when the pod is on it."""
    node_leaves: str
    """The taint by which its node says that it will soon be gone; empty when it does not."""

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def born(self) -> float:
        """When it was made."""
        return podwords.born(self.document)

    @property
    def made_for(self) -> int:
        """The first world that it may be in."""
        said = (self.document["metadata"].get("labels") or {}).get(Label.GENERATION, "")
        return int(said) if said.isdecimal() else 0

    @property
    def leaves(self) -> bool:
        """Whether it is being deleted."""
        return podwords.leaves(self.document)

    @property
    def lingers(self) -> bool:
        """Whether its worker has ended, and other containers of it run on: those that a template or a webhook has added."""
        if self.document["spec"].get("restartPolicy") != "Never":
            return False
        worker = podwords.container_status(self.document)
        ended = worker.get("name") == contract.Pod.CONTAINER and "terminated" in (worker.get("state") or {})
        return ended and not podwords.over(self.document)

    @property
    def over(self) -> bool:
        """Whether its worker will never run again."""
        return podwords.over(self.document) or self.lingers

    @property
    def ended(self) -> podwords.End | None:
        """How its worker ended, if it will never run again."""
        return podwords.end(self.document) if self.over else None

    @property
    def succeeded(self) -> bool:
        ended = self.ended if self.lingers else None
        return podwords.phase(self.document) == "Succeeded" or (ended is not None and ended.code == 0)

    @property
    def waits(self) -> str:
        """Why it has not begun."""
        return podwords.waits(self.document)

    @property
    def stuck(self) -> str:
        """What keeps it from beginning, if people should know of it."""
        return podwords.stuck(self.document)

    @property
    def kept(self) -> str:
        """What keeps it although it has gone: finalizers, which others are to remove; empty when nothing does."""
        meta = self.document["metadata"]
        gone = self.leaves and meta.get("deletionGracePeriodSeconds") == 0 and podwords.over(self.document)
        found = ", ".join(meta.get("finalizers") or ()) if gone else ""
        return f"has gone, and its name is kept by the finalizers {found}; have them removed" if found else ""

    @property
    def alive(self) -> bool:
        """Whether it trains, or will."""
        return not self.leaves and not self.over

    @property
    def last_words(self) -> str:
        """The last lines of its log, of a pod that failed."""
        state = podwords.container_status(self.document).get("state") or {}
        return str((state.get("terminated") or {}).get("message") or "")


@dataclass(frozen=True)
class Told:
    """What a member says on its Lease."""

    member: Member
    beat: float
    """When it was renewed last."""
    failure: Failure | None
    """What failed in its generation, see `rendezvous.transports.sockets.Report`."""
    echo: bool = False
    """Whether that only echoes the failure of another."""
    step: int | None = None
    steps: int | None = None
    committed: int = 0
    generation: int | None = None
    """In which generation that step was; None when it is not told."""
    time: float = 0.0
    """When, by the member's clock; 0 when it is not told."""
    decided: tuple[int, schema.Said] | None = None
    """What it has heard last of those who decide by an etcd, and the revision of that."""
    lasts: float = LEASE_S
    """For how many seconds its Lease says that it is good; at most LONGEST_S."""


@dataclass(frozen=True)
class Seen:
    """What there is to be seen of a job."""

    document: Document
    job: spec.Job | None
    """None when it cannot be read; `problem` says why."""
    problem: str
    memory: Memory
    run: str
    pods: tuple[Pod, ...]
    """By index."""
    others: tuple[Pod, ...]
    """Pods that have the name of one of ours and are not: left over from a job of this name."""
    told: Mapping[int, Told]
    now: float
    since: float
    """Since when we have been listening without a break: silence before that is ours."""
    found: Found = field(default_factory=Found)
    """What else the cluster has."""
    queue: queues.Queue | None = None
    limits: Limits = Limits()
    nodes: Mapping[str, Document] = field(default_factory=dict)
    refused: str = ""
    """Why its pods could not be made when that was tried last: a sentence."""

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def gang(self) -> gang.Who:
        """Who starts its pods all or none: decided when it is taken up, and the same for all pods that it will ever have."""
        assert self.job is not None, "only of a job that can be read pods are made"
        if self.memory.started is None or self.job.spec.scheduling.gang != "auto":
            admitted = kueue.GROUP in self.found.groups and bool(kueue.queue(self.document))
            return gang.choose(self.job.spec, self.found.groups, admitted=admitted)
        return "volcano" if self.memory.gang == "volcano" else "coscheduling" if self.memory.gang == "coscheduling" else "none"

    @property
    def generation(self) -> int:
        """How often its specification has changed."""
        return int(self.document["metadata"].get("generation", 1))

    @property
    def owner(self) -> dict[str, Any]:
        """The reference by which all that is made for it goes with it."""
        return {
            "apiVersion": self.document["apiVersion"],
            "kind": self.document["kind"],
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def observe(
    job: Document,
    pods: Sequence[Document],
    leases: Sequence[Document],
    nodes: Mapping[str, Document],
    now: float,
    since: float,
    found: Found | None = None,
    limits: Limits | None = None,
    refused: str = "",
) -> Seen:
    """One look: the job, the pods and Leases with its label, the nodes by name; `since` and `refused` as in `Seen`."""
    uid = job["metadata"]["uid"]
    broken = str(job.get(wire.UNREADABLE) or "")
    read, problem = (None, broken) if broken else _read(json.dumps(_document(job)))
    known = memory.read(job.get("status") or {})
    run = f"{job['metadata']['name']}-{uid[:8]}"
    all_ = seen_pods(pods, nodes)
    owned = {id(pod) for pod in all_ if owned_by(pod.document, job)}
    ours = tuple(pod for pod in all_ if id(pod) in owned)
    holders = {pod.index: pod.uid for pod in reversed(ours)}
    name = job["metadata"]["name"]
    return Seen(
        document=job,
        job=read,
        problem=problem,
        memory=known,
        run=run,
        pods=ours,
        others=tuple(pod for pod in all_ if id(pod) not in owned),
        told={index: told for lease in leases for index, told in _told(lease, name, run, holders)},
        now=now,
        since=since,
        found=found or Found(),
        queue=queues.of(job, found or Found()),
        limits=limits or Limits(),
        nodes=nodes,
        refused=refused,
    )


def _document(job: Document) -> dict[str, Any]:
    """The job as its author wrote it: without what others have added to its metadata."""
    meta = job["metadata"]
    kept = {key: meta[key] for key in ("name", "namespace") if key in meta}
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if not _ours(key)}
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND}
    return {**head, "metadata": {**kept, **({"labels": labels} if labels else {})}, "spec": job["spec"]}


@functools.lru_cache(maxsize=4096)  # the same text is the same job: each is looked at again and again
def _read(text: str) -> tuple[spec.Job | None, str]:
    """The job, or why it cannot be read."""
    try:
        return spec.of(json.loads(text)), ""
    except InvalidJob as error:
        return None, "; ".join(sentence for _, sentence in error.problems)


def _ours(label: str) -> bool:
    prefix, slash, _ = label.partition("/")
    return bool(slash) and prefix.endswith(("app.kubernetes.io", contract.GROUP, "kueue.x-k8s.io"))


def seen_pods(pods: Sequence[Document], nodes: Mapping[str, Document]) -> list[Pod]:
    """Pods by index, each with what is to be said of its node."""
    return sorted((_pod(pod, nodes) for pod in pods), key=lambda pod: pod.index)


def _pod(pod: Document, nodes: Mapping[str, Document]) -> Pod:
    name = str(pod["spec"].get("nodeName") or "")
    node = nodes.get(name)
    taints = ((node or {}).get("spec") or {}).get("taints") or ()
    leaving = next((taint["key"] for taint in taints if taint["key"] in LEAVING), "")
    lost = None
    if name and nodes:  # one that has just joined is in its pods before the watch of nodes tells of it
        lost = podwords.bound(pod) if node is None else _silent_since(node)
    return Pod(pod, podwords.index(pod), name, lost, leaving)


def _silent_since(node: Document) -> float | None:
    """Since when a node does not answer, None for one that does."""
    for ready in podwords.conditions(node, "Ready"):
        if ready["status"] != "True":
            return node.get(HEARD) or podwords.seconds(ready.get("lastTransitionTime"))
    return None


def answers(node: Document) -> bool:
    """Whether a node does."""
    return _silent_since(node) is None


def _told(lease: Document, job: str, run: str, holders: Mapping[int, str]) -> list[tuple[int, Told]]:
    """What a Lease says; nothing when it is of an earlier pod of this name, or of another run. Its labels its author may choose;
    its name says whose it is."""
    meta, fields = lease["metadata"], lease.get("spec") or {}
    annotations = meta.get("annotations") or {}
    try:
        index = int((meta.get("labels") or {})[Label.WORKER])
        report = Report.of(from_json(annotations[Annotation.REPORT]))
        progress = from_json(annotations.get(Annotation.PROGRESS) or "{}") or {}
        member = Member(index, report.address, Standing(report.standing), report.generation, float(report.since), report.failed)
        beat = lease.get(HEARD) or podwords.seconds(fields.get("renewTime"))
        holder, said = fields.get("holderIdentity"), report.run
        step, steps, committed, generation = (_count(progress.get(each)) for each in ("step", "steps", "committed", "generation"))
        time = float(progress["time"]) if is_number(progress.get("time")) else 0.0
        lasts = min(LONGEST_S, float(fields.get("leaseDurationSeconds") or LEASE_S))
        failed = report.failure or {}
        echo, failure = failures.reported(failed, index, member.generation, member.since) if failed else (False, None)
        decided = _decided(annotations.get(Annotation.DECIDED, ""))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # of another version, or nobody's: it says nothing
        return []
    if said != run or meta["name"] != contract.worker_name(job, index):
        return []
    if holders.get(index, holder) != holder:
        return []
    return [(index, Told(member, beat, failure, echo, step, steps, committed or 0, generation, time, decided, lasts))]


def _count(value: object) -> int | None:
    """A number of something that a member tells; None when it is none."""
    return value if is_count(value) and isinstance(value, int) else None


def _decided(text: str) -> tuple[int, schema.Said] | None:
    """What a member says that others have decided, and the revision of that."""
    heard = json.loads(text) if text else None
    said = _readable(schema.Said.loads(json.dumps(heard.get("said")))) if heard else None
    return (int(heard.get("revision") or 0), said) if heard and said else None


def _readable(said: schema.Said | None) -> schema.Said | None:
    """What was decided; without its last failure if that is of another version: it is counted all the same."""
    try:
        Failure.model_validate(said.failure if said else None)
    except ValidationError:
        return replace(said, failure=None) if said else None
    return said
