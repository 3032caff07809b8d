"""One look at a job: what the documents of the API server say, as values that `decide` asks about. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast import contract, spec
from outlast.backends import pods as podwords
from outlast.contract import LEASE_S, Annotation, Label
from outlast.controller import memory
from outlast.controller.memory import Memory
from outlast.errors import InvalidJob
from outlast.rendezvous.world import Member, Standing

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
"""Key of a Lease under which a cache says when, by its own clock, the Lease was renewed last: clocks of nodes differ."""


@dataclass(frozen=True)
class Limits:
    """How long the operator waits for what cannot be known, in seconds."""

    silence_s: float = LEASE_S
    """A member whose Lease was renewed no more for so long is dead."""
    lost_s: float = 30.0
    """A pod whose node has not answered for so long is lost, and deleted whatever its node says."""


@dataclass(frozen=True)
class Pod:
    """A pod of the job."""

    document: Document
    index: int
    node: str
    node_lost: float | None
    """Since when its node does not answer; -inf when the node is gone."""
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
    def leaves(self) -> bool:
        """Whether it is being deleted."""
        return podwords.leaves(self.document)

    @property
    def ended(self) -> podwords.End | None:
        """How it ended, if it will never run again."""
        return podwords.end(self.document) if podwords.over(self.document) else None

    @property
    def succeeded(self) -> bool:
        return podwords.phase(self.document) == "Succeeded"

    @property
    def waits(self) -> str:
        """Why it has not begun."""
        return podwords.waits(self.document)

    @property
    def alive(self) -> bool:
        """Whether it trains, or will."""
        return not self.leaves and not podwords.over(self.document)

    @property
    def last_words(self) -> str:
        """The last lines of its log, of a pod that failed."""
        state = podwords.container(self.document).get("state") or {}
        return str((state.get("terminated") or {}).get("message") or "")


@dataclass(frozen=True)
class Told:
    """What a member says on its Lease."""

    member: Member
    beat: float
    """When it was renewed last."""
    failure: Mapping[str, Any] | None
    """What failed in its generation, see `rendezvous.local.Report`."""
    step: int | None = None
    steps: int | None = None
    committed: int = 0


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
    found: frozenset[str] = frozenset()
    """API groups that the cluster serves."""
    limits: Limits = Limits()
    nodes: Mapping[str, Document] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

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
    found: frozenset[str] = frozenset(),
    limits: Limits | None = None,
) -> Seen:
    """One look: the job, the pods and Leases with its label, the nodes by name; `since` as in `Seen`."""
    uid = job["metadata"]["uid"]
    read, problem = _read(json.dumps(_document(job)))
    known = memory.read(job.get("status") or {})
    run = f"{job['metadata']['name']}-{uid[:8]}"
    all_ = sorted((_pod(pod, nodes) for pod in pods), key=lambda pod: pod.index)
    ours = tuple(pod for pod in all_ if _owned(pod.document, uid))
    return Seen(
        document=job,
        job=read,
        problem=problem,
        memory=known,
        run=run,
        pods=ours,
        others=tuple(pod for pod in all_ if pod not in ours),
        told={index: told for lease in leases for index, told in _told(lease, run, ours)},
        now=now,
        since=since,
        found=found,
        limits=limits or Limits(),
        nodes=nodes,
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


def _owned(pod: Document, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())


def _pod(pod: Document, nodes: Mapping[str, Document]) -> Pod:
    name = str(pod["spec"].get("nodeName") or "")
    node = nodes.get(name)
    taints = ((node or {}).get("spec") or {}).get("taints") or ()
    leaving = next((taint["key"] for taint in taints if taint["key"] in LEAVING), "")
    return Pod(pod, podwords.index(pod), name, silent_since(node) if name and nodes else None, leaving)


def silent_since(node: Document | None) -> float | None:
    """Since when a node does not answer: -inf for one that is gone, None for one that does."""
    if node is None:
        return float("-inf")
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] != "True":
            return memory.seconds(condition.get("lastTransitionTime")) or 0.0
    return None


def _told(lease: Document, run: str, pods: Sequence[Pod]) -> list[tuple[int, Told]]:
    """What a Lease says; nothing when it is of an earlier pod of this name, or of another run."""
    meta, fields = lease["metadata"], lease.get("spec") or {}
    annotations = meta.get("annotations") or {}
    try:
        index = int((meta.get("labels") or {})[Label.WORKER])
        report = json.loads(annotations[Annotation.REPORT])
        progress = json.loads(annotations.get(Annotation.PROGRESS) or "{}") or {}
        standing = Standing(report["standing"])
        member = Member(
            index,
            str(report["address"]),
            standing,
            int(report["generation"]),
            float(report["since"]),
            bool(report["failed"]),
        )
        beat = lease.get(HEARD) or memory.seconds(fields.get("renewTime")) or 0.0
        holder, said = fields.get("holderIdentity"), report.get("run")
        step, committed = progress.get("step"), int(progress.get("committed") or 0)
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or nobody's: it says nothing
        return []
    if said != run:
        return []
    pod = next((pod for pod in pods if pod.index == index), None)
    if pod is not None and pod.uid != holder:
        return []
    return [(index, Told(member, beat, report.get("failure"), step, progress.get("steps"), committed))]
