"""One reconcile pass: the snapshot, and the status and plan that the rules of `decide` have built so far. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from outlast.base.clock import until
from outlast.job import spec
from outlast.job.contract import End
from outlast.job.status import State
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.operator import desired, elasticjob_status, kueue_workloads
from outlast.kubernetes.operator.observed_job import JobSnapshot, MemberReport, Pod
from outlast.kubernetes.operator.plan import Deletion, Document, Event, Plan
from outlast.rendezvous import restart_budget, who_trains
from outlast.rendezvous.who_trains import MemberState

UNREACHABLE = "Unheard"
"""Condition reason while most workers are silent."""


class ReconcilePass:
    def __init__(self, snapshot: JobSnapshot) -> None:
        self.snapshot, self.now = snapshot, snapshot.now
        self.status = dataclasses.replace(snapshot.status, run=snapshot.run)
        self.skip_rest = False
        self.deletes: dict[str, Deletion] = {}
        self.creates: list[Document] = []
        self.prerequisites: tuple[Document, ...] = ()
        self.apply: tuple[Document, ...] = ()
        self.statuses: tuple[Document, ...] = ()
        self.remove: Deletion | None = None
        self.events: list[Event] = []
        self.state_set = False
        self.handled_uids = dict.fromkeys(self.status.handled_pods)
        """Uids of pods whose end must not be counted, because it is already counted or was expected."""
        self.ended_pods = [pod for pod in snapshot.pods if pod.ended]
        self.pod_ends = {pod.uid: end for pod in self.ended_pods if (end := pod.end) is not None}
        """How the workers of `ended_pods` ended, keyed by pod uid."""
        self._alive_pods = [pod for pod in snapshot.pods if pod.alive]
        self._requeue_times: list[float] = []
        self._members: tuple[who_trains.World | None, frozenset[int]] = (None, frozenset())

    @property
    def spec(self) -> spec.Spec:
        assert self.snapshot.job is not None, "the rule `unreadable` comes before all rules that read the specification"
        return self.snapshot.job.spec

    @property
    def desired(self) -> int:
        """The number of workers to run now: the requested number, or fewer if the queue has not admitted all."""
        if self.snapshot.queue is not None:
            return self.snapshot.queue.largest_admitted(self.requested, self.spec.workers.allowed())
        if kueue_workloads.unsynced(self.snapshot.document, self.snapshot.features) and not self.resource_pods:
            return 0
        return self.requested

    @property
    def requested(self) -> int:
        """The number of workers that the specification requests; 0 while the job is suspended."""
        return 0 if self.spec.suspend else self.spec.workers.replicas

    @property
    def resource_pods(self) -> list[Mapping[str, Any]]:
        """Pods that use resources or are about to, including those that this plan creates."""
        ended = {uid for uid, deletion in self.deletes.items() if deletion.grace_s == 0}
        ended |= self.pod_ends.keys() | {pod.uid for pod in self.succeeded}
        remaining = (pod for pod in self.snapshot.pods if pod.uid not in ended)
        return [*(pod.document for pod in remaining), *self.creates]

    @property
    def alive(self) -> list[Pod]:
        """Pods that train or will train, except those that this plan deletes."""
        return [pod for pod in self._alive_pods if pod.uid not in self.deletes]

    @property
    def members(self) -> frozenset[int]:
        newest = self.status.world
        if self._members[0] is not newest:
            self._members = newest, frozenset(newest.members if newest else ())
        return self._members[1]

    @functools.cached_property
    def succeeded(self) -> list[Pod]:
        return [pod for pod in self.ended_pods if pod.succeeded]

    @functools.cached_property
    def late_members(self) -> list[MemberReport]:
        """The late members, if most are late although their nodes are ready; otherwise empty. A member is late once it has not
        renewed its Lease for half of `lease_s`. The path to the API server is then presumed broken until all have returned, and
        no member is presumed dead before `mass_silence_s`."""
        expected = [
            report for pod in self._alive_pods if (report := self.snapshot.reports.get(pod.index)) and pod.node_lost_at is None
        ]
        expected = [report for report in expected if report.member.standing is not MemberState.DONE]
        late = [report for report in expected if self.end_of_wait(self.last_seen(report), self.lease_s(report) / 2) is None]
        state = self.status.state
        held = state is not None and elasticjob_status.condition_reason(self.status.conditions, state) == UNREACHABLE
        return late if held or 2 * len(late) > len(expected) else []

    @property
    def policy(self) -> restart_budget.Policy:
        return restart_budget.Policy(self.spec.restarts.limit, self.spec.restarts.window)

    @property
    def committed(self) -> int:
        return max([self.status.progress.committed, *(each.progress.committed for each in self.snapshot.reports.values())])

    @property
    def step(self) -> int:
        """The newest step completed in the current world."""
        world = self.status.world
        inside = [report.progress for id, report in self.snapshot.reports.items() if id in self.members]
        now = [each.step for each in inside if world and each.generation in (None, world.generation) and each.step is not None]
        return max(now, default=self.status.progress.step)

    def end_of_wait(self, at: float, wait_s: float) -> float | None:
        """Return when a wait that began at `at` ends, or None once it is over; see `base.clock.until` on clock jumps."""
        return until(at, wait_s, self.now)

    def update(self, **fields: Any) -> None:
        self.status = dataclasses.replace(self.status, **fields)

    def set_state(self, state: State, reason: str, condition_reason: str, *, event: bool = False, warning: bool = False) -> None:
        """Set the state, its reason and the condition. Only the first call in a pass counts. With `event`, an Event is written
        even if the state stays the same."""
        if self.state_set:
            return
        self.state_set = True
        previous = self.snapshot.status
        created = ("Created", "JobCreated", "the operator has taken it up")
        conditions = self.status.conditions or elasticjob_status.with_condition((), *created, self.snapshot.generation, self.now)
        now_true = created if state is State.PENDING else (str(state), condition_reason, reason)
        conditions = elasticjob_status.with_condition(conditions, *now_true, self.snapshot.generation, self.now)
        self.update(state=state, reason=reason, conditions=conditions)
        if event or previous.state is not state:
            self.events.append(Event("Warning" if warning or state is State.FAILED else "Normal", condition_reason, reason))

    def record(self, kind: str, t: float | None = None, **fields: Any) -> None:
        """Add an event to the ledger. Before the first world, also record when the first pod was created and when the first
        worker started."""
        if self.snapshot.plain is not None:
            return  # no agent copies the event into a ledger
        ledger, now = self.status.ledger, self.now
        started_at = next((each["t"] for each in reversed(ledger) if each.get("kind") in ("submitted", "resumed")), None)
        if started_at is not None and not self.status.has_formed_world and kind != "resumed":
            if pods := self.snapshot.pods:
                ledger = elasticjob_status.with_event(ledger, max(started_at, min(pod.created for pod in pods)), "asked")
            if running := [since for pod in pods if (since := pod_status.started_at(pod.document))]:
                ledger = elasticjob_status.with_event(ledger, max(started_at, min(running)), "worker")
        self.update(ledger=elasticjob_status.with_event(ledger, now if t is None else t, kind, **fields))

    @functools.cached_property
    def pods_by_index(self) -> dict[int, Pod]:
        return {pod.index: pod for pod in reversed(self.snapshot.pods)}

    def pod(self, index: int) -> Pod | None:
        return self.pods_by_index.get(index)

    def delete(self, pod: Pod, reason: str, *, grace_s: int | None = None) -> None:
        """Plan to delete a pod, unless it is already being deleted with this grace period or a shorter one."""
        requested_s = pod.document["metadata"].get("deletionGracePeriodSeconds")
        if pod.terminating and (grace_s is None or (requested_s is not None and requested_s <= grace_s)):
            return
        self.deletes.setdefault(pod.uid, Deletion(pod.name, pod.uid, reason, grace_s))

    def requeue_at(self, when: float | None) -> None:
        """Reconcile the job again at this time; None and infinity are ignored."""
        if when not in (None, math.inf):
            self._requeue_times.append(when)

    def finish(self, state: State, reason: str, code: int, end: End) -> None:
        self.stop_training()
        self.update(finished=self.now, result=elasticjob_status.Result(reason, code))
        self.record("finished", state=str(state), reason=reason, step=self.step, code=code)
        self.state_set = False  # the end of the job takes precedence
        self.set_state(state, reason, str(end), event=True)
        self.skip_rest = True

    def stop_training(self) -> None:
        """Clear the rate, snapshot and goodput of the current world, which no longer trains."""
        self.update(progress=dataclasses.replace(self.status.progress, rate=None, mark=None, snapshot=(0, 0), goodput=None))

    def plan(self) -> Plan:
        """Return the plan, which has a status and Events only if the status changes."""
        if self.handled_uids.keys() != set(self.status.handled_pods):  # uids of pods that are gone are dropped
            existing = {pod.uid for pod in self.snapshot.pods}
            self.update(handled_pods=tuple(uid for uid in self.handled_uids if uid in existing))
        status = self._status_document()
        changed = status != (self.snapshot.document.get("status") or {})
        self._requeue_times = [when for when in self._requeue_times if when > self.now]
        return Plan(
            prerequisites=self.prerequisites,
            apply=self.apply,
            status=status if changed else None,
            deletes=tuple(self.deletes.values()),
            statuses=self.statuses,
            creates=tuple(self.creates),
            remove=self.remove,
            events=tuple(self.events) if changed else (),
            requeue_at=min(self._requeue_times, default=None),
        )

    def _status_document(self) -> Document:
        if self.snapshot.job is None:
            size_range, grace_s, checkpoint_url = (0, 0), 0.0, ""
        else:
            workers = self.spec.workers
            size_range, grace_s = (workers.min, workers.max), self.spec.interruption.grace.total_seconds()
            checkpoint_url = desired.checkpoints_url(self.snapshot.job)
        members = self.status.world.members if self.status.world and self.status.called is None else ()
        alive = {pod.index for pod in self.alive}
        inside = [id for id in members if id in alive]
        created = 0 if self.snapshot.refusal else len(self.creates)  # the API server rejected pods on the last attempt
        return elasticjob_status.write(
            self.status,
            job=self.snapshot.name,
            # 0 once the job has ended: its workers end one after another, and each would cause a write.
            pods=len(self.alive) + created if self.status.finished is None else 0,
            world_size=len(inside) if self.status.result is None else 0,
            size_range=size_range,
            checkpoints=checkpoint_url,
            grace_s=grace_s,
        )

    def is_member(self, pod: Pod) -> bool:
        """Return whether a pod is or was a member of the newest world; a later pod with the same index is not."""
        world = self.status.world
        return world is not None and pod.index in self.members and pod.first_generation <= world.generation

    def generation_of(self, pod: Pod) -> int:
        """Return the newest world's generation if the pod is a member, otherwise 0."""
        return self.status.world.generation if self.status.world and self.is_member(pod) else 0

    def newest_start(self, generation: int) -> tuple[int, int]:
        """Return a pair of a generation and the newest attempt in it that its members have reported."""
        return generation, self._attempts.get(generation, 0)

    @functools.cached_property
    def _attempts(self) -> dict[int, int]:
        attempts: dict[int, int] = {}
        for each in self.snapshot.reports.values():
            attempts[each.member.generation] = max(each.report.attempt, attempts.get(each.member.generation, 0))
        return attempts

    def is_counted(self, generation: int) -> bool:
        """Return whether the failure of a generation's newest start is already counted. Generation 0 means no world."""
        return generation > 0 and self.status.counted >= self.newest_start(generation)

    def presumed_dead_at(self, report: MemberReport) -> float | None:
        """Return when a member will be presumed dead unless it renews its Lease, or None if it already is."""
        pod, lease_s = self.pod(report.member.id), self.lease_s(report)
        held = self.late_members and pod is not None and pod.node_lost_at is None
        return self.end_of_wait(self.last_seen(report), max(lease_s, self.snapshot.limits.mass_silence_s) if held else lease_s)

    def lease_s(self, report: MemberReport) -> float:
        """Return how many seconds a member may be silent. That is at least the duration of its Lease."""
        return max(self.snapshot.limits.silence_s, report.lease_s)

    def is_mass_silence(self) -> bool:
        """Return whether most workers are silent, and at least one for so long that it alone would be presumed dead."""
        return any(self.end_of_wait(self.last_seen(each), self.lease_s(each)) is None for each in self.late_members)

    def last_seen(self, report: MemberReport | None) -> float:
        """Return when a member last renewed its Lease, or when our watches were connected if that is later. Renewals in the
        future are ignored."""
        late = report is None or report.renewed > self.now + self.lease_s(report)
        return self.snapshot.observed_since if late or report is None else max(report.renewed, self.snapshot.observed_since)
