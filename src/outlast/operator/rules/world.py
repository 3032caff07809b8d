"""Who trains together: asked of `rendezvous.world`, or learned from agents that elect a coordinator in an etcd. Pure."""

from __future__ import annotations

import dataclasses

from outlast import contract
from outlast.operator import desired, job_status, reconcile
from outlast.operator.reconcile import Look
from outlast.operator.rules import failures
from outlast.operator.rules.workers import desired_indices
from outlast.rendezvous import failures as judging
from outlast.rendezvous import world
from outlast.rendezvous.etcd import schema
from outlast.rendezvous.world import Call, Cause, Standing
from outlast.status import End, Failure, State

ARRIVE_S = 2.0
"""Workers come one after another: who is still waited for is written when nobody has come for so long."""
_HELD = (State.SUSPENDED, State.QUEUED)


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


def world_decided(look: Look) -> None:
    """Who trains together, and what agents are told of it."""
    if look.elected:
        return _world_wanted(look)
    state = _state(look)
    wanted = world.Wanted(look.wanted, look.fields.workers.allowed(), frozenset(desired_indices(look)))
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
    sizes, expected = look.fields.workers.allowed(), tuple(sorted(desired_indices(look)))
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
        gone = pod is None or pod.uid in look.ends or cut or look.silent_at(told) is None
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
        heard_again = job_status.why(look.memory.conditions, State.RUNNING) == reconcile.UNHEARD and not look.missed()
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
