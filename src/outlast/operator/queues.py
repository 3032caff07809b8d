"""Jobs that wait in a queue of Kueue: what Kueue has admitted of them, and what it is to be asked for or told.

A job has a Workload for its first workers, and one more for each addition while it trains: for what was admitted in part, and for
what `outlast scale` adds. So training goes on with what there is, and never asks for quota that it holds already. Each can be
evicted by itself: the job shrinks by it, and stops only below `workers.min`. What a job needs no more it gives back: whole
Workloads are deleted, of others a part is reclaimed (https://kueue.sigs.k8s.io/docs/concepts/workload/#dynamic-reclaim).

An eviction is Kueue's wish. The quota is held until the pods have gone; who made the Workload takes it off then, as Kueue's own
integrations do. Everything is seen anew in each look; nothing is remembered. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kube import pods as podwords
from outlast.kube.kinds import Kind, kind_of
from outlast.kube.ownership import owned_by
from outlast.manifests import kueue
from outlast.manifests.kueue import Priority
from outlast.operator import job_status
from outlast.operator.plan import Deletion

Document = dict[str, Any]
Make = Callable[[str, int, int, Priority], Document]
"""(name, how many workers, the fewest, priority) -> a Workload."""


@dataclass(frozen=True)
class KueueObjects:
    """What Kueue says, as documents."""

    kind: Kind
    """Of Workloads, in the version that the cluster serves."""
    workloads: Sequence[Document] = ()
    """Those with the label of the job."""
    flavors: Mapping[str, Document] = field(default_factory=dict)
    """All ResourceFlavors, by name."""
    classes: Sequence[Document] = ()
    """All PriorityClasses and WorkloadPriorityClasses."""


@dataclass(frozen=True)
class ClusterFeatures:
    """What else the cluster has."""

    groups: frozenset[str] = frozenset()
    """API groups of Kueue and of schedulers of gangs."""
    kueue: KueueObjects | None = None
    """None until it is known what Kueue says."""


@dataclass(frozen=True)
class Share:
    """A Workload of the job: the quota of some of its workers."""

    document: Document

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def asked(self) -> int:
        """For how many workers."""
        return int(self.document["spec"]["podSets"][0].get("count", 1))

    @property
    def count(self) -> int:
        """How many workers it has quota for, once it is admitted."""
        return kueue.admitted(self.document) - self.given_back

    @property
    def given_back(self) -> int:
        return sum(int(each["count"]) for each in self._status.get("reclaimablePods") or ())

    @property
    def over(self) -> bool:
        """Whether it counts no more."""
        return bool(self.document["metadata"].get("deletionTimestamp")) or self.true("Finished")

    @property
    def holds(self) -> bool:
        """Whether pods may be there because of it."""
        return not self.over and self.true("Admitted") and not self.true("Evicted")

    @property
    def leaves(self) -> bool:
        """Whether it is to give up the quota that it still has."""
        return not self.over and self.true("QuotaReserved") and self.true("Evicted")

    @property
    def waits(self) -> bool:
        """Whether it waits for quota; until then it can be changed."""
        return not self.over and not self.true("QuotaReserved")

    @property
    def checked(self) -> bool:
        """Whether it has quota, and waits for what else the queue asks for."""
        return not self.over and not self.holds and not self.leaves and not self.waits

    @property
    def reason(self) -> str:
        """Why it is not admitted, in Kueue's words."""
        order = ("Evicted", "QuotaReserved", "Admitted") if self.leaves else ("QuotaReserved", "Admitted")
        for type_ in order:
            said = self.condition(type_)
            if said is not None and said.get("message") and (said["status"] == "True") == (type_ == "Evicted"):
                return str(said["message"]).rstrip(".")
        return ""

    def condition(self, type_: str) -> Document | None:
        return next((each for each in self._status.get("conditions") or () if each["type"] == type_), None)

    def true(self, type_: str) -> bool:
        found = self.condition(type_)
        return found is not None and found["status"] == "True"

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.document.get("status") or {}

    # what it can be told

    def but(self, now: float, conditions: Sequence[tuple[str, bool, str, str]], **fields: Any) -> Document:
        """The Workload with other conditions (type, whether it is true, reason, message), and other fields of its status."""
        made = {each["type"]: each for each in self._status.get("conditions") or ()}
        for type_, holds, reason, message in conditions:
            status, before = "True" if holds else "False", made.get(type_, {})
            since = before["lastTransitionTime"] if before.get("status") == status else job_status.text(now)
            made[type_] = {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": message[:1024],  # more than enough of what others say
                "lastTransitionTime": since,
                "observedGeneration": self.document["metadata"].get("generation", 1),
            }
        status_ = {**self._status, "conditions": list(made.values()), **fields}
        return {**self.document, "status": {key: value for key, value in status_.items() if value is not None}}

    def cleared(self, now: float) -> Document:
        """Its pods have gone: it has no quota any more, and waits again if Kueue lets it."""
        evicted = self.condition("Evicted")
        assert evicted is not None, "only what was evicted is cleared"
        reason, message = evicted["reason"], evicted.get("message", "")
        conditions = [
            ("QuotaReserved", False, "Pending", message),
            ("Requeued", reason in ("Preempted", "NodeFailures"), reason, message),  # of others, Kueue says when
        ]
        spent: Document = {}
        if (admitted := self.condition("Admitted")) is not None and admitted["status"] == "True":
            conditions.append(("Admitted", False, "NoReservation", "The workload has no reservation"))
            before = int(self._status.get("accumulatedPastExecutionTimeSeconds") or 0)
            began = podwords.seconds(admitted["lastTransitionTime"]) or now
            spent = {"accumulatedPastExecutionTimeSeconds": before + max(0, int(now - began))}
        if self.condition("PodsReady") is not None:
            conditions.append(("PodsReady", False, "WaitForStart", "Its pods have gone"))
        return self.but(now, conditions, admission=None, reclaimablePods=None, **spent)

    def reduced(self, by: int, now: float) -> Document:
        """So many of its workers are needed no more."""
        return self.but(now, (), reclaimablePods=[{"name": kueue.PODS, "count": self.given_back + by}])

    def trains(self, now: float) -> Document:
        """Its workers train: it does not run out of the time that Kueue may give it to start."""
        return self.but(now, [("PodsReady", True, "Started", "Its workers train")])

    def finished(self, well: bool, reason: str, now: float) -> Document:
        """The job has ended."""
        return self.but(now, [("Finished", True, "Succeeded" if well else "Failed", reason)])


@dataclass(frozen=True)
class Todo:
    """What is to be done about a job's Workloads."""

    apply: tuple[Document, ...] = ()
    statuses: tuple[Document, ...] = ()
    deletes: tuple[Deletion, ...] = ()


@dataclass(frozen=True)
class Queue:
    """The queue of a job, and its Workloads."""

    name: str
    """Empty for a job that waits in none any more."""
    job: Mapping[str, Any]
    sight: KueueObjects
    shares: tuple[Share, ...]
    """Oldest first."""

    @property
    def holding(self) -> list[Share]:
        return [share for share in self.shares if share.holds]

    @property
    def admitted(self) -> int:
        """How many workers there may be."""
        return sum(share.count for share in self.holding)

    def largest(self, wanted: int, sizes: Sequence[int]) -> int:
        """How many workers there are to be: an allowed number, of those that are wanted; 0 when too few were admitted."""
        if not self.name:
            return wanted
        return max((size for size in sizes if size <= min(wanted, self.admitted)), default=0)

    def refuses(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is there because of a Workload that no longer holds."""
        named = _workload(pod)
        return bool(self.name and named) and not any(share.name == named for share in self.holding)

    def reason(self) -> str:
        """Why too few workers are admitted."""
        if leaving := next((share for share in self.shares if share.leaves), None):
            return f"the queue {self.name} takes its quota back: {leaving.reason or 'no reason is given'}"
        waiting = next((share for share in self.shares if share.waits or share.checked), None)
        said = f": {waiting.reason}" if waiting and waiting.reason else ""
        return f"waits in the queue {self.name} to be admitted{said}"

    def lacking(self) -> str:
        """What is named and not there: a sentence, else empty."""
        for share in self.holding:
            for flavor in sorted(kueue.flavors(share.document) - self.sight.flavors.keys()):
                return f"the queue {self.name} has assigned the ResourceFlavor {flavor}, which is not there"
        priority = self.priority()
        return priority if isinstance(priority, str) else ""

    def place(self, pod: Document, room: dict[str, int]) -> Document | None:
        """A new pod, with a Workload that has room, which it takes; None while none has, or its nodes are unknown."""
        for share in self.holding:
            if room[share.name] > 0 and kueue.flavors(share.document) <= self.sight.flavors.keys():
                room[share.name] -= 1
                return kueue.placed(pod, share.document, self.sight.flavors)
        return None

    def todo(
        self,
        wanted: int,
        sizes: Sequence[int],
        pods: Sequence[Mapping[str, Any]],
        trains: bool,
        make: Make,
        now: float,
    ) -> Todo:
        """What Kueue is to be asked for and told.

        `wanted` workers are asked for by the user, a number of these `sizes`; `pods` are all that still use anything; `trains`:
        there is a world. `make` makes a Workload.
        """
        live = [share for share in self.shares if not share.over]
        if not self.name or not wanted:  # quota is given back when the pods of a suspended job have gone
            return Todo(deletes=tuple(_delete(share, "the job needs no quota") for share in live if not self.name or not pods))
        stands = self.largest(wanted, sizes)
        if leaving := [share for share in live if share.leaves]:
            used = {
                share.name: bool(pods) if not stands else any(_workload(pod) == share.name for pod in pods) for share in leaving
            }
            return Todo(statuses=tuple(share.cleared(now) for share in leaving if not used[share.name]))
        if not stands and self.holding:  # they are asked for again, together with the others: quota must not wait for quota
            left = () if pods else self.holding
            return Todo(deletes=tuple(_delete(share, "too few workers are admitted") for share in left))
        back = self._surplus(wanted, pods, now)
        ready = [share.trains(now) for share in self.holding if trains and back == Todo() and not share.true("PodsReady")]
        asked = self._asked(wanted, sizes, pods, make)
        return Todo(asked.apply, (*back.statuses, *ready), (*asked.deletes, *back.deletes))

    def ended(self, well: bool, reason: str, now: float) -> tuple[Document, ...]:
        """The job has: its quota is free."""
        return tuple(share.finished(well, reason, now) for share in self.shares if not share.over)

    def priority(self) -> Priority | str:
        """The priority that its Workloads have; a sentence when its class is not there."""
        return kueue.priority(self.job, self.sight.classes)

    def _asked(self, wanted: int, sizes: Sequence[int], pods: Sequence[Mapping[str, Any]], make: Make) -> Todo:
        """One Workload waits for the workers that are still to be admitted, and no other."""
        missing = wanted - self.admitted - sum(share.asked for share in self.shares if share.checked)
        waiting = [share for share in self.shares if share.waits]
        if missing <= 0:
            return Todo(deletes=tuple(_delete(share, "the job needs no more quota") for share in waiting))
        extra = tuple(_delete(share, "another Workload asks for it") for share in waiting[1:])
        stands = self.largest(wanted, sizes)
        least = next(size for size in sizes if size > stands) - self.admitted
        least, priority = max(1, min(least, missing)), self.priority()
        if isinstance(priority, str) or (waiting and _asks(waiting[0], self.name, missing, priority)):
            return Todo(deletes=extra)
        return Todo((make(waiting[0].name if waiting else self._free(pods), missing, least, priority),), (), extra)

    def _free(self, pods: Sequence[Mapping[str, Any]]) -> str:
        """A name that no Workload of the job has, nor had while a pod that is there was made."""
        meta, taken = self.job["metadata"], {share.name for share in self.shares} | {_workload(pod) for pod in pods}
        names = (kueue.name(meta["name"], meta["uid"], number) for number in range(len(taken) + 1))
        return next(name for name in names if name not in taken)

    def _surplus(self, wanted: int, pods: Sequence[Mapping[str, Any]], now: float) -> Todo:
        """What is admitted and no longer wanted is given back, the newest first, as far as no pods use it."""
        surplus, room = self.admitted - wanted, self.room(pods)
        statuses, deletes = [], []
        for share in reversed(self.holding):
            back = min(surplus, room[share.name])
            if back <= 0:
                continue
            surplus -= back
            if back == share.count:
                deletes.append(_delete(share, "the job needs it no more"))
            else:
                statuses.append(share.reduced(back, now))
        return Todo((), tuple(statuses), tuple(deletes))

    def room(self, pods: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """For how many more pods each Workload has quota. Pods that name none, of before there was a queue, take what is free."""
        room = {share.name: share.count for share in self.holding}
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
    """The queue of a job; None for one that waits in none and has no Workloads, and without Kueue."""
    if features.kueue is None:
        return None
    own = (each for each in features.kueue.workloads if owned_by(each, job))
    shares = tuple(sorted((Share(each) for each in own), key=lambda share: (_born(share), len(share.name), share.name)))
    name = kueue.queue(job)
    return Queue(name, job, features.kueue, shares) if name or shares else None


def unknown(job: Mapping[str, Any], features: ClusterFeatures) -> bool:
    """Whether it is not known yet what Kueue says of a job that waits for it."""
    return kueue.GROUP in features.groups and features.kueue is None and bool(kueue.queue(job))


def _born(share: Share) -> str:
    return str(share.document["metadata"].get("creationTimestamp") or "")


def _workload(pod: Mapping[str, Any]) -> str:
    """The Workload whose quota a pod uses; empty for one that was made without."""
    return str((pod["metadata"].get("annotations") or {}).get(kueue.WORKLOAD) or "")


def _asks(share: Share, queue: str, count: int, priority: Priority) -> bool:
    """Whether it asks for just this. Not by `minCount`: where Kueue admits nothing in part, it drops that."""
    fields = share.document["spec"]
    return (fields.get("queueName"), share.asked, fields.get("priority", 0)) == (queue, count, priority.value)


def _delete(share: Share, reason: str) -> Deletion:
    return Deletion(share.name, share.uid, reason, kind=kind_of(share.document))
