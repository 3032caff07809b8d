"""Takes a snapshot of a job: parses the cached objects into values for `decide`. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from outlast.base.errors import InvalidJob
from outlast.base.typed_json import decode
from outlast.job import contract, spec
from outlast.job.contract import LEASE_S, Annotation, Label
from outlast.job.failure import Failure
from outlast.job.report.incidents import CAUSES
from outlast.kubernetes.api import document_parsing, owner_references, pod_status
from outlast.kubernetes.api.owner_references import Identified
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE
from outlast.kubernetes.manifests.scheduling import gang, kueue
from outlast.kubernetes.operator import elasticjob_status, kueue_workloads, leaving_nodes
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.kubernetes.operator.elasticjob_status import Losses, Status
from outlast.kubernetes.operator.kueue_workloads import ClusterFeatures
from outlast.kubernetes.operator.leaving_nodes import Departure
from outlast.rendezvous import root_cause
from outlast.rendezvous.messages import Report
from outlast.rendezvous.who_trains import Member

Document = Mapping[str, Any]

RECEIVED_AT = "heard"
"""Key under which the operator stores when a Lease's renewal arrived or a node became unready, by its own clock: the clocks of
other machines may be wrong."""
NNODES = f"{contract.GROUP}/nnodes"
"""Annotation on pods without an agent, with the value of torchrun's --nnodes."""
MAX_LEASE_S = 600.0
"""Upper bound for a Lease's duration, whatever its worker wrote."""


@dataclass(frozen=True)
class Limits:
    silence_s: float = LEASE_S
    """A member that has not renewed its Lease for this long is presumed dead."""
    mass_silence_s: float = 300.0
    """Replaces `silence_s` if most workers fall silent at once although their nodes are ready; see decision 17. The default is
    the time for which Kubernetes tolerates an unreachable node."""
    progress_s: float = 3.0
    """Minimum interval between status writes that only update the step. A world's first step is written at once."""
    lost_s: float = 30.0
    """A pod whose node has not answered for this long is presumed lost and force-deleted."""
    agent_image: str = OPERATOR_IMAGE
    """The operator's own image, from which pods get the agent if their image lacks Outlast."""


@dataclass(frozen=True)
class Pod(Identified):
    index: int
    node: str
    node_lost_at: float | None
    """When the pod's node stopped answering, or when the pod was bound to a node that does not exist."""
    departure: Departure | None = None
    """Set if the node or the pod itself has a termination notice."""

    @property
    def created(self) -> float:
        return pod_status.created_at(self.document)

    @property
    def first_generation(self) -> int:
        """The first generation in which the pod may be a member."""
        label = (self.document["metadata"].get("labels") or {}).get(Label.GENERATION, "")
        return int(label) if label.isdecimal() else 0

    @property
    def terminating(self) -> bool:
        return pod_status.terminating(self.document)

    @property
    def killed_by(self) -> float:
        """The time by which the kubelet kills the pod, if the pod is being deleted; otherwise 0."""
        return pod_status.timestamp(self.document["metadata"].get("deletionTimestamp"))

    @property
    def lingering(self) -> bool:
        """True if the worker has ended but the pod's phase does not show it yet, because a sidecar or the sandbox still
        exists."""
        if self.document["spec"].get("restartPolicy") != "Never":
            return False
        worker = pod_status.container_status(self.document)
        alone = len(self.document["spec"].get("containers") or ()) == 1
        ended = (alone or worker.get("name") in pod_status.CONTAINERS) and "terminated" in (worker.get("state") or {})
        return ended and not pod_status.finished(self.document)

    @property
    def ended(self) -> bool:
        return pod_status.finished(self.document) or self.lingering

    @property
    def end(self) -> pod_status.End | None:
        return pod_status.end(self.document) if self.ended else None

    @property
    def succeeded(self) -> bool:
        ended = self.end
        exited_with_0 = ended is not None and ended.code == 0 and (self.lingering or not pod_status.disrupted(self.document))
        return pod_status.phase(self.document) == "Succeeded" or exited_with_0

    @property
    def finalizer_problem(self) -> str:
        """A phrase about other controllers' finalizers that keep a terminated pod from disappearing; empty if there are none."""
        meta = self.document["metadata"]
        gone = self.terminating and meta.get("deletionGracePeriodSeconds") == 0 and pod_status.finished(self.document)
        finalizers = ", ".join(meta.get("finalizers") or ()) if gone else ""
        return f"has gone, and its name is kept by the finalizers {finalizers}; have them removed" if finalizers else ""

    @property
    def alive(self) -> bool:
        """True if the worker trains or will train."""
        return not self.terminating and not self.ended

    @property
    def log_tail(self) -> str:
        state = pod_status.container_status(self.document).get("state") or {}
        return str((state.get("terminated") or {}).get("message") or "")


@dataclass(frozen=True)
class LeaseProgress:
    """The Lease annotation `contract.Annotation.PROGRESS`, with the field names that `kubernetes.board` writes."""

    generation: int | None = None
    step: int | None = None
    steps: int | None = None
    committed: int = 0
    bytes: int = 0
    snapshot: int = 0
    """Step of the newest complete snapshot; 0 if unknown."""
    every: int = 0
    time: float = 0.0
    """When `step` was completed, by the member's clock; 0 if unknown."""
    goodput: float | None = None
    lost: Mapping[str, float] | None = None
    lostSteps: int | None = None
    whole: bool = False
    """True if `goodput` and the losses cover the whole run."""

    @property
    def losses(self) -> Losses:
        """The run's losses. Unknown causes are left out, because each cause becomes a time series of its own."""
        seconds = {cause: float(lost) for cause, lost in (self.lost or {}).items() if cause in CAUSES and lost > 0}
        return Losses(seconds, self.lostSteps or 0)


@dataclass(frozen=True)
class MemberReport:
    """A member's report on its Lease."""

    report: Report
    progress: LeaseProgress
    member: Member
    renewed: float
    failure: Failure | None
    """The failure of the member's current generation; see `rendezvous.messages.Report`."""
    echo: bool
    """True if `failure` was caused by another member's failure."""
    lease_s: float
    """Duration of the Lease, at most MAX_LEASE_S."""


@dataclass(frozen=True)
class PlainJob:
    """A job whose workers run plain torchrun, without an agent."""

    job: Document
    """The equivalent ElasticJob, with its workers, restarts and deadlines."""
    nnodes: str
    """The value of torchrun's --nnodes, such as `1:4`. Workers with different values cannot train together."""
    policy: str
    """The restart policy. `Never` allows no restarts, and `ExitCode` only those of pods that were killed, lost or never
    started."""
    service: Document
    pod: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class JobSnapshot(Identified):
    """A job and everything that belongs to it, at one point in time."""

    job: spec.Job | None
    """None if the job cannot be parsed; `parse_error` says why."""
    parse_error: str
    status: Status
    run: str
    pods: tuple[Pod, ...]
    foreign_pods: tuple[Pod, ...]
    """Pods with this job's labels that the job does not own, such as those of an earlier job with the same name."""
    reports: Mapping[int, MemberReport]
    now: float
    observed_since: float
    """When the last of the operator's watches connected. Silence before that may be due to the operator itself."""
    features: ClusterFeatures = field(default_factory=ClusterFeatures)
    queue: kueue_workloads.Queue | None = None
    limits: Limits = Limits()
    nodes: Mapping[str, Document] = field(default_factory=dict)
    refusal: str = ""
    plain: PlainJob | None = None

    @property
    def gang(self) -> gang.SchedulerName:
        """The gang scheduler for the job's pods, chosen in the first reconcile pass and then kept."""
        assert self.job is not None, "pods are only made for jobs that can be parsed"
        if self.status.started is None or self.job.spec.scheduling.gang != "auto":
            admitted = kueue.GROUP in self.features.groups and bool(kueue.queue_name(self.document))
            return gang.choose(self.job.spec, self.features.groups, admitted=admitted)
        return "volcano" if self.status.gang == "volcano" else "coscheduling" if self.status.gang == "coscheduling" else "none"

    @property
    def generation(self) -> int:
        """The job's `metadata.generation`, which grows with each change to the specification."""
        return int(self.document["metadata"].get("generation", 1))

    @property
    def owner(self) -> dict[str, Any]:
        """The owner reference for objects that are created for the job."""
        return owner_references.reference(self.document)


def take_snapshot(
    cached: CachedJob,
    now: float,
    features: ClusterFeatures | None = None,
    limits: Limits | None = None,
    *,
    plain: PlainJob | None = None,
) -> JobSnapshot:
    job, features = cached.job, features or ClusterFeatures()
    assert job is not None, "reconcilers are only called for jobs that exist"
    broken = str(job.get(document_parsing.UNREADABLE) or "")
    parsed, problem = (None, broken) if broken else _parse(json.dumps(plain.job if plain else _document(job)))
    run = f"{job['metadata']['name']}-{job['metadata']['uid'][:8]}"
    pods = pods_of(cached)
    owned = {id(pod) for pod in pods if owner_references.owned_by(pod.document, job)}
    own = tuple(pod for pod in pods if id(pod) in owned)
    holders = {pod.index: pod.uid for pod in reversed(own)}
    name = job["metadata"]["name"]
    return JobSnapshot(
        document=job,
        job=parsed,
        parse_error=problem,
        status=elasticjob_status.read(job.get("status") or {}),
        run=run,
        pods=own,
        foreign_pods=tuple(pod for pod in pods if id(pod) not in owned),
        reports={report.member.id: report for lease in cached.leases if (report := _report(lease, name, run, holders))},
        now=now,
        observed_since=cached.observed_since,
        features=features,
        queue=kueue_workloads.queue_of(job, features),
        limits=limits or Limits(),
        nodes=cached.nodes,
        refusal=cached.refusal,
        plain=plain if parsed else None,
    )


def _document(job: Document) -> dict[str, Any]:
    """Return the job as its author wrote it, without the metadata that others have added."""
    meta = job["metadata"]
    retained = {key: meta[key] for key in ("name", "namespace") if key in meta}
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if not _is_own_label(key)}
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND}
    return {**head, "metadata": {**retained, **({"labels": labels} if labels else {})}, "spec": job["spec"]}


@functools.lru_cache(maxsize=4096)  # the same job is reconciled again and again
def _parse(text: str) -> tuple[spec.Job | None, str]:
    try:
        return spec.of(json.loads(text)), ""
    except InvalidJob as error:
        return None, "; ".join(sentence for _, sentence in error.problems)


def _is_own_label(label: str) -> bool:
    prefix, slash, _ = label.partition("/")
    return bool(slash) and prefix.endswith(("app.kubernetes.io", contract.GROUP, "kueue.x-k8s.io"))


def pods_of(cached: CachedJob) -> list[Pod]:
    """Return the pods with the job's label, each with its node's state, sorted by index."""
    return sorted((_pod(pod, cached.nodes) for pod in cached.pods), key=lambda pod: pod.index)


def _pod(pod: Document, nodes: Mapping[str, Document]) -> Pod:
    name = str(pod["spec"].get("nodeName") or "")
    node = nodes.get(name)
    lost = None
    if name and nodes:  # a pod may name a new node before the node watch delivers it
        lost = pod_status.bound_at(pod) if node is None else _unready_since(node)
    return Pod(
        pod,
        pod_status.index(pod),
        name,
        lost,
        leaving_nodes.earliest(leaving_nodes.node_departure(node), leaving_nodes.pod_departure(pod)),
    )


def _unready_since(node: Document) -> float | None:
    for ready in pod_status.conditions(node, "Ready"):
        if ready["status"] != "True":
            return node.get(RECEIVED_AT) or pod_status.timestamp(ready.get("lastTransitionTime"))
    return None


def is_ready(node: Document) -> bool:
    return _unready_since(node) is None


def _report(lease: Document, job: str, run: str, holders: Mapping[int, str]) -> MemberReport | None:
    """Return the report on a Lease, or None if it is from an earlier pod or another run. Only the Lease's name identifies the
    worker, because a worker can change the labels of its Lease."""
    meta, fields = lease["metadata"], lease.get("spec") or {}
    annotations = meta.get("annotations") or {}
    try:
        index = int((meta.get("labels") or {})[Label.WORKER])
        report = decode(Report, from_json(annotations[Annotation.REPORT]))
        renewed = lease.get(RECEIVED_AT) or pod_status.timestamp(fields.get("renewTime"))
        since = min(float(report.since), renewed)  # its node's clock may be ahead
        lease_s = min(MAX_LEASE_S, float(fields.get("leaseDurationSeconds") or LEASE_S))
    except (KeyError, TypeError, ValueError, RecursionError):  # written by another version, or by others
        return None
    holder = fields.get("holderIdentity")
    if report.run != run or meta["name"] != contract.worker_name(job, index) or holders.get(index, holder) != holder:
        return None
    member = report.member(index, since=since, received=renewed)
    start = member.generation, report.attempt
    echo, failure = root_cause.reported(report.failure, index, start, since) if report.failure else (False, None)
    return MemberReport(report, _progress(annotations.get(Annotation.PROGRESS)), member, renewed, failure, echo, lease_s)


def _progress(text: str | None) -> LeaseProgress:
    try:
        return decode(LeaseProgress, from_json(text or "{}"))
    except (TypeError, ValueError):
        return LeaseProgress()
