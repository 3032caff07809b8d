"""Computes a job's quota from its Kueue Workloads, and the changes to make to them. Pure.

A job has one Workload for its first workers and another for each later addition: workers that were not admitted at first, or that
`outlast scale` adds. That way, the admitted workers keep training while others wait, and each Workload can be evicted separately.
The job stops only if fewer than `workers.min` workers remain. Quota that the job no longer needs is returned by deleting
Workloads or marking pods as reclaimable (https://kueue.sigs.k8s.io/docs/concepts/workload/#dynamic-reclaim).

Kueue only requests evictions. The quota stays reserved until the pods are gone; then the operator releases it, as Kueue's own
integrations do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.api.owner_references import Identified, owned_by
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.manifests.scheduling.kueue import Priority
from outlast.kubernetes.operator.plan import Deletion

Document = dict[str, Any]
MakeWorkload = Callable[[str, int, int, Priority], Document]
"""(name, number of workers, minimum number of workers, priority) -> a Workload."""


@dataclass(frozen=True)
class KueueObjects:
    kind: Kind
    """The Workload kind, in the version that the cluster serves."""
    workloads: Sequence[Document] = ()
    """Workloads with the job's label."""
    flavors: Mapping[str, Document] = field(default_factory=dict)
    classes: Sequence[Document] = ()
    """All PriorityClasses and WorkloadPriorityClasses."""


@dataclass(frozen=True)
class ClusterFeatures:
    groups: frozenset[str] = frozenset()
    """API groups of Kueue and of the gang schedulers that the cluster serves."""
    kueue: KueueObjects | None = None
    """None until the watches on Kueue's objects are synced."""


@dataclass(frozen=True)
class WorkloadSlice(Identified):
    """A Workload, which holds the quota for some of the job's workers."""

    @property
    def requested(self) -> int:
        return int(self.document["spec"]["podSets"][0].get("count", 1))

    @property
    def count(self) -> int:
        """Number of workers for which the Workload has quota once it is admitted."""
        return kueue.admitted_count(self.document) - self.reclaimable

    @property
    def reclaimable(self) -> int:
        return sum(int(each["count"]) for each in self._status.get("reclaimablePods") or ())

    @property
    def is_finished(self) -> bool:
        """True if the Workload is finished or being deleted."""
        return bool(self.document["metadata"].get("deletionTimestamp")) or self.is_true("Finished")

    @property
    def is_admitted(self) -> bool:
        """True if the Workload is admitted, so its pods may be created."""
        return not self.is_finished and self.is_true("Admitted") and not self.is_true("Evicted")

    @property
    def is_evicted(self) -> bool:
        """True if the Workload is evicted but still has quota."""
        return not self.is_finished and self.is_true("QuotaReserved") and self.is_true("Evicted")

    @property
    def is_pending(self) -> bool:
        """True if the Workload waits for quota. Its requests can still be changed."""
        return not self.is_finished and not self.is_true("QuotaReserved")

    @property
    def awaits_checks(self) -> bool:
        """True if the Workload has quota and waits for admission checks."""
        return not self.is_finished and not self.is_admitted and not self.is_evicted and not self.is_pending

    @property
    def reason(self) -> str:
        """Kueue's message about why the Workload is not admitted; empty if there is none."""
        order = ("Evicted", "QuotaReserved", "Admitted") if self.is_evicted else ("QuotaReserved", "Admitted")
        for type_ in order:
            condition = self.condition(type_)
            if condition is not None and condition.get("message") and (condition["status"] == "True") == (type_ == "Evicted"):
                return str(condition["message"]).rstrip(".")
        return ""

    def condition(self, type_: str) -> Mapping[str, Any] | None:
        return next(pod_status.conditions(self.document, type_), None)

    def is_true(self, type_: str) -> bool:
        return pod_status.condition(self.document, type_) is not None

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.document.get("status") or {}

    # changed copies

    def with_status(self, now: float, conditions: Sequence[tuple[str, bool, str, str]], **fields: Any) -> Document:
        """Return the Workload with changed conditions (type, whether it is true, reason, message) and status fields."""
        by_type = {each["type"]: each for each in self._status.get("conditions") or ()}
        for type_, is_true, reason, message in conditions:
            status, previous = "True" if is_true else "False", by_type.get(type_, {})
            since = previous["lastTransitionTime"] if previous.get("status") == status else pod_status.rfc3339(now)
            by_type[type_] = {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": message[:1024],  # an arbitrary limit: Kueue's messages may be long
                "lastTransitionTime": since,
                "observedGeneration": self.document["metadata"].get("generation", 1),
            }
        status_ = {**self._status, "conditions": list(by_type.values()), **fields}
        return {**self.document, "status": {key: value for key, value in status_.items() if value is not None}}

    def with_quota_released(self, now: float) -> Document:
        """Return the evicted Workload without its quota, so that Kueue may queue it again. Its pods must be gone."""
        evicted = self.condition("Evicted")
        assert evicted is not None, "only an evicted Workload releases its quota"
        reason, message = evicted["reason"], evicted.get("message", "")
        conditions = [
            ("QuotaReserved", False, "Pending", message),
            # After other evictions, Kueue requeues the Workload by itself.
            ("Requeued", reason in ("Preempted", "NodeFailures"), reason, message),
        ]
        if self.is_true("Admitted"):
            conditions.append(("Admitted", False, "NoReservation", "The workload has no reservation"))
        if self.condition("PodsReady") is not None:
            conditions.append(("PodsReady", False, "WaitForStart", "Its pods have gone"))
        return self.with_status(now, conditions, admission=None, reclaimablePods=None)


@dataclass(frozen=True)
class Changes:
    apply: tuple[Document, ...] = ()
    statuses: tuple[Document, ...] = ()
    deletes: tuple[Deletion, ...] = ()


@dataclass(frozen=True)
class Queue:
    name: str
    """Empty if the job was taken out of its queue."""
    job: Mapping[str, Any]
    objects: KueueObjects
    slices: tuple[WorkloadSlice, ...]
    """The job's Workloads, oldest first."""

    @property
    def admitted_slices(self) -> list[WorkloadSlice]:
        return [workload for workload in self.slices if workload.is_admitted]

    @property
    def admitted_workers(self) -> int:
        return sum(workload.count for workload in self.admitted_slices)

    def largest_admitted(self, desired: int, sizes: Sequence[int]) -> int:
        """Return the largest allowed number of workers, up to `desired`, that the admitted quota covers; 0 if it covers none."""
        if not self.name:
            return desired
        return max((size for size in sizes if size <= min(desired, self.admitted_workers)), default=0)

    def rejects(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod uses the quota of a Workload that is no longer admitted."""
        name = _workload_name(pod)
        return bool(self.name and name) and not any(workload.name == name for workload in self.admitted_slices)

    def pending_reason(self) -> str:
        """Return why too few workers are admitted."""
        if evicted := next((workload for workload in self.slices if workload.is_evicted), None):
            return f"the queue {self.name} takes its quota back: {evicted.reason or 'no reason is given'}"
        pending = next((workload for workload in self.slices if workload.is_pending or workload.awaits_checks), None)
        because = f": {pending.reason}" if pending and pending.reason else ""
        return f"waits in the queue {self.name} to be admitted{because}"

    def missing_object(self) -> str:
        """Return a sentence about a missing flavor or priority class, or an empty string if none is missing."""
        for workload in self.admitted_slices:
            for flavor in sorted(kueue.flavors(workload.document) - self.objects.flavors.keys()):
                return f"the queue {self.name} has assigned the ResourceFlavor {flavor}, which does not exist"
        priority = kueue.priority(self.job, self.objects.classes)
        return priority if isinstance(priority, str) else ""

    def assign(self, pod: Document, free_quota: dict[str, int]) -> Document | None:
        """Assign a pod to a Workload, and subtract it from the Workload's entry in `free_quota`. Returns the changed pod, or None
        if there is no Workload that has free quota and whose flavors all exist."""
        for workload in self.admitted_slices:
            if free_quota[workload.name] > 0 and kueue.flavors(workload.document) <= self.objects.flavors.keys():
                free_quota[workload.name] -= 1
                return kueue.with_admission(pod, workload.document, self.objects.flavors)
        return None

    def changes(
        self,
        desired: int,
        sizes: Sequence[int],
        pods: Sequence[Mapping[str, Any]],
        has_world: bool,
        make_workload: MakeWorkload,
        now: float,
    ) -> Changes:
        """Return the changes to the Workloads for `desired` workers. `sizes` are the allowed numbers of workers, and `pods` are
        all pods that still use resources."""
        live = [workload for workload in self.slices if not workload.is_finished]
        if not self.name or not desired:  # a suspended job returns its quota once its pods are gone
            return Changes(
                deletes=tuple(_delete(workload, "the job needs no quota") for workload in live if not self.name or not pods)
            )
        size = self.largest_admitted(desired, sizes)
        if evicted := [workload for workload in live if workload.is_evicted]:
            used = {
                workload.name: bool(pods) if not size else any(_workload_name(pod) == workload.name for pod in pods)
                for workload in evicted
            }
            return Changes(statuses=tuple(workload.with_quota_released(now) for workload in evicted if not used[workload.name]))
        if not size and self.admitted_slices:  # request all workers together: a job with quota must not wait for more
            superfluous = () if pods else self.admitted_slices
            return Changes(deletes=tuple(_delete(workload, "too few workers are admitted") for workload in superfluous))
        released = self._release_surplus(desired, pods, now)
        ready = [
            # Without this condition, Kueue evicts the Workload after a timeout.
            workload.with_status(now, [("PodsReady", True, "Started", "Its workers train")])
            for workload in self.admitted_slices
            if has_world and released == Changes() and not workload.is_true("PodsReady")
        ]
        requested = self._request_missing(desired, sizes, pods, make_workload)
        return Changes(requested.apply, (*released.statuses, *ready), (*requested.deletes, *released.deletes))

    def finished_workloads(self, succeeded: bool, reason: str, now: float) -> tuple[Document, ...]:
        """Return the Workloads marked as finished, which frees their quota."""
        conditions = [("Finished", True, "Succeeded" if succeeded else "Failed", reason)]
        return tuple(workload.with_status(now, conditions) for workload in self.slices if not workload.is_finished)

    def _request_missing(
        self, desired: int, sizes: Sequence[int], pods: Sequence[Mapping[str, Any]], make_workload: MakeWorkload
    ) -> Changes:
        """Request quota for the workers that are not admitted yet, in exactly one waiting Workload."""
        missing = desired - self.admitted_workers - sum(workload.requested for workload in self.slices if workload.awaits_checks)
        pending = [workload for workload in self.slices if workload.is_pending]
        if missing <= 0:
            return Changes(deletes=tuple(_delete(workload, "the job needs no more quota") for workload in pending))
        extra = tuple(_delete(workload, "another Workload requests this quota") for workload in pending[1:])
        admitted_size = self.largest_admitted(desired, sizes)
        min_count = next(size for size in sizes if size > admitted_size) - self.admitted_workers
        min_count, priority = max(1, min(min_count, missing)), kueue.priority(self.job, self.objects.classes)
        if isinstance(priority, str) or (pending and _requests_exactly(pending[0], self.name, missing, priority)):
            return Changes(deletes=extra)
        return Changes(
            (make_workload(pending[0].name if pending else self._free_name(pods), missing, min_count, priority),), (), extra
        )

    def _free_name(self, pods: Sequence[Mapping[str, Any]]) -> str:
        meta, taken = self.job["metadata"], {workload.name for workload in self.slices} | {_workload_name(pod) for pod in pods}
        possible = (names.fit(f"{meta['name']}-{meta['uid'][:8]}-{number}") for number in range(len(taken) + 1))
        return next(name for name in possible if name not in taken)

    def _release_surplus(self, desired: int, pods: Sequence[Mapping[str, Any]], now: float) -> Changes:
        """Give back surplus quota that no pod uses, starting with the newest Workload."""
        surplus, free_quota = self.admitted_workers - desired, self.free_quota(pods)
        statuses, deletes = [], []
        for workload in reversed(self.admitted_slices):
            released = min(surplus, free_quota[workload.name])
            if released <= 0:
                continue
            surplus -= released
            if released == workload.count:
                deletes.append(_delete(workload, "the job no longer needs its quota"))
            else:
                reclaimable = {"name": kueue.PODS, "count": workload.reclaimable + released}
                statuses.append(workload.with_status(now, (), reclaimablePods=[reclaimable]))
        return Changes((), tuple(statuses), tuple(deletes))

    def free_quota(self, pods: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return the free quota of each admitted Workload, as a number of pods. Pods created before the job was put into the
        queue name no Workload, but use quota too."""
        free = {workload.name: workload.count for workload in self.admitted_slices}
        unassigned = 0
        for pod in pods:
            if (workload_name := _workload_name(pod)) in free:
                free[workload_name] -= 1
            else:
                unassigned += not workload_name
        for name in free:
            taken = min(unassigned, max(0, free[name]))
            free[name] -= taken
            unassigned -= taken
        return free


def queue_of(job: Mapping[str, Any], features: ClusterFeatures) -> Queue | None:
    """Return a job's queue, or None if there is no Kueue or the job has neither a queue nor Workloads."""
    if features.kueue is None:
        return None
    own = [WorkloadSlice(each) for each in features.kueue.workloads if owned_by(each, job)]
    slices = tuple(sorted(own, key=lambda each: (pod_status.created_at(each.document), len(each.name), each.name)))
    name = kueue.queue_name(job)
    return Queue(name, job, features.kueue, slices) if name or slices else None


def unsynced(job: Mapping[str, Any], features: ClusterFeatures) -> bool:
    """Return whether a job has a queue while Kueue's objects are not synced yet."""
    return kueue.GROUP in features.groups and features.kueue is None and bool(kueue.queue_name(job))


def _workload_name(pod: Mapping[str, Any]) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(kueue.WORKLOAD) or "")


def _requests_exactly(workload: WorkloadSlice, queue: str, count: int, priority: Priority) -> bool:
    """Return whether a Workload requests exactly these values. Its `minCount` is not compared, because Kueue drops it if partial
    admission is off."""
    fields = workload.document["spec"]
    return (fields.get("queueName"), workload.requested, fields.get("priority", 0)) == (queue, count, priority.value)


def _delete(workload: WorkloadSlice, reason: str) -> Deletion:
    return Deletion(workload.name, workload.uid, reason, kind=kind_of(workload.document))
