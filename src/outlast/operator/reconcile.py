"""One look at a job while the rules of `decide` go over it: what is known, what has been said, what is to be done. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from outlast import spec
from outlast.operator import desired, job_status, queues
from outlast.operator.job_status import Account
from outlast.operator.plan import Deletion, Document, Note, Plan
from outlast.operator.snapshot import Pod, Seen, Told
from outlast.rendezvous import restarts, world
from outlast.rendezvous.world import Standing
from outlast.status import End, State

UNHEARD = "Unheard"
"""Reason of the condition while most workers cannot be heard."""


class Look:
    """One look while the rules go over it: what is known, what has been said, what is to be done."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.now = seen, seen.now
        self.memory = dataclasses.replace(seen.memory, run=seen.run)
        self.over = False
        """Whether no further rule is asked."""
        self.deletes: dict[str, Deletion] = {}
        """By uid."""
        self.creates: list[Document] = []
        self.setup: tuple[Document, ...] = ()
        self.apply: tuple[Document, ...] = ()
        self.statuses: tuple[Document, ...] = ()
        self.remove: Deletion | None = None
        self.notes: list[Note] = []
        self.said = False
        self.expected = dict.fromkeys(self.memory.judged_pods)
        """Uids of pods from whose end nothing is to be learned any more."""
        self.past = [pod for pod in seen.pods if pod.over]
        """Pods whose worker will never run again."""
        self.ends = {pod.uid: end for pod in self.past if (end := pod.ended) is not None}
        """How their workers ended, by uid."""
        self._living = [pod for pod in seen.pods if pod.alive]
        self._times: list[float] = []
        self._members: tuple[world.World | None, frozenset[int]] = (None, frozenset())

    @property
    def fields(self) -> spec.Spec:
        assert self.seen.job is not None, "the rule `unreadable` comes before all that ask for fields"
        return self.seen.job.spec

    @property
    def elected(self) -> bool:
        """Whether it is not decided here who trains together, but by one of the agents that they elect in an etcd."""
        return self.fields.rendezvous.backend == "etcd"

    @property
    def wanted(self) -> int:
        """How many workers there are to be now: as many as are asked for, as far as their queue has admitted them."""
        if self.seen.queue is not None:
            return self.seen.queue.largest(self.asked, self.fields.workers.allowed())
        if queues.unknown(self.seen.document, self.seen.found) and not self.using:
            return 0
        return self.asked

    @property
    def asked(self) -> int:
        """How many workers the user wants now."""
        return 0 if self.fields.suspend else self.fields.workers.replicas

    @property
    def using(self) -> list[Mapping[str, Any]]:
        """Pods that use anything, or are about to."""
        gone = {uid for uid, deletion in self.deletes.items() if deletion.grace_s == 0}
        gone |= self.ends.keys() | {pod.uid for pod in self.past if pod.succeeded}
        there = (pod for pod in self.seen.pods if pod.uid not in gone)
        return [*(pod.document for pod in there), *self.creates]

    @property
    def alive(self) -> list[Pod]:
        """Pods that train, or will, as far as this plan does not end them."""
        return [pod for pod in self._living if pod.uid not in self.deletes]

    @property
    def members(self) -> frozenset[int]:
        """Ids of those in the newest world."""
        newest = self.memory.world
        if self._members[0] is not newest:
            self._members = newest, frozenset(newest.members if newest else ())
        return self._members[1]

    @functools.cached_property
    def unheard(self) -> list[Told]:
        """Most of the workers, if they fell silent together while their nodes are well: it is longer than any renewal takes that
        they were heard. Then the path to the API server is taken for broken, and nobody for dead. They come back one after
        another, as each of them tries again: until all have, those that are still missed are no more dead than before."""
        should = [told for pod in self._living if (told := self.seen.told.get(pod.index)) and pod.node_lost is None]
        should = [told for told in should if told.member.standing is not Standing.DONE]
        late = [told for told in should if self.until(self.heard(told), self.lease_s(told) / 2) is None]
        state = self.memory.state
        held = state is not None and job_status.why(self.memory.conditions, state) == UNHEARD
        return late if held or 2 * len(late) > len(should) else []

    @property
    def patience(self) -> world.Patience:
        return dataclasses.replace(world.Patience(), leave=self.fields.interruption.grace.total_seconds())

    @property
    def policy(self) -> restarts.Policy:
        return restarts.Policy(self.fields.restarts.limit, self.fields.restarts.window)

    @property
    def committed(self) -> int:
        """The newest committed step that anybody knows of."""
        return max([self.memory.progress.committed, *(told.committed for told in self.seen.told.values())])

    @property
    def step(self) -> int:
        """The newest step that anybody has done in the world that is there."""
        known = self.memory.world
        inside = [told for id, told in self.seen.told.items() if id in self.members]
        now = [told for told in inside if known and told.generation in (None, known.generation)]
        return max((told.step for told in now if told.step is not None), default=self.memory.progress.step)

    def until(self, at: float, wait_s: float) -> float | None:
        """When a wait that began at this time is over; None when it is. See `world.until` for clocks that jump."""
        return world.until(at, wait_s, self.now)

    def know(self, **fields: Any) -> None:
        """Remember."""
        self.memory = dataclasses.replace(self.memory, **fields)

    def say(self, state: State, reason: str, what: str, *, note: bool = False, warning: bool = False) -> None:
        """What people read: only the first counts. `what` is the condition's reason; `note` makes an Event even if the state
        stays as it was."""
        if self.said:
            return
        self.said = True
        before = self.seen.memory
        created = ("Created", "JobCreated", "the operator has taken it up")
        conditions = self.memory.conditions or job_status.conditioned((), *created, self.seen.generation, self.now)
        now_true = created if state is State.PENDING else (str(state), what, reason)
        conditions = job_status.conditioned(conditions, *now_true, self.seen.generation, self.now)
        self.know(state=state, reason=reason, conditions=conditions)
        if note or before.state is not state:
            self.notes.append(Note("Warning" if warning or state is State.FAILED else "Normal", what, reason))

    def lived_until(self, when: float) -> None:
        """Keep the wall time since the start, which is set anew."""
        lived = max(0.0, when - (self.memory.started or when))
        self.know(account=dataclasses.replace(self.memory.account, lived_s=self.memory.account.lived_s + lived))

    @functools.cached_property
    def by_index(self) -> dict[int, Pod]:
        """The job's pods by the index of their worker."""
        return {pod.index: pod for pod in reversed(self.seen.pods)}

    def pod(self, index: int) -> Pod | None:
        """The pod of a worker, as far as there is one."""
        return self.by_index.get(index)

    def delete(self, pod: Pod, reason: str, *, grace_s: int | None = None) -> None:
        """Delete a pod, unless that was asked for already: finalizers of others keep it, or what is beside its worker."""
        asked_s = pod.document["metadata"].get("deletionGracePeriodSeconds")
        if pod.leaves and (grace_s is None or (asked_s is not None and asked_s <= grace_s)):
            return
        self.deletes.setdefault(pod.uid, Deletion(pod.name, pod.uid, reason, grace_s))

    def again(self, when: float | None) -> None:
        """Look again at this time."""
        if when not in (None, math.inf):
            self._times.append(when)

    def finish(self, state: State, reason: str, code: int, end: End) -> None:
        """The job has come to its end."""
        self.trained_until_now()
        self.know(finished=self.now, closed=(reason, code))
        self.said = False  # nothing is more important
        self.say(state, reason, str(end), note=True)
        self.over = True

    def trained_until_now(self) -> None:
        """Close the account of the world that trains."""
        account = self.memory.account
        if account.since is not None:
            progress = self.memory.progress
            seconds, steps = job_status.training(account, self.step, self.now, progress.rate)
            self.know(account=Account(account.trained_s + seconds, account.executed + steps))
            self.know(progress=dataclasses.replace(progress, rate=None, mark=None))

    def plan(self) -> Plan:
        """What has come together; the status only if it differs, or if it is time to tell how far training is."""
        if self.expected.keys() != set(self.memory.judged_pods):  # those that are gone are forgotten with the next change
            there = {pod.uid for pod in self.seen.pods}
            self.know(judged_pods=tuple(uid for uid in self.expected if uid in there))
        status = self.status()
        changed = status != (self.seen.document.get("status") or {})
        self._times = [when for when in self._times if when > self.now]
        return Plan(
            setup=self.setup,
            apply=self.apply,
            status=status if changed else None,
            deletes=tuple(self.deletes.values()),
            statuses=self.statuses,
            creates=tuple(self.creates),
            remove=self.remove,
            notes=tuple(self.notes) if changed else (),
            look_again=min(self._times, default=None),
        )

    def _pods(self) -> int:
        """How many workers there are, with those that this plan makes, unless such were refused: then they are counted when they
        are there."""
        return len(self.alive) + (0 if self.seen.refused else len(self.creates))

    def status(self) -> Document:
        if self.seen.job is None:
            sizes, grace, where = (0, 0), 0.0, ""
        else:
            workers = self.fields.workers
            sizes, grace = (workers.min, workers.max), self.patience.leave
            where = desired.checkpoints(self.seen.job)
        members = self.memory.world.members if self.memory.world and self.memory.called is None else ()
        there = {pod.index for pod in self.alive}
        inside = [id for id in members if id in there]
        return job_status.write(
            self.memory,
            job=self.seen.name,
            # Workers of a job that is over end one after another: that is no news, and would be a write for each.
            pods=self._pods() if self.memory.finished is None else 0,
            inside=len(inside) if self.memory.closed is None else 0,
            sizes=sizes,
            checkpoint=where,
            now=self.now,
            leave_s=grace,
        )

    def inside(self, pod: Pod) -> bool:
        """Whether a pod is, or was, in the newest world; one that was made after it only has an index that is."""
        known = self.memory.world
        return known is not None and pod.index in self.members and pod.made_for <= known.generation

    def generation_of(self, pod: Pod) -> int:
        """Of the world that a pod is in; 0 for none."""
        return self.memory.world.generation if self.memory.world and self.inside(pod) else 0

    def silent_at(self, told: Told) -> float | None:
        """When a member is dead if nothing more is heard of it; None when it is."""
        pod, lasts = self.pod(told.member.id), self.lease_s(told)
        held = self.unheard and pod is not None and pod.node_lost is None
        return self.until(self.heard(told), max(lasts, self.seen.limits.held_s) if held else lasts)

    def lease_s(self, told: Told) -> float:
        """For how long a member may say nothing: it says so itself, as members of large worlds renew their Leases less often."""
        return max(self.seen.limits.silence_s, told.lasts)

    def missed(self) -> bool:
        """Whether most workers are missed, and one of them for so long that it would be taken for dead if it were alone."""
        return any(self.until(self.heard(each), self.lease_s(each)) is None for each in self.unheard)

    def heard(self, told: Told | None) -> float:
        """When a member was last heard, or could have been. A time in the future, after our clock went back, does not count."""
        late = told is None or told.beat > self.now + self.lease_s(told)
        return self.seen.since if late or told is None else max(told.beat, self.seen.since)
