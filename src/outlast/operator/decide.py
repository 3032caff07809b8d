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
from collections.abc import Callable, Iterable

from outlast import backoff, contract
from outlast.errors import InvalidJob
from outlast.kube import kinds, wire
from outlast.manifests import gang
from outlast.manifests.kueue import Priority
from outlast.operator import desired, job_status, reconcile
from outlast.operator.plan import Deletion, Document, Plan
from outlast.operator.reconcile import Look
from outlast.operator.rules import ends, failures, progress
from outlast.operator.snapshot import Pod, Seen
from outlast.rendezvous import failures as judging
from outlast.rendezvous import world
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.world import Call, Cause, Standing
from outlast.status import End, Failure, State

ARRIVE_S = 2.0
"""Workers come one after another: who is still waited for is written when nobody has come for so long."""
LEAVE_S = 60.0
"""How long workers may take to push the rest and end, once the job has."""
AVOID = 2
"""On a node with so many counted failures within the window pods of this job are put only if there is no other."""
_LONGEST_PAUSE_S = 60.0
_FINAL = (State.SUCCEEDED, State.FAILED)
_HELD = (State.SUSPENDED, State.QUEUED)
AGAIN_S = 10.0
"""How often it is looked whether there is by now what Kueue or a job names: nobody tells when it comes."""


def decide(seen: Seen) -> Plan:
    """The plan for one look."""
    if seen.document["spec"].get("managedBy", contract.MANAGED_BY) != contract.MANAGED_BY:
        return Plan()  # somebody else makes its pods, and writes its status
    if seen.document["metadata"].get("deletionTimestamp"):
        return ends.orphans(seen.pods, seen.now, seen.since, seen.limits)
    look = Look(seen)
    for rule in RULES:
        rule(look)
        if look.over:
            break
    if seen.job is not None:
        progress.tell(look)
    return look.plan()


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
            ends.force(look, pod)
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
        return look.finish(State.FAILED, reason, contract.Exit.MISCONFIGURED, End.INVALID)
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
            look.setup = desired.setup(look.seen)
            look.know(started=look.now, formed=False, gang="" if look.seen.gang == "none" else look.seen.gang)
        else:
            look.apply = desired.changed(look.seen)
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
        return desired.workload(look.seen, queue.sight.kind, name, count, least, priority)

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
            failures.interrupted(look, pod, "WorkerPreempted", sentence)
            look.delete(pod, sentence)


def too_late(look: Look) -> None:
    """A deadline has passed."""
    started = look.memory.started
    if started is None or not look.wanted:
        return
    whole, first = look.fields.active_deadline_seconds, look.fields.startup_deadline_seconds
    if whole is not None:
        if look.now >= started + whole:
            sentence = f"the job has run for activeDeadlineSeconds ({whole:g})"
            return look.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.DEADLINE)
        look.again(started + whole)
    if first is not None and not look.memory.formed:
        if look.now >= started + first:
            pending = next((f": worker {pod.index} {pod.waits}" for pod in look.alive if pod.waits), "")
            sentence = f"no world was formed within startupDeadlineSeconds ({first:g}){pending}"
            return look.finish(State.FAILED, sentence, contract.Exit.GIVEN_UP, End.STARTUP_DEADLINE)
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
    reason, code = said.closed.reason, said.closed.code
    if code == contract.Exit.DONE:
        return look.finish(State.SUCCEEDED, reason, code, End.SUCCEEDED)
    untold = End.MISCONFIGURED if code == contract.Exit.MISCONFIGURED else End.LIMIT
    look.finish(State.FAILED, reason, code, End(said.closed.end) or untold)


def _failures_learned(look: Look, said: schema.Said) -> None:
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
    look.know(judged=failure.generation, failure=failures.kept(look, failure, pod.node if pod else ""))
    look.say(State.RESTARTING, failure.reason, "WorkerFailed", note=True, warning=True)


# ------------------------------------------------------------------------------------------------------------------ the world


def world_decided(look: Look) -> None:
    """Who trains together, and what agents are told of it."""
    if look.elected:
        return _world_wanted(look)
    state = _state(look)
    wanted = world.Wanted(look.wanted, look.fields.workers.allowed(), frozenset(_expected(look)))
    pending = failures.reported(look)
    since = min((each.failure.time for each in pending), default=look.now)
    if not failures.explained(look) and (end := judging.held_until(pending, since, look.now, judging.OPERATOR)) is not None:
        return look.again(end)
    for _ in range(4):
        decision = world.decide(state, wanted, look.patience, look.now)
        if isinstance(decision, world.World) and pending:
            failures.judge_processes(look, pending, decision)
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
                return look.finish(State.SUCCEEDED, reason, contract.Exit.DONE, End.SUCCEEDED)
            case world.Closed(reason):
                return _suspended(look, reason)
            case world.Wait() as wait:
                _waits(look, state, wait.steady)
                look.again(wait.look_again)
                break
    if pending:
        settled = judging.settled_at(pending, since, look.now, judging.OPERATOR, unanswered=failures.unanswered(look))
        if settled is None:
            failures.judge_processes(look, pending)
        look.again(settled)


def _world_wanted(look: Look) -> None:
    """Agents decide, and are told what is wanted."""
    before, known = look.memory.wanted, look.memory
    sizes, expected = look.fields.workers.allowed(), tuple(sorted(_expected(look)))
    wanted = schema.Wanted(before.number if before else 0, look.wanted, sizes, expected)
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
        gone = pod is None or pod.uid in look.ends or cut or reconcile.silent_at(look, told) is None
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
    what = "Resizing" if call.planned else "WorkerLost" if call.cause is Cause.LOST else "WorkerFailed"
    look.say(state, call.reason, what, note=True, warning=not call.planned)


def _formed(look: Look, new: world.World) -> None:
    look.know(world=new, called=None, closed=None, formed=True, blocked=None)
    for pod in look.alive:
        if pod.index in look.members:
            look.expected.pop(pod.uid, None)  # its end in this world is its own
    look.know(account=dataclasses.replace(look.memory.account, since=look.now, first=look.committed))
    look.said = False  # what has led to it is over
    look.say(State.RUNNING, new.reason, "Training", note=True)


def _waits(look: Look, state: world.State, reason: str) -> None:
    """Nothing is to be decided; say how it stands, and what pods wait for if that is why."""
    if state.world is not None and state.called is None:
        heard_again = job_status.why(look.memory.conditions, State.RUNNING) == reconcile.UNHEARD and not reconcile.missed(look)
        if look.memory.state is not State.RUNNING or heard_again:
            look.say(State.RUNNING, reason, "Training")
        return
    if look.wanted == 0:
        return look.say(State.SUSPENDED, reason, "Suspending")
    there = [(pod, look.ends[pod.uid]) for pod in look.past if pod.uid in look.ends and pod.uid not in look.deletes]
    ended = [(pod.index, f"worker {pod.index} {pod.kept or end.sentence}") for pod, end in there]
    stuck = dict([*((pod.index, f"worker {pod.index} {pod.stuck}") for pod in look.alive if pod.stuck), *ended])
    named = look.memory.blocked if look.memory.blocked in stuck else next(iter(stuck), None)  # stays the same: fewer writes
    blocked = look.seen.refused if named is None else stuck[named]
    before = look.memory.state
    going = before in (State.RESIZING, State.RESTARTING)
    if going and not blocked:
        return  # why it changes is said already
    state_now = before if going and before else State.PENDING
    came = max((told.member.since for told in look.seen.told.values()), default=0.0)
    if before is state_now and not blocked and (settled := look.until(came, ARRIVE_S)) is not None:
        return look.again(settled)
    if not look.said:
        look.know(blocked=named)
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
            look.know(world=None, called=Call(generation + 1, "the run goes on", False, look.now, cause=Cause.RESUME))
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
        look.lived_until(job_status.since(look.memory.conditions, _HELD) or look.now)
        generation = look.memory.generation
        call = look.memory.called
        if look.memory.world:
            call = Call(generation + 1, "the run goes on", False, look.now, cause=Cause.RESUME)
        call = None if look.elected else call
        look.know(closed=None, world=None, called=call, started=look.now, formed=False)
        look.setup = desired.setup(look.seen)


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
    for pod in desired.workers(look.seen, free, generation, _avoided(look)):
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
    return look.until(max(recent), backoff.exponential(len(recent) - 1, 1.0, _LONGEST_PAUSE_S))


def _avoided(look: Look) -> tuple[str, ...]:
    """Nodes on which failures keep happening, and those that will be gone."""
    window = look.policy.window.total_seconds()
    counts: dict[str, int] = {}
    for blame in look.memory.blames:
        if blame.node and look.now - blame.record.time < window:
            counts[blame.node] = counts.get(blame.node, 0) + 1
    leaving = {pod.node for pod in look.seen.pods if pod.node_leaves}
    return tuple(sorted({*leaving, *(node for node, count in counts.items() if count >= AVOID)}))


def _goes(look: Look, pod: Pod) -> bool:
    """Whether a pod that is not of this job goes by itself, or with the earlier job of this name that it is of."""
    owners = pod.document["metadata"].get("ownerReferences") or ()
    kind, name = (look.seen.document["apiVersion"], look.seen.document["kind"]), look.seen.name
    return pod.leaves or any((each["apiVersion"], each["kind"], each["name"]) == (*kind, name) for each in owners)


RULES: tuple[Callable[[Look], None], ...] = (
    finished,
    unreadable,
    changed_or_new,
    world_learned,
    queued,
    ends.workers_done,
    ends.ended_workers,
    ends.lost_workers,
    ends.silent_workers,
    ends.leaving_nodes,
    resumed,
    too_late,
    world_decided,
    ends.unheard_workers,
    surplus_workers,
    missing_workers,
)
"""In this order. What pods have come to is learned before the world is decided, and pods are made last."""
