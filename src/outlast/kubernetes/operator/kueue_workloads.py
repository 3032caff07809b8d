"""Kueue: the Workloads of a job, the quota admitted for each, and the changes to be made to them.

A job has one Workload for its first workers, and one more for each addition during training: for workers that were not admitted
at first, and for those that `outlast scale` adds. So training goes on with the workers that are admitted, and the job never
requests quota that it already has. Each Workload can be evicted separately: the job shrinks by its workers, and stops only below
`workers.min`. Quota that a job no longer needs is given back: Workloads are deleted as a whole, or part of their quota is marked
as reclaimable (https://kueue.sigs.k8s.io/docs/concepts/workload/#dynamic-reclaim).

An eviction is a request by Kueue. The quota stays reserved until the pods are gone; then the creator of the Workload releases it,
as Kueue's own integrations do. No state is kept between reconcile passes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.api.kinds import Kind, kind_of
from outlast.kubernetes.api.owner_references import owned_by
from outlast.kubernetes.manifests.scheduling import kueue
from outlast.kubernetes.manifests.scheduling.kueue import Priority
from outlast.kubernetes.operator import elasticjob_status
from outlast.kubernetes.operator.plan import Deletion

Document = dict[str, Any]
Make = Callable[[str, int, int, Priority], Document]
"""(name, number of workers, minimum number of workers, priority) -> a Workload."""


@dataclass(frozen=True)
class KueueObjects:
    """The Kueue objects that concern a job."""

    kind: Kind
    """The kind of Workloads, in the version that the cluster serves."""
    workloads: Sequence[Document] = ()
    """Workloads with the label of the job."""
    flavors: Mapping[str, Document] = field(default_factory=dict)
    """All ResourceFlavors, by name."""
    classes: Sequence[Document] = ()
    """All PriorityClasses and WorkloadPriorityClasses."""


@dataclass(frozen=True)
class ClusterFeatures:
    """Optional features of the cluster."""

    groups: frozenset[str] = frozenset()
    """Served API groups of Kueue and of gang schedulers."""
    kueue: KueueObjects | None = None
    """None until the watches of Kueue's objects are synced."""


@dataclass(frozen=True)
class WorkloadSlice:
    """A Workload of the job: a slice of its workers with quota of its own."""

    document: Document

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def requested(self) -> int:
        """Number of workers for which the Workload requests quota."""
        return int(self.document["spec"]["podSets"][0].get("count", 1))

    @property
    def count(self) -> int:
        """Number of workers for which the Workload has quota, once admitted."""
        return kueue.admitted(self.document) - self.given_back

    @property
    def given_back(self) -> int:
        return sum(int(each["count"]) for each in self._status.get("reclaimablePods") or ())

    @property
    def over(self) -> bool:
        """Whether the Workload is finished or being deleted."""
        return bool(self.document["metadata"].get("deletionTimestamp")) or self.true("Finished")

    @property
    def holds(self) -> bool:
        """Whether the Workload is admitted, so that its pods may exist."""
        return not self.over and self.true("Admitted") and not self.true("Evicted")

    @property
    def leaves(self) -> bool:
        """Whether the Workload is evicted but still has quota."""
        return not self.over and self.true("QuotaReserved") and self.true("Evicted")

    @property
    def waits(self) -> bool:
        """Whether the Workload waits for quota. As long as it does, its requests can be changed."""
        return not self.over and not self.true("QuotaReserved")

    @property
    def checked(self) -> bool:
        """Whether the Workload has quota and waits for admission checks."""
        return not self.over and not self.holds and not self.leaves and not self.waits

    @property
    def reason(self) -> str:
        """Why the Workload is not admitted, in Kueue's words."""
        order = ("Evicted", "QuotaReserved", "Admitted") if self.leaves else ("QuotaReserved", "Admitted")
        for type_ in order:
            condition = self.condition(type_)
            if condition is not None and condition.get("message") and (condition["status"] == "True") == (type_ == "Evicted"):
                return str(condition["message"]).rstrip(".")
        return ""

    def condition(self, type_: str) -> Document | None:
        return next((each for each in self._status.get("conditions") or () if each["type"] == type_), None)

    def true(self, type_: str) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition["status"] == "True"

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.document.get("status") or {}

    # changed documents

    def with_status(self, now: float, conditions: Sequence[tuple[str, bool, str, str]], **fields: Any) -> Document:
        """The Workload with these conditions (type, whether it is true, reason, message), and other fields of its status,
        changed."""
        made = {each["type"]: each for each in self._status.get("conditions") or ()}
        for type_, holds, reason, message in conditions:
            status, previous = "True" if holds else "False", made.get(type_, {})
            since = previous["lastTransitionTime"] if previous.get("status") == status else elasticjob_status.text(now)
            made[type_] = {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": message[:1024],  # more than enough of messages that others wrote
                "lastTransitionTime": since,
                "observedGeneration": self.document["metadata"].get("generation", 1),
            }
        status_ = {**self._status, "conditions": list(made.values()), **fields}
        return {**self.document, "status": {key: value for key, value in status_.items() if value is not None}}

    def cleared(self, now: float) -> Document:
        """The evicted Workload after its pods are gone: it gives its quota back, and Kueue may queue it again."""
        evicted = self.condition("Evicted")
        assert evicted is not None, "only what was evicted is cleared"
        reason, message = evicted["reason"], evicted.get("message", "")
        conditions = [
            ("QuotaReserved", False, "Pending", message),
            ("Requeued", reason in ("Preempted", "NodeFailures"), reason, message),  # other evictions: Kueue requeues by itself
        ]
        spent: Document = {}
        if (admitted := self.condition("Admitted")) is not None and admitted["status"] == "True":
            conditions.append(("Admitted", False, "NoReservation", "The workload has no reservation"))
            accumulated = int(self._status.get("accumulatedPastExecutionTimeSeconds") or 0)
            began = pod_status.timestamp(admitted["lastTransitionTime"]) or now
            spent = {"accumulatedPastExecutionTimeSeconds": accumulated + max(0, int(now - began))}
        if self.condition("PodsReady") is not None:
            conditions.append(("PodsReady", False, "WaitForStart", "Its pods have gone"))
        return self.with_status(now, conditions, admission=None, reclaimablePods=None, **spent)

    def reduced(self, by: int, now: float) -> Document:
        """The Workload with the quota of this many more workers marked as reclaimable."""
        return self.with_status(now, (), reclaimablePods=[{"name": kueue.PODS, "count": self.given_back + by}])

    def trains(self, now: float) -> Document:
        """The Workload with PodsReady true, so that Kueue's start timeout does not evict it."""
        return self.with_status(now, [("PodsReady", True, "Started", "Its workers train")])

    def finished(self, well: bool, reason: str, now: float) -> Document:
        """The Workload with Finished true."""
        return self.with_status(now, [("Finished", True, "Succeeded" if well else "Failed", reason)])


@dataclass(frozen=True)
class Changes:
    apply: tuple[Document, ...] = ()
    statuses: tuple[Document, ...] = ()
    deletes: tuple[Deletion, ...] = ()


@dataclass(frozen=True)
class Queue:
    """The queue of a job and its Workloads."""

    name: str
    """Name of the queue; empty for a job that was taken out of its queue."""
    job: Mapping[str, Any]
    objects: KueueObjects
    slices: tuple[WorkloadSlice, ...]
    """Sorted by age, the oldest first."""

    @property
    def holding(self) -> list[WorkloadSlice]:
        return [part for part in self.slices if part.holds]

    @property
    def admitted(self) -> int:
        """The number of workers that have quota."""
        return sum(part.count for part in self.holding)

    def largest(self, desired: int, sizes: Sequence[int]) -> int:
        """The largest allowed number of workers, up to `desired`, that has quota; 0 if too few workers are admitted."""
        if not self.name:
            return desired
        return max((size for size in sizes if size <= min(desired, self.admitted)), default=0)

    def refuses(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod belongs to a Workload that is no longer admitted."""
        named = _workload(pod)
        return bool(self.name and named) and not any(part.name == named for part in self.holding)

    def reason(self) -> str:
        """Why too few workers are admitted."""
        if leaving := next((part for part in self.slices if part.leaves), None):
            return f"the queue {self.name} takes its quota back: {leaving.reason or 'no reason is given'}"
        waiting = next((part for part in self.slices if part.waits or part.checked), None)
        because = f": {waiting.reason}" if waiting and waiting.reason else ""
        return f"waits in the queue {self.name} to be admitted{because}"

    def missing_object(self) -> str:
        """A sentence about a missing flavor or priority class; else empty."""
        for part in self.holding:
            for flavor in sorted(kueue.flavors(part.document) - self.objects.flavors.keys()):
                return f"the queue {self.name} has assigned the ResourceFlavor {flavor}, which is not there"
        priority = self.priority()
        return priority if isinstance(priority, str) else ""

    def place(self, pod: Document, room: dict[str, int]) -> Document | None:
        """The new pod assigned to a Workload with room; None if none has room, or a flavor is missing."""
        for part in self.holding:
            if room[part.name] > 0 and kueue.flavors(part.document) <= self.objects.flavors.keys():
                room[part.name] -= 1
                return kueue.placed(pod, part.document, self.objects.flavors)
        return None

    def changes(
        self,
        desired: int,
        sizes: Sequence[int],
        pods: Sequence[Mapping[str, Any]],
        trains: bool,
        make: Make,
        now: float,
    ) -> Changes:
        """Compute the changes of the Workloads. `desired` is the number of workers in the job's specification, and `sizes` are
        the allowed numbers; `pods` are all pods that still use resources; `trains` says whether there is a world; `make` makes a
        Workload."""
        live = [part for part in self.slices if not part.over]
        if not self.name or not desired:  # quota is given back when the pods of a suspended job have gone
            return Changes(deletes=tuple(_delete(part, "the job needs no quota") for part in live if not self.name or not pods))
        stands = self.largest(desired, sizes)
        if leaving := [part for part in live if part.leaves]:
            used = {part.name: bool(pods) if not stands else any(_workload(pod) == part.name for pod in pods) for part in leaving}
            return Changes(statuses=tuple(part.cleared(now) for part in leaving if not used[part.name]))
        if not stands and self.holding:  # all workers are requested again together: quota must not wait for quota
            left = () if pods else self.holding
            return Changes(deletes=tuple(_delete(part, "too few workers are admitted") for part in left))
        back = self._surplus(desired, pods, now)
        ready = [part.trains(now) for part in self.holding if trains and back == Changes() and not part.true("PodsReady")]
        requested = self._requests(desired, sizes, pods, make)
        return Changes(requested.apply, (*back.statuses, *ready), (*requested.deletes, *back.deletes))

    def ended(self, well: bool, reason: str, now: float) -> tuple[Document, ...]:
        """The Workloads marked as finished once the job has ended, which frees their quota."""
        return tuple(part.finished(well, reason, now) for part in self.slices if not part.over)

    def priority(self) -> Priority | str:
        """The priority of the job's Workloads, or a sentence if its class is missing."""
        return kueue.priority(self.job, self.objects.classes)

    def _requests(self, desired: int, sizes: Sequence[int], pods: Sequence[Mapping[str, Any]], make: Make) -> Changes:
        """Keep exactly one waiting Workload, for the workers that are not admitted yet."""
        missing = desired - self.admitted - sum(part.requested for part in self.slices if part.checked)
        waiting = [part for part in self.slices if part.waits]
        if missing <= 0:
            return Changes(deletes=tuple(_delete(part, "the job needs no more quota") for part in waiting))
        extra = tuple(_delete(part, "another Workload asks for it") for part in waiting[1:])
        stands = self.largest(desired, sizes)
        least = next(size for size in sizes if size > stands) - self.admitted
        least, priority = max(1, min(least, missing)), self.priority()
        if isinstance(priority, str) or (waiting and _requests_exactly(waiting[0], self.name, missing, priority)):
            return Changes(deletes=extra)
        return Changes((make(waiting[0].name if waiting else self._free(pods), missing, least, priority),), (), extra)

    def _free(self, pods: Sequence[Mapping[str, Any]]) -> str:
        """A name that neither a Workload of the job nor an existing pod uses."""
        meta, taken = self.job["metadata"], {part.name for part in self.slices} | {_workload(pod) for pod in pods}
        names = (kueue.name(meta["name"], meta["uid"], number) for number in range(len(taken) + 1))
        return next(name for name in names if name not in taken)

    def _surplus(self, desired: int, pods: Sequence[Mapping[str, Any]], now: float) -> Changes:
        """Give back surplus quota that no pods use, starting with the newest Workload."""
        surplus, room = self.admitted - desired, self.room(pods)
        statuses, deletes = [], []
        for part in reversed(self.holding):
            back = min(surplus, room[part.name])
            if back <= 0:
                continue
            surplus -= back
            if back == part.count:
                deletes.append(_delete(part, "the job needs it no more"))
            else:
                statuses.append(part.reduced(back, now))
        return Changes((), tuple(statuses), tuple(deletes))

    def room(self, pods: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Free quota of each Workload, in pods. Pods that name no Workload, as they were created before there was a queue, also
        use up free quota."""
        room = {part.name: part.count for part in self.holding}
        nobodys = 0
        for pod in pods:
            if (named := _workload(pod)) in room:
                room[named] -= 1
            else:
                nobodys += not named
        for name in room:
            taken = min(nobodys, max(0, room[name]))
            room[name] -= taken
            nobodys -= taken
        return room


def of(job: Mapping[str, Any], features: ClusterFeatures) -> Queue | None:
    """The queue of a job; None without Kueue, or for a job that has neither a queue nor Workloads."""
    if features.kueue is None:
        return None
    own = (each for each in features.kueue.workloads if owned_by(each, job))
    slices = tuple(sorted((WorkloadSlice(each) for each in own), key=lambda part: (_created(part), len(part.name), part.name)))
    name = kueue.queue(job)
    return Queue(name, job, features.kueue, slices) if name or slices else None


def unknown(job: Mapping[str, Any], features: ClusterFeatures) -> bool:
    """Whether a job is in a queue but Kueue's objects are not synced yet."""
    return kueue.GROUP in features.groups and features.kueue is None and bool(kueue.queue(job))


def _created(part: WorkloadSlice) -> str:
    return str(part.document["metadata"].get("creationTimestamp") or "")


def _workload(pod: Mapping[str, Any]) -> str:
    """Name of the Workload whose quota a pod uses; else empty."""
    return str((pod["metadata"].get("annotations") or {}).get(kueue.WORKLOAD) or "")


def _requests_exactly(part: WorkloadSlice, queue: str, count: int, priority: Priority) -> bool:
    """Whether a Workload already requests exactly this. Ignores `minCount`, which Kueue drops if partial admission is off."""
    fields = part.document["spec"]
    return (fields.get("queueName"), part.requested, fields.get("priority", 0)) == (queue, count, priority.value)


def _delete(part: WorkloadSlice, reason: str) -> Deletion:
    return Deletion(part.name, part.uid, reason, kind=kind_of(part.document))
