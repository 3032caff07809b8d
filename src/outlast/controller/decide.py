"""What is to be done about a job: an ordered table of rules, as a pure function of one look.

    plan = decide(seen)

Each rule is named after a situation and says its sentence: it is the status, the Event and the log line. The first that says
something is what people read; all may add to what is done. Who trains together is not decided here but by
`rendezvous.world.decide`, whether a failure may be tried again by `restarts.judge`, as on one machine.

What stays true: never more pods than are wanted that are not on their way out, never two of one index, no failure judged twice,
nothing deleted before the status tells why. A job that is settled gives a plan with nothing in it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outlast import contract, kinds, restarts, spec, wire
from outlast.controller import made, memory, queues
from outlast.controller.memory import Account, Blame, Silent
from outlast.controller.observe import Limits, Pod, Seen, Told
from outlast.controller.plan import Deletion, Document, Note, Plan
from outlast.errors import InvalidJob
from outlast.manifests import gang
from outlast.manifests.kueue import Priority
from outlast.rendezvous import keys, world
from outlast.rendezvous.world import Call, Standing
from outlast.status import Failure, State

SETTLE_S = 1.0
"""Failures of one generation are collected this long, so that the first of them is judged and not its echoes."""
CAUSE_S = 1.5
"""How long the echoes of a failure wait for its cause: kubelets tell within about a second how a container ended."""
TOLD_BYTES_PER_S = 5e6
"""The most that the API server sends to the agents of one job to tell how far training is: each gets the whole status."""
BYTES_PER_WORKER = 15
"""How much longer a status is by each."""
ARRIVE_S = 2.0
"""Workers come one after another: who is still waited for is written when nobody has come for so long."""
MEASURE_S = 5.0
"""A rate is that of at least so long."""
BREATH_S = 10.0
"""A pause after a pod that was lost as soon as it was made: its node would refuse the next one as well."""
LEAVE_S = 60.0
"""How long workers may take to push the rest and end, once the job has."""
AVOID = 2
"""On a node with so many counted failures within the window pods of this job are put only if there is no other."""
_LONGEST_PAUSE_S = 60.0
_FINAL = (State.SUCCEEDED, State.FAILED)
_HELD = (State.SUSPENDED, State.QUEUED)
AGAIN_S = 10.0
"""How often it is looked whether there is by now what Kueue or a job names: nobody tells when it comes."""
UNHEARD = "Unheard"
"""Reason of the condition while most workers cannot be heard."""
_SECONDS_LEFT = re.compile(r" \(\d+ s left\)")


def decide(seen: Seen) -> Plan:
    """The plan for one look."""
    if seen.document["spec"].get("managedBy", contract.MANAGED_BY) != contract.MANAGED_BY:
        return Plan()  # somebody else makes its pods, and writes its status
    if seen.document["metadata"].get("deletionTimestamp"):
        return orphans(seen.pods, seen.now, seen.since, seen.limits)
    look = Look(seen)
    for rule in RULES:
        rule(look)
        if look.over:
            break
    return look.plan()


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
        they were heard. Then the path to the API server is taken for broken, and nobody for dead."""
        should = [told for pod in self._living if (told := self.seen.told.get(pod.index)) and pod.node_lost is None]
        should = [told for told in should if told.member.standing is not Standing.DONE]
        late = [told for told in should if self.until(_heard(self, told), _lasts(self, told) / 2) is None]
        return late if 2 * len(late) > len(should) else []

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
        reason = _SECONDS_LEFT.sub("", reason)
        created = ("Created", "JobCreated", "the operator has taken it up")
        conditions = self.memory.conditions or memory.conditioned((), *created, self.seen.generation, self.now)
        now_true = created if state is State.PENDING else (str(state), what, reason)
        conditions = memory.conditioned(conditions, *now_true, self.seen.generation, self.now)
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
        if when is not None:
            self._times.append(when)

    def finish(self, state: State, reason: str, code: int, what: str) -> None:
        """The job has come to its end."""
        self.trained_until_now()
        self.know(finished=self.now, closed=(reason, code))
        self.said = False  # nothing is more important
        self.say(state, reason, what, note=True)
        self.over = True

    def trained_until_now(self) -> None:
        """Close the account of the world that trains."""
        account = self.memory.account
        if account.since is not None:
            progress = self.memory.progress
            seconds, steps = memory.training(account, self.step, self.now, progress.rate)
            self.know(account=Account(account.trained_s + seconds, account.executed + steps))
            self.know(progress=dataclasses.replace(progress, rate=None, mark=None))

    def plan(self) -> Plan:
        """What has come together; the status only if it differs, or if it is time to tell how far training is."""
        if self.expected.keys() != set(self.memory.judged_pods):  # those that are gone are forgotten with the next change
            there = {pod.uid for pod in self.seen.pods}
            self.know(judged_pods=tuple(uid for uid in self.expected if uid in there))
        if self.seen.job is not None:
            _tell_progress(self)
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
            where = made.checkpoints(self.seen.job)
        members = self.memory.world.members if self.memory.world and self.memory.called is None else ()
        there = {pod.index for pod in self.alive}
        inside = [id for id in members if id in there]
        return memory.write(
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


# ------------------------------------------------------------------------------------------------------------------- the end


def finished(look: Look) -> None:
    """The job is over: its pods go as `cleanPodPolicy` says, and after its time the job itself."""
    known = look.memory
    if known.state not in _FINAL or known.finished is None:
        return
    look.over = True
    look.know(observed=look.seen.generation)
    if look.seen.queue is not None:
        if look.using and look.now < known.finished + LEAVE_S:
            look.again(known.finished + LEAVE_S)
        else:
            look.statuses = look.seen.queue.ended(known.state is State.SUCCEEDED, known.reason, look.now)
    policy = look.fields.clean_pod_policy if look.seen.job else "Running"
    for pod in look.seen.pods:
        if pod.leaves:
            _force(look, pod)
        elif policy == "All" and pod.uid in look.ends:
            look.delete(pod, "the job is over, cleanPodPolicy is All")
        elif policy != "None" and (pod.alive or pod.lingers):
            # Its agent has been told, and pushes what is left; the last line of its log is worth a moment.
            if look.now >= known.finished + LEAVE_S:
                look.delete(pod, f"the job is over, cleanPodPolicy is {policy}")
            look.again(known.finished + LEAVE_S)
    ttl = look.fields.ttl_seconds_after_finished if look.seen.job else None
    if ttl is not None:
        if look.now >= known.finished + ttl:
            look.remove = Deletion(
                look.seen.name, look.seen.uid, f"ttlSecondsAfterFinished ({ttl}) has passed", kind=kinds.ELASTIC_JOB
            )
        look.again(known.finished + ttl)


def unreadable(look: Look) -> None:
    """The API server has let something through that makes no sense; it may be mended while nothing runs. What cannot even be read
    has failed, unless it was different when its pods were made."""
    if look.seen.job is not None:
        return
    if wire.UNREADABLE in look.seen.document and look.memory.started is None and not look.seen.pods:
        look.know(observed=look.seen.generation)
        reason = f"the job cannot be read: {look.seen.problem}"
        return look.finish(State.FAILED, reason, contract.Exit.MISCONFIGURED, "InvalidJob")
    look.over = True
    look.say(State.PENDING, f"the job cannot be understood: {look.seen.problem}", "InvalidJob", warning=True)
    look.know(observed=look.seen.generation)


def changed_or_new(look: Look) -> None:
    """What its pods need beside them is made, and follows the specification; or no pod can be made of it."""
    known, generation = look.memory, look.seen.generation
    if known.observed == generation and known.started is not None:
        return
    look.know(observed=generation)
    try:
        if known.started is None:
            if look.seen.refused and look.seen.refused != known.reason:  # it is tried again when that is said
                look.over = True
                return look.say(State.PENDING, look.seen.refused, "FailedCreate", warning=True)
            if no_gang := gang.missing(look.seen.gang, look.seen.found.groups):
                look.over = True
                return look.say(State.PENDING, f"no pods can be made: {no_gang}", "NoGang", warning=True)
            look.setup = made.setup(look.seen)
            look.know(started=look.now, formed=False, gang="" if look.seen.gang == "none" else look.seen.gang)
        else:
            look.apply = made.changed(look.seen)
    except InvalidJob as error:
        look.over = True
        look.say(State.PENDING, f"no pods can be made: {error}", "InvalidJob", warning=True)


def queued(look: Look) -> None:
    """Its queue has not admitted as many workers as are needed, or takes them back."""
    queue, kept = look.seen.queue, look.memory
    if queue is None:
        if look.asked and not look.wanted:
            look.say(State.QUEUED, "it is not known yet what Kueue says", "Queued")
        return look.know(queue="")
    sizes, trains = look.fields.workers.allowed(), kept.world is not None and kept.called is None and kept.closed is None

    def make(name: str, count: int, least: int, priority: Priority) -> Document:
        return made.workload(look.seen, queue.sight.kind, name, count, least, priority)

    todo = queue.todo(look.asked, sizes, look.using, trains, make, look.now)
    look.apply, look.statuses = (*look.apply, *todo.apply), todo.statuses
    for deletion in todo.deletes:
        look.deletes[deletion.uid] = deletion
    look.know(queue=queue.name)
    if lacking := queue.lacking():
        look.again(look.now + AGAIN_S)
        if not trains and look.asked:
            look.say(State.QUEUED, lacking, "Queued", warning=True)
    if look.asked and not look.wanted:  # all save and leave together, as when it is suspended
        return look.say(State.QUEUED, queue.reason(), "Evicted" if look.alive else "Queued", warning=bool(look.alive))
    for pod in look.alive:
        if queue.refuses(pod.document):
            sentence = f"worker {pod.index} leaves: the queue {queue.name} takes its quota back"
            _interrupted(look, pod, "WorkerPreempted", sentence)
            look.delete(pod, sentence)


def too_late(look: Look) -> None:
    """A deadline has passed."""
    started = look.memory.started
    if started is None or not look.wanted:
        return
    whole, first = look.fields.active_deadline_seconds, look.fields.startup_deadline_seconds
    if whole is not None:
        if look.now >= started + whole:
            return look.finish(
                State.FAILED, f"the job has run for activeDeadlineSeconds ({whole:g})", contract.Exit.GIVEN_UP, "DeadlineExceeded"
            )
        look.again(started + whole)
    if first is not None and not look.memory.formed:
        if look.now >= started + first:
            pending = next((f": worker {pod.index} {pod.waits}" for pod in look.alive if pod.waits), "")
            sentence = f"no world was formed within startupDeadlineSeconds ({first:g}){pending}"
            return look.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, "StartupDeadlineExceeded")
        look.again(started + first)


# ------------------------------------------------------------------------------------------------- what others have decided


def world_learned(look: Look) -> None:
    """Agents decide who trains together, by an etcd: what they have heard of it is taken up, with what it has cost."""
    pods = {pod.index: pod for pod in look.seen.pods}
    told = [told for id, told in look.seen.told.items() if id in pods]
    heard = [
        each.decided for each in told if each.decided and (each.decided[1].closed or pods[each.member.id].uid not in look.ends)
    ]
    if not look.elected or not heard or look.memory.closed is not None:
        return
    _, said = max(heard, key=lambda each: (each[1].generation, each[0]))
    if said.born != look.memory.born:  # they have begun anew, and count from the beginning
        look.know(born=said.born, judged=0, elected=0, world=None, called=None)
    _failures_learned(look, said)
    new, before = said.world, look.memory.world
    busy = [each.member.generation for each in told if each.member.standing is not Standing.WAITING or each.member.failed]
    if new and new.generation > (before.generation if before else 0) and new.generation <= max(busy, default=0):
        _formed(look, dataclasses.replace(new, at=look.now))
    call, known, at = said.called, look.memory, look.now
    if (
        call
        and known.world
        and call.generation > known.world.generation
        and (known.called is None or dataclasses.replace(call, at=known.called.at) != known.called)
    ):
        _called(look, dataclasses.replace(call, at=at))
    if said.closed is None:
        return
    if said.closed.code == contract.Exit.DONE:
        return look.finish(State.SUCCEEDED, said.closed.reason, contract.Exit.DONE, "JobSucceeded")
    look.finish(State.FAILED, said.closed.reason, said.closed.code, _why_failed(said.closed.reason, said.closed.code))


def _failures_learned(look: Look, said: keys.Said) -> None:
    """Processes that have failed are judged by who decides; the ends of pods, by nobody but us."""
    known = look.memory
    more = max(0, said.restarts - known.elected)
    look.know(elected=said.restarts)
    failure = Failure.model_validate(said.failure) if said.failure else None
    if failure and failure.generation <= known.judged:
        more -= bool(more)  # that world's end is counted, by the end of a pod
    look.know(restarts=known.restarts + more)
    if failure is None or failure.generation <= known.judged:
        return
    pod = look.pod(failure.worker)
    look.know(judged=failure.generation, failure=_kept(look, failure, pod.node if pod else ""))
    look.say(State.RESTARTING, failure.reason, "WorkerFailed", note=True, warning=True)


# --------------------------------------------------------------------------------------------------------------- pods that end


def workers_done(look: Look) -> None:
    """All that are wanted have ended with success although nobody has said that it is over: an earlier run was complete."""
    done = {pod.index for pod in look.past if pod.succeeded}
    if look.wanted and done and len(done) >= look.wanted and not look.alive:
        look.finish(State.SUCCEEDED, "all workers are done", contract.Exit.DONE, "JobSucceeded")


def ended_workers(look: Look) -> None:
    """Pods that have failed go, and are made anew; what is to be learned from them is learned once."""
    silent = look.memory.silent_uids
    for pod in look.past:
        end = look.ends.get(pod.uid)
        if end is None or pod.succeeded:
            continue
        counted = end.counted and not (pod.leaves and contract.killed(end.code))  # killed, because somebody has deleted it
        if pod.uid not in look.expected and pod.uid not in silent:
            if end.code == contract.Exit.GIVEN_UP:  # who counts processes has counted enough of them
                look.know(failure=_kept(look, _pods_failure(look, pod, end.code, end.sentence, end.time), pod.node))
                reason = f"worker {pod.index} says that the run is given up"
                return look.finish(State.FAILED, reason, contract.Exit.GIVEN_UP, "BackoffLimitExceeded")
            if counted:
                failure, generation = _pods_failure(look, pod, end.code, end.sentence, end.time), _generation(look, pod)
                if generation and look.memory.judged >= generation:
                    look.know(failure=_kept(look, failure, pod.node))
                else:
                    _judge(look, failure, raised=None, node=pod.node)
                    if look.over:
                        return
                    _stands_for_all(look, generation)
                look.expected[pod.uid] = None
            else:
                if look.wanted:
                    look.know(interruptions=look.memory.interruptions + 1)
                    sentence = f"worker {pod.index} {end.sentence}; it is made anew"
                    look.notes.append(Note("Normal", "WorkerInterrupted", sentence))
                _went(look, pod)
        if not counted and look.wanted and (rest := look.until(_breath(pod, end.time), BREATH_S)) is not None:
            look.again(rest)  # its name is taken until then, so that the next one waits
            continue
        look.delete(pod, f"it has ended: {end.sentence}", grace_s=None if pod.lingers else 0)


def _breath(pod: Pod, ended: float) -> float:
    """From when on there is a pause for a pod that has ended; none for one that lived for a while."""
    return ended if ended - pod.born < BREATH_S else float("-inf")


def lost_workers(look: Look) -> None:
    """Pods on nodes that do not answer, or are gone: they are deleted whatever their node says."""
    explained = set()
    silent = look.memory.silent_uids
    for pod in look.seen.pods:
        if pod.node_lost is None or pod.uid in look.ends or pod.uid in look.deletes:
            continue
        gone = pod.node not in look.seen.nodes
        told = look.seen.told.get(pod.index)
        quiet = _heard(look, told) if told and not gone else max(pod.node_lost, pod.born, look.seen.since)
        if (end := look.until(quiet, look.seen.limits.lost_s)) is not None:
            look.again(end)
            continue
        how = "is gone" if gone else f"has not answered for {look.seen.limits.lost_s:g} s"
        sentence = f"worker {pod.index} was lost: its node {pod.node} {how}"
        if pod.uid in silent or (not pod.leaves and pod.uid not in look.expected):
            look.know(interruptions=look.memory.interruptions + 1)
            explained.add(pod.uid)
            look.notes.append(Note("Warning", "NodeLost", sentence))
            _went(look, pod)
        look.delete(pod, sentence, grace_s=0)
    if explained & silent:
        look.know(silent=tuple(each for each in look.memory.silent if each.uid not in explained))


def silent_workers(look: Look) -> None:
    """A worker that says nothing any more is told to go, and what becomes of it tells why: a node that is well ends it, so it was
    stopped or hung, which counts; one that does not answer has lost it, see `lost_workers`. Those that fell silent in one world
    did so for one cause."""
    there = {pod.uid for pod in look.seen.pods}
    gone = [each for each in look.memory.silent if each.uid not in there]
    if gone:
        look.know(silent=tuple(each for each in look.memory.silent if each.uid in there))
    counted = set()
    for each in gone:
        if each.echo or each.generation in counted:
            continue
        counted.add(each.generation)
        reason = f"worker {each.worker} has said nothing for {look.seen.limits.silence_s:g} s"
        failure = Failure(worker=each.worker, code=137, reason=reason, generation=each.generation, time=each.since)
        _judge(look, failure, raised=None, node=each.node)
        if look.over:
            return
        _stands_for_all(look, each.generation)
    new = []
    for pod in look.alive:
        told = look.seen.told.get(pod.index)
        if told is None or told.member.standing is Standing.DONE:
            continue
        if (end := _silent_at(look, told)) is not None:
            look.again(min(end, look.now + AGAIN_S) if look.unheard else end)  # to hear them again is no change
            continue
        generation = _generation(look, pod)
        if pod.uid not in look.expected and not (generation and look.memory.judged >= generation):
            new.append(Silent(pod.uid, pod.index, pod.node, look.now, generation))
        look.delete(pod, f"worker {pod.index} has said nothing for {_lasts(look, told):g} s", grace_s=5)
    if new:
        look.know(silent=(*look.memory.silent, *new))


def unheard_workers(look: Look) -> None:
    """Nobody hears most of the workers, whose nodes are well: they train on, and their kubelets end whoever does not answer."""
    if _missed(look) and look.memory.state is not None:
        silence_s, held_s = look.seen.limits.silence_s, look.seen.limits.held_s
        reason = (
            f"most of the {len(look.seen.told)} workers have said nothing for {silence_s:g} s though their nodes are well: the "
            f"path from them to the API server is taken for broken, and nobody for dead before {held_s:g} s are over"
        )
        look.say(look.memory.state, reason, UNHEARD, note=True, warning=True)


def leaving_nodes(look: Look) -> None:
    """A node has been told that it will be gone: its workers save and leave while there is time."""
    for pod in look.alive:
        if pod.node_leaves:
            if (rest := look.until(pod.born, BREATH_S)) is not None:
                look.again(rest)  # it was put there all the same; the next one would be, too
                continue
            sentence = f"worker {pod.index} leaves: its node {pod.node} is going away ({pod.node_leaves})"
            _interrupted(look, pod, "NodeLeaving", sentence)
            look.delete(pod, sentence)


# ------------------------------------------------------------------------------------------------------------------ the world


def world_decided(look: Look) -> None:
    """Who trains together, and what agents are told of it."""
    if look.elected:
        return _world_wanted(look)
    state = _state(look)
    wanted = world.Wanted(look.wanted, look.fields.workers.allowed(), frozenset(_expected(look)))
    pending = _failures(look)
    echoes = [failure for echo, failure in pending if echo]
    if pending and len(echoes) == len(pending) and not _explained(look) and look.now < echoes[0].time + CAUSE_S:
        look.again(echoes[0].time + CAUSE_S)
        return  # whoever died is still ending; a call now would stop it before it could say why
    for _ in range(4):
        decision = world.decide(state, wanted, look.patience, look.now)
        if isinstance(decision, world.World) and pending:
            _judge_processes(look, pending, decision)
            if look.over:
                return
            pending = []
        state = state.after(decision)
        match decision:
            case world.Call():
                _called(look, decision)
            case world.World():
                _formed(look, decision)
            case world.Closed(reason, True):
                return look.finish(State.SUCCEEDED, reason, contract.Exit.DONE, "JobSucceeded")
            case world.Closed(reason):
                return _suspended(look, reason)
            case world.Wait(reason, again):
                _waits(look, state, reason)
                look.again(again)
                break
    if pending:
        first = min(failure.time for _, failure in pending)
        if look.now >= first + SETTLE_S and not (len(echoes) == len(pending) and _unanswered(look)):
            _judge_processes(look, pending)
        look.again(first + SETTLE_S)


def _world_wanted(look: Look) -> None:
    """Agents decide, and are told what is wanted."""
    before, known = look.memory.wanted, look.memory
    sizes, expected = look.fields.workers.allowed(), tuple(sorted(_expected(look)))
    wanted = keys.Wanted(before.number if before else 0, look.wanted, sizes, expected)
    if wanted != before:
        look.know(wanted=dataclasses.replace(wanted, number=wanted.number + 1))
    if not look.wanted:
        return _suspended(look, "suspended: no workers are wanted")
    reasons = [told.decided[1].why for told in look.seen.told.values() if told.decided]
    _waits(look, world.State({}, known.world, known.called), next(filter(None, reasons), "waiting for workers"))


def _state(look: Look) -> world.State:
    """What `world.decide` goes by."""
    known = look.memory
    members = {}
    for id, told in look.seen.told.items():
        done = told.member.standing is Standing.DONE and known.world and told.member.generation >= known.world.generation
        pod = look.pod(id)
        cut = pod is not None and pod.uid in look.deletes and look.deletes[pod.uid].grace_s == 0
        gone = pod is None or pod.uid in look.ends or cut or _silent_at(look, told) is None
        if done or not gone:
            members[id] = told.member
    called = known.called
    if called is not None:  # a watch that broke, or a clock that was set, takes nothing from the time to save
        called = dataclasses.replace(called, at=min(max(called.at, look.seen.since), look.now))
    return world.State(members, known.world, called)


def _called(look: Look, call: Call) -> None:
    look.trained_until_now()
    look.know(called=call)
    state = State.RESIZING if call.planned else State.RESTARTING
    look.say(state, call.reason, "Resizing" if call.planned else _why(call.reason), note=True, warning=not call.planned)


def _formed(look: Look, new: world.World) -> None:
    look.know(world=new, called=None, closed=None, formed=True)
    for pod in look.alive:
        if pod.index in look.members:
            look.expected.pop(pod.uid, None)  # its end in this world is its own
    look.know(account=dataclasses.replace(look.memory.account, since=look.now, first=look.committed))
    look.said = False  # what has led to it is over
    look.say(State.RUNNING, new.reason, "Training", note=True)


def _waits(look: Look, state: world.State, reason: str) -> None:
    """Nothing is to be decided; say how it stands, and what pods wait for if that is why."""
    if state.world is not None and state.called is None:
        heard_again = memory.why(look.memory.conditions, State.RUNNING) == UNHEARD and not _missed(look)
        if look.memory.state is not State.RUNNING or heard_again:
            look.say(State.RUNNING, reason, "Training")
        return
    if look.wanted == 0:
        return look.say(State.SUSPENDED, reason, "Suspending")
    there = [(pod, look.ends[pod.uid]) for pod in look.past if pod.uid in look.ends and pod.uid not in look.deletes]
    ended = [f"worker {pod.index} {pod.kept or end.sentence}" for pod, end in there]
    stuck = [*(f"worker {pod.index} {pod.waits}" for pod in look.alive if _stuck(pod)), *ended] or [look.seen.refused]
    blocked = next((each for each in stuck if each in look.memory.reason), stuck[0])  # who is named stays so: fewer writes
    before = look.memory.state
    going = before in (State.RESIZING, State.RESTARTING)
    if going and not blocked:
        return  # why it changes is said already
    state_now = before if going and before else State.PENDING
    came = max((told.member.since for told in look.seen.told.values()), default=0.0)
    if before is state_now and not blocked and (settled := look.until(came, ARRIVE_S)) is not None:
        return look.again(settled)
    look.say(state_now, f"{reason}; {blocked}" if blocked else reason, "WorkersPending" if blocked else "WaitingForWorkers")


def _suspended(look: Look, reason: str) -> None:
    """Nobody trains any more: the pods go, and whoever comes later begins a world after this one."""
    for pod in look.alive:
        look.expected[pod.uid] = None
        look.delete(pod, reason)
    look.trained_until_now()
    if look.memory.closed is None:
        look.know(closed=(reason, contract.Exit.INTERRUPTED.value))
    if not look.seen.pods:
        generation = look.memory.generation
        if look.elected:
            look.know(world=None, called=None)
        elif look.memory.world is not None:
            look.know(world=None, called=Call(generation + 1, "the run goes on", False, look.now))
    look.say(State.SUSPENDED, reason if look.seen.pods else "suspended", "Suspended")


def resumed(look: Look) -> None:
    """It was suspended, and is wanted again: deadlines begin anew, and agents hear of no end."""
    if look.wanted and look.memory.closed is not None:
        if any(pod.uid not in look.ends for pod in look.seen.pods):  # they have been told that it is over
            for pod in look.alive:
                look.delete(pod, "it leaves, as the job was suspended")
            look.over = True
            held = look.memory.state if look.memory.state in _HELD else State.SUSPENDED
            return look.say(held, "resumed; the workers that still leave are waited for", "Resuming")
        look.lived_until(memory.since(look.memory.conditions, _HELD) or look.now)
        generation = look.memory.generation
        call = Call(generation + 1, "the run goes on", False, look.now) if look.memory.world else look.memory.called
        call = None if look.elected else call
        look.know(closed=None, world=None, called=call, started=look.now, formed=False)
        look.setup = made.setup(look.seen)


# ----------------------------------------------------------------------------------------------------------------- its workers


def surplus_workers(look: Look) -> None:
    """Pods beyond what is wanted go as soon as no world needs them."""
    known = look.memory
    leaving = frozenset(known.called.leaving if known.called is not None and known.world is not None else ())
    for pod in _by_worth(look)[look.wanted :]:
        if pod.index in look.members and known.closed is None:
            continue  # the world is called together without it first
        if pod.index in leaving:
            continue
        look.expected[pod.uid] = None
        look.delete(pod, f"{look.wanted} workers are wanted, and worker {pod.index} is in no world")


def missing_workers(look: Look) -> None:
    """Pods are made for indices that have none, the smallest first; those that still go keep their name until they have."""
    alive = look.alive
    lacking = look.wanted - len(alive) - sum(pod.succeeded for pod in look.past)
    if lacking <= 0 or look.memory.closed is not None:
        return
    if (pause := _pause_until(look)) is not None:
        return look.again(pause)
    gone = {uid for uid, deletion in look.deletes.items() if deletion.grace_s == 0}
    taken = {contract.worker_name(look.seen.name, pod.index) for pod in look.seen.pods if pod.uid not in gone}
    taken |= {pod.name for pod in look.seen.others if _goes(look, pod)}  # of one that stays it is told when its name is asked for
    free = [index for index in range(look.wanted) if contract.worker_name(look.seen.name, index) not in taken][:lacking]
    generation = look.memory.generation + (look.memory.called is None)
    queue = look.seen.queue if look.seen.queue is not None and look.seen.queue.name else None
    room = queue.room(look.using) if queue is not None else {}
    for pod in made.workers(look.seen, free, generation, _avoided(look)):
        placed = queue.place(pod, room) if queue is not None else pod
        if placed is None:
            return look.again(look.now + AGAIN_S)
        look.creates.append(placed)


def _by_worth(look: Look) -> list[Pod]:
    """The pods that are alive, first those that are to be kept: in the order of the world, then by index."""
    order = {id: rank for rank, id in enumerate(look.memory.world.members)} if look.memory.world else {}
    return sorted(look.alive, key=lambda pod: (order.get(pod.index, len(order)), pod.index))


def _expected(look: Look) -> Iterable[int]:
    """Indices that are to be members: of pods that are kept, or will be made."""
    kept = dict.fromkeys([pod.index for pod in _by_worth(look)][: look.wanted])
    return [*kept, *[index for index in range(look.wanted) if index not in kept][: look.wanted - len(kept)]]


def _pause_until(look: Look) -> float | None:
    """When the next pod may be made: at once (None) after the first failure, ever later while failures follow each other."""
    recent = [blame.record.time for blame in look.memory.blames if blame.record.committed_step >= look.committed]
    if len(recent) < 2:
        return None
    return look.until(max(recent), min(_LONGEST_PAUSE_S, 2.0 ** min(len(recent) - 1, 10)))


def _avoided(look: Look) -> tuple[str, ...]:
    """Nodes on which failures keep happening, and those that will be gone."""
    window = look.policy.window.total_seconds()
    counts: dict[str, int] = {}
    for blame in look.memory.blames:
        if blame.node and look.now - blame.record.time < window:
            counts[blame.node] = counts.get(blame.node, 0) + 1
    leaving = {pod.node for pod in look.seen.pods if pod.node_leaves}
    return tuple(sorted({*leaving, *(node for node, count in counts.items() if count >= AVOID)}))


# ------------------------------------------------------------------------------------------------------------------- failures


def _failures(look: Look) -> list[tuple[bool, Failure]]:
    """What members say has failed in the world that is there, each with whether it only echoes another; not yet judged."""
    known = look.memory
    if known.world is None or known.judged >= known.world.generation:
        return []
    found = []
    for told in look.seen.told.values():
        if told.member.failed and (failure := told.failure) and told.member.generation == known.world.generation:
            if failure.time > look.now:  # its node's clock is ahead of ours: then it was when we heard of it
                failure = failure.model_copy(update={"time": told.beat})
            found.append((told.echo, failure))
    return sorted(found, key=lambda each: each[1].time)


def _explained(look: Look) -> bool:
    """Whether a member of the world is gone, or is another by now: what the others say is its echo."""
    known = look.memory.world
    here = {pod.index for pod in look.alive}
    members = {id for id, told in look.seen.told.items() if known and told.member.generation >= known.generation}
    return known is not None and not set(known.members) <= here & members


def _unanswered(look: Look) -> bool:
    """Whether a member of the world still says that it trains when others have failed: it may be why, and be gone."""
    known = look.memory.world
    said = [told.member for id, told in look.seen.told.items() if id in look.members]
    return any(m.standing is Standing.TRAINING and m.generation == known.generation for m in said if known is not None)


def _judge_processes(look: Look, pending: list[tuple[bool, Failure]], new: world.World | None = None) -> None:
    """Judge the failures of one generation by the first that is no echo. A member that the new world lacks explains echoes."""
    echo, failure = min(pending, key=lambda each: (each[0], not contract.killed(each[1].code), each[1].time))
    generation = failure.generation
    before = look.memory.world
    without = new is not None and before is not None and not set(before.members) <= set(new.members)
    if not (echo and (without or _explained(look))):
        pod = look.pod(failure.worker)
        everywhere = before is not None and restarts.raised_everywhere(failure, pending, before.members)
        _judge(look, failure, raised=None if echo else failure.step, node=pod.node if pod else "", everywhere=everywhere)
        _stands_for_all(look, generation)
    look.know(judged=max(look.memory.judged, generation))


def _pods_failure(look: Look, pod: Pod, code: int, sentence: str, when: float) -> Failure:
    generation = look.memory.world.generation if look.memory.world else 0
    return Failure(
        worker=pod.index, code=code, reason=f"worker {pod.index} {sentence}", generation=generation, time=when or look.now
    )


def _judge(look: Look, failure: Failure, *, raised: int | None, node: str, everywhere: bool = False) -> None:
    """Count a failure, and end the job if that was one too many."""
    known = look.memory
    judged = failure.model_copy(update={"step": raised})
    verdict = restarts.judge(known.history, judged, look.committed, look.now, look.policy, everywhere=everywhere)
    counted = isinstance(verdict, restarts.Stop) or verdict.counted
    told = failure.model_copy(update={"counted": counted, "step": raised if raised is not None else failure.step})
    look.know(failure=_kept(look, told, node))
    if isinstance(verdict, restarts.Stop):
        code = contract.Exit.MISCONFIGURED if verdict.code == contract.Exit.MISCONFIGURED else contract.Exit.GIVEN_UP
        return look.finish(State.FAILED, verdict.reason, code, _why_failed(verdict.reason, code))
    nodes = {blame.record: blame.node for blame in known.blames}
    blames = tuple(Blame(record, nodes.get(record, node)) for record in verdict.history.failures)
    look.know(blames=blames, restarts=known.restarts + counted)
    look.setup = made.setup(look.seen)  # somebody may have deleted what workers need to be heard, or to find each other
    look.say(State.RESTARTING, verdict.reason, "WorkerFailed", note=True, warning=True)


def _kept(look: Look, failure: Failure, node: str) -> Document:
    """A failure as the status keeps it, with the last lines of its worker's log: as its agent says, else as its pod ended."""
    pod = look.pod(failure.worker)
    words = failure.log_tail or (pod.last_words if pod is not None else "")
    kept = failure.model_dump(exclude_none=True, exclude={"log_tail"})
    return {**kept, "node": node, **({"logTail": words} if words else {})}


def _stands_for_all(look: Look, generation: int) -> None:
    """A failure was counted: it stands for whatever else the workers of its world show. One outside of every world (0) stands for
    all workers that are outside with it, until they are in one."""
    silent = (dataclasses.replace(each, echo=each.echo or each.generation == generation) for each in look.memory.silent)
    look.know(judged=max(look.memory.judged, generation), silent=tuple(silent))
    if not generation:
        look.expected.update(dict.fromkeys(pod.uid for pod in look.seen.pods if not _inside(look, pod)))


def _went(look: Look, pod: Pod) -> None:
    """A worker has gone for no failure of its own; with it is explained what the others of its world say."""
    look.expected[pod.uid] = None
    known = look.memory
    if known.world and _inside(look, pod) and known.called is None:
        look.know(judged=known.world.generation)


def _interrupted(look: Look, pod: Pod, what: str, sentence: str) -> None:
    """Count and tell, once, that a worker that was well has to go."""
    if pod.uid not in look.expected:
        look.notes.append(Note("Normal", what, sentence))
        look.know(interruptions=look.memory.interruptions + 1)
        look.expected[pod.uid] = None


def _inside(look: Look, pod: Pod) -> bool:
    """Whether a pod is, or was, in the newest world; one that was made after it only has an index that is."""
    known = look.memory.world
    return known is not None and pod.index in look.members and pod.made_for <= known.generation


def _generation(look: Look, pod: Pod) -> int:
    """Of the world that a pod is in; 0 for none."""
    return look.memory.world.generation if look.memory.world and _inside(look, pod) else 0


def _silent_at(look: Look, told: Told) -> float | None:
    """When a member is dead if nothing more is heard of it; None when it is."""
    pod, lasts = look.pod(told.member.id), _lasts(look, told)
    held = look.unheard and pod is not None and pod.node_lost is None
    return look.until(_heard(look, told), max(lasts, look.seen.limits.held_s) if held else lasts)


def _lasts(look: Look, told: Told) -> float:
    """For how long a member may say nothing: it says so itself, as members of large worlds renew their Leases less often."""
    return max(look.seen.limits.silence_s, told.lasts)


def _missed(look: Look) -> bool:
    """Whether most workers are missed, and one of them for so long that it would be taken for dead if it were alone."""
    return any(look.until(_heard(look, each), _lasts(look, each)) is None for each in look.unheard)


def _heard(look: Look, told: Told | None) -> float:
    """When a member was heard of last, or could have been. What comes from the future, as our clock went back, says nothing."""
    late = told is None or told.beat > look.now + _lasts(look, told)
    return look.seen.since if late or told is None else max(told.beat, look.seen.since)


def _stuck(pod: Pod) -> bool:
    """Whether a pod waits for something that people should know of."""
    return bool(pod.waits) and not pod.waits.startswith(("waits to be scheduled", "is being started"))


def _goes(look: Look, pod: Pod) -> bool:
    """Whether a pod that is not of this job goes by itself, or with the earlier job of this name that it is of."""
    owners = pod.document["metadata"].get("ownerReferences") or ()
    kind, name = (look.seen.document["apiVersion"], look.seen.document["kind"]), look.seen.name
    return pod.leaves or any((each["apiVersion"], each["kind"], each["name"]) == (*kind, name) for each in owners)


def _force(look: Look, pod: Pod) -> None:
    """Delete a pod that goes and is on a node that does not answer, at once."""
    plan = orphans([pod], look.now, look.seen.since, look.seen.limits)
    for deletion in plan.deletes:
        look.deletes.setdefault(pod.uid, deletion)
    look.again(plan.look_again)


def orphans(pods: Iterable[Pod], now: float, since: float, limits: Limits) -> Plan:
    """What pods need that go with their job: nothing, but for those on nodes that do not answer."""
    going = [(pod, max(pod.node_lost, since)) for pod in pods if pod.leaves and pod.node_lost is not None]
    ends = [(pod, world.until(quiet, limits.lost_s, now)) for pod, quiet in going]
    deletes = tuple(
        Deletion(pod.name, pod.uid, f"it goes, and its node {pod.node} does not answer", grace_s=0)
        for pod, end in ends
        if end is None
    )
    return Plan(deletes=deletes, look_again=min((end for _, end in ends if end is not None), default=None))


# ------------------------------------------------------------------------------------------------------------------- progress


def _tell_progress(look: Look) -> None:
    """How far training is: with everything else that is written, at the first step of a world, else now and then. That steps are
    heard of is no reason to look, so there is a look when they are due."""
    known, mark = look.memory.progress, _mark(look)
    pause_s = max(look.seen.limits.progress_s, len(look.seen.pods) ** 2 * BYTES_PER_WORKER / TOLD_BYTES_PER_S)
    due = look.until(known.time, pause_s)
    if mark is not None:
        look.again(due or look.now + pause_s)
    step, committed = look.step, look.committed
    steps = next((told.steps for told in look.seen.told.values() if told.steps is not None), known.steps)
    if (step, steps, committed) == (known.step, known.steps, known.committed):
        return
    first = mark is not None and known.mark is None
    anew = dataclasses.replace(look.memory, progress=look.seen.memory.progress) != look.seen.memory
    if due is not None and not first and not anew:
        return
    committed_at = look.now if committed > known.committed else known.committed_at
    rate, mark = _rate(known, mark)
    look.know(progress=memory.Progress(step, steps, committed, committed_at, rate, float(int(look.now)), mark))


def _mark(look: Look) -> tuple[int, float] | None:
    """The newest step of rank 0 in the world that trains, and when it was. Always the same one: clocks of nodes differ."""
    known = look.memory.world
    if known is None or look.memory.called is not None or look.memory.closed is not None:
        return None
    told = look.seen.told.get(known.members[0])
    if told is None or told.step is None or not told.time or told.generation not in (None, known.generation):
        return None
    return told.step, round(told.time, 3)


def _rate(known: memory.Progress, mark: tuple[int, float] | None) -> tuple[float | None, tuple[int, float] | None]:
    """Steps per second since the mark that is known, and the mark to go on from. None before there are two of one world."""
    if mark is None or known.mark is None:
        return None, mark
    seconds = mark[1] - known.mark[1]
    if seconds < MEASURE_S:
        return known.rate, known.mark
    return float(f"{max(0, mark[0] - known.mark[0]) / seconds:.4g}"), mark


def _why_failed(reason: str, code: int) -> str:
    """The CamelCase reason of a job that failed for good."""
    if "times in a row" in reason:
        return "NoProgress"
    return "WrongConfiguration" if code == contract.Exit.MISCONFIGURED else "BackoffLimitExceeded"


def _why(reason: str) -> str:
    """The CamelCase reason of an unplanned call."""
    return "WorkerLost" if reason.startswith("lost") else "WorkerFailed"


RULES: tuple[Callable[[Look], None], ...] = (
    finished,
    unreadable,
    changed_or_new,
    world_learned,
    queued,
    workers_done,
    ended_workers,
    lost_workers,
    silent_workers,
    leaving_nodes,
    resumed,
    too_late,
    world_decided,
    unheard_workers,
    surplus_workers,
    missing_workers,
)
"""In this order. What pods have come to is learned before the world is decided, and pods are made last."""
