"""The coordinator of one run: it processes members' reports, publishes calls and worlds, judges failures and ends the run. Pure.

The coordinator's process owns a `CoordinatorState`: the launcher on one machine (`local.launcher`), worker 0's agent
(`rendezvous.worker0`), an elected member (`rendezvous.etcd.election`), or the operator, which restores the state from a job's
status (`kubernetes.operator.rules.coordination`). The owner passes each event to `step`. Because it may die at any moment, it
stores `CoordinatorState.persisted` before it performs the effects in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from outlast.base.clock import until
from outlast.job import contract
from outlast.job.contract import End
from outlast.job.failure import Failure
from outlast.job.status import Ending, State
from outlast.rendezvous import attempts, messages, partition, restart_budget, root_cause, who_trains
from outlast.rendezvous.restart_budget import Stop
from outlast.rendezvous.root_cause import Known, Pending
from outlast.rendezvous.who_trains import Call, Cause, MemberState, Wait, World

if TYPE_CHECKING:
    from outlast.job import spec


_FACTS = {"generation", "worker", "rank", "code", "reason", "cause", "step", "counted", "attempt"}


@dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...]
    policy: restart_budget.Policy
    timeouts: who_trains.Timeouts
    fences: bool = True
    """True to make unresponsive members exit. Something must then restart them."""
    gives_up: bool = True
    """True to make a failed job's workers exit with GIVEN_UP, so that the controller of their pods does not restart them."""
    debounce: root_cause.Debounce = root_cause.COORDINATOR
    counts_ends: bool = False
    """True if the owner counts every worker's end as a failure (`Known`) or an interruption. Other members' failures that only
    follow from such an end do not count."""

    @classmethod
    def of(cls, fields: spec.Spec) -> Self:
        timeouts = replace(who_trains.Timeouts(), leave=fields.interruption.grace.total_seconds())
        return cls(fields.workers.allowed(), restart_budget.Policy(fields.restarts.limit, fields.restarts.window), timeouts)


# Events


@dataclass(frozen=True)
class Tick:
    """Asks for a decision. `expected` is as in `who_trains.Desired`, and `replicas` defaults to the size of `expected`. `cause`
    is the root cause of the pending failures if the owner knows it."""

    expected: frozenset[int] | None
    replicas: int | None = None
    cause: Known | None = None


Event = messages.Report | messages.Gone | Pending | Known | attempts.Repaired | Tick | Ending
"""A member's report or loss, a failure that the owner has noticed (a `Known` failure is counted at once), a failure that the
members have repaired, a request for a decision, or an ending that the owner requests."""


# Effects


@dataclass(frozen=True)
class Record:
    """Write an event to the ledger. If `state` is set, also print or publish it."""

    kind: str
    facts: Mapping[str, Any]
    state: State | None = None
    reason: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Fence:
    """Make the process of an unresponsive member exit."""

    id: int
    reason: str


@dataclass(frozen=True)
class Send:
    """Send a message to members. A coordinator whose members read its published state can ignore this effect."""

    to: Iterable[int]
    kind: str
    message: messages.Called | World | messages.Closed


Effect = Record | World | Send | Fence | Ending | Wait | who_trains.Closed
"""A `World` begins, an `Ending` must be carried out, a `Wait` says why there is no decision, and `Closed` says that no workers
are wanted."""


class EventSink(Protocol):
    def say(self, text: str) -> None: ...
    def event(self, kind: str, **facts: Any) -> None: ...
    def finished(self, state: State, reason: str, code: int) -> None: ...


def show(effect: Effect, sink: EventSink) -> None:
    """Print and log a `Record` or an `Ending`, and call `sink.finished` for an `Ending`. Other effects are ignored."""
    match effect:
        case Record(kind, facts, state, reason, failure):
            if failure and failure.traceback:
                sink.say(failure.traceback)
            sink.event(kind, **facts)
            if state:
                sink.say(f"{state}: {reason}")
        case Ending(state, reason, code):
            sink.event("finished", state=str(state), reason=reason, code=code)
            sink.say(f"{state}: {reason}")
            sink.finished(state, reason, code)


# The state


@dataclass(frozen=True)
class PersistedState:
    """The state that a successor of the coordinator cannot learn from the members. Times are ages in seconds because clocks
    differ. Field names are also used in `launcher.json` and, mostly, in etcd (`etcd.key_schema`)."""

    world: World | None = None
    called: Call | None = None
    closed: messages.Closed | None = None
    min_generation: int = 0
    """Calls only use generations above this one."""
    counted: int = 0
    attempt: int = 0
    """The attempt in which the counted failure occurred; see `failure.Failure.attempt`."""
    restarts: int = 0
    failures: tuple[tuple[float, int, int | None], ...] = ()
    """`restart_budget.Record`s, each with an age instead of a time."""
    failure: Mapping[str, Any] | None = None
    lost: tuple[tuple[int, float, int], ...] = ()
    """`partition.Loss`es that keep members out of worlds, as (id, age, number of consecutive losses)."""

    @property
    def generation(self) -> int:
        """The newest generation that may have existed."""
        called = self.called.generation - 1 if self.called else 0
        return max(self.min_generation, called, self.world.generation if self.world else 0)

    def restored(self, now: float, ago_s: float = 0.0) -> CoordinatorState:
        """Return the successor's initial state, `ago_s` seconds after this state was stored. It has no `ending`, which the caller
        must restore."""
        then = now - ago_s
        lost = {id: partition.Loss(then - age, times) for id, age, times in self.lost}
        history = tuple(restart_budget.Record(then - age, committed, step) for age, committed, step in self.failures)
        current, called = self.world and replace(self.world, at=now), self.called and replace(self.called, at=now)
        state = CoordinatorState({}, current, called, min_generation=self.min_generation, lost=lost, history=history)
        counted = self.counted, self.attempt
        return replace(state, followed=state.generation, counted=counted, restarts=self.restarts, failure=self.failure)


@dataclass(frozen=True)
class CoordinatorState(who_trains.State):
    """The input of `who_trains.decide`, the members' reports, and the failures."""

    reports: Mapping[int, messages.Report] = field(default_factory=dict)
    pending: tuple[Pending, ...] = ()
    """Unjudged failures of the current generation."""
    pending_since: float = 0.0
    """When the first pending failure arrived, on our clock; `Failure.time` is on the sender's clock."""
    counted: tuple[int, int] = (0, 0)
    """The newest generation and attempt with a counted failure. Failures up to this attempt are no longer counted."""
    followed: int = 0
    """The newest generation that was reported or published."""
    committed: int = 0
    history: restart_budget.History = ()
    restarts: int = 0
    failure: Mapping[str, Any] | None = None
    fenced: Mapping[int, tuple[int, messages.Closed]] = field(default_factory=dict)
    """Connected members that count as lost, with the generation in which they were lost and the message for them."""
    ending: Ending | None = None

    @property
    def generation(self) -> int:
        """The newest published generation."""
        return max(self.called.generation - 1 if self.called else 0, self.world.generation if self.world else 0)

    @property
    def closed(self) -> messages.Closed | None:
        """The final result, for every member that reports; None before the end. It is also None after an interruption, because
        workers are then asked to leave instead."""
        end = self.ending
        return messages.Closed(end.reason, end.code, end.end) if end and end.code != contract.Exit.INTERRUPTED else None

    def uncounted(self, reported: Iterable[tuple[Pending, bool]]) -> list[Pending]:
        """Return the reported failures that must still be judged. `reported` pairs each failure with its report's `again`: a
        restarted worker may report a failure of a world that is over.

        An echo belongs to the call that the counted failure of its generation has caused, even if it comes from a later attempt
        that some members had already begun. Any other failure counts by itself. A member that left counts as failed only if other
        members have failed.
        """
        of = self.world.generation if self.world else None
        called_for = self.counted[0] if self.called and self.called.cause is Cause.FAILED else None
        new = [each for each, again in reported if of is not None and (again or each.failure.generation == of)]
        new = [each for each in new if not (each.echo and each.failure.generation == called_for)]
        new = [each for each in new if self.counted < each.failure.start]
        return new if any(not (each.echo and each.failure.left) for each in (*self.pending, *new)) else []

    def persisted(self, now: float) -> PersistedState:
        failures = tuple((now - at, committed, step) for at, committed, step in self.history)
        lost = tuple((id, now - loss.at, loss.times) for id, loss in self.lost.items() if loss.held)
        rest = *self.counted, self.restarts, failures, self.failure, lost
        return PersistedState(self.world, self.called, self.closed, self.min_generation, *rest)


def after(generation: int, now: float) -> CoordinatorState:
    """Return the initial state of a run that continues after `generation`. A new run in a store continues after generation 1."""
    cause, reason = (Cause.RESUME, "the run goes on") if generation > 1 else (Cause.START, "training starts")
    called = Call(generation + 1, reason, False, now, cause=cause)
    return CoordinatorState({}, called=called if generation else None)


def step(settings: Settings, state: CoordinatorState, event: Event, now: float) -> tuple[CoordinatorState, list[Effect]]:
    """Return the state after an event, and the effects to perform in order. `now` is on the coordinator's clock."""
    run = _Step(settings, state, now)
    match event:
        case messages.Report():
            run.report(event)
        case messages.Gone(id):
            run.lose(id)
        case Pending():
            run.add_failure(event)
        case Known():
            run.count(event, now)
        case attempts.Repaired():
            run.count_repaired(event)
        case Tick():
            if not run.awaits_cause() and run.decide(event):
                run.judge_if_settled(event.cause)
        case Ending():
            run.end(event)
    return run.state, run.effects


class _Step:
    def __init__(self, settings: Settings, state: CoordinatorState, now: float) -> None:
        self.settings, self.state, self.now = settings, state, now
        self.effects: list[Effect] = []

    def report(self, report: messages.Report) -> None:
        last, to = self.state.reports.get(report.id), (report.id,)
        if last is not None and replace(last, since=report.since) == report:
            return  # a heartbeat
        self.state = replace(self.state, reports={**self.state.reports, report.id: report})
        if report.id in self.state.fenced:
            generation, closed = self.state.fenced[report.id]
            if report.generation == generation and not report.again:
                return self.effects.append(Send(to, "closed", closed))
            fenced = {id: each for id, each in self.state.fenced.items() if id != report.id}
            self.state = replace(self.state, fenced=fenced)  # the worker was restarted
        failed: Pending | None = None
        if report.failed and report.failure:
            failed = root_cause.reported(report.failure, report.id, (report.generation, report.attempt), self.now)
        self.count_all_repaired(report)
        why = failed.failure.reason if failed and not failed.echo else ""
        self.state = state = self.state.reported(report.member(report.id, since=self.now, received=self.now, why=why))
        for each in state.uncounted([(failed, report.again)] if failed else ()):
            self.add_failure(each)
        current = state.world
        # The member may have missed messages that were sent before it connected.
        if state.called is not None:
            self.effects.append(Send(to, "called", self.message(state.called)))
        elif current is not None and report.generation < current.generation:
            if report.id in current.members and report.id not in state.departed:
                self.effects.append(Send(to, "world", current))
            elif report.standing is not MemberState.WAITING:
                self.effects.append(Send(to, "called", messages.Called(current.generation, current.reason, False, 0.0)))
        if state.closed is not None:
            self.effects.append(Send(to, "closed", state.closed))

    def lose(self, id: int) -> None:
        reports = {other: report for other, report in self.state.reports.items() if other != id}
        self.state = replace(self.state.gone(id), reports=reports)

    def end(self, ending: Ending) -> None:
        if self.state.ending is not None:
            return
        if ending.state is State.FAILED and ending.code != contract.Exit.MISCONFIGURED and self.settings.gives_up:
            ending = replace(ending, code=contract.Exit.GIVEN_UP)
        self.state = replace(self.state, ending=ending)
        self.effects.append(ending)
        if self.state.closed is not None:
            self.effects.append(Send(tuple(self.state.reports), "closed", self.state.closed))

    # Decisions

    def awaits_cause(self) -> bool:
        """Return whether only echoes are pending and their root cause may still be reported."""
        state, debounce = self.state, self.settings.debounce
        return root_cause.held_until(state.pending, state.pending_since, self.now, debounce) is not None and not self.explained()

    def explained(self) -> bool:
        """Return whether a member of the world is gone, lost or leaving, so that other members' failures may only be
        consequences."""
        world, inside = self.state.world, self.state.inside
        here = {member.id for member in inside if member.standing is not MemberState.LEAVING}
        return world is not None and (not here.issuperset(world.members) or bool(who_trains.lost(self.state, self.now).out))

    def decide(self, tick: Tick) -> bool:
        """Make the next decision. Returns False if no workers are wanted any more."""
        sizes, expected = self.settings.sizes, tick.expected
        most = sizes[-1] if expected is None else min(len(expected), sizes[-1])
        desired = who_trains.Desired(most if tick.replicas is None else tick.replicas, sizes, expected)
        decision = who_trains.decide(self.state, desired, self.settings.timeouts, self.now)
        match decision:
            case who_trains.Call():
                self.call(decision)
            case who_trains.World():
                self.form(decision, tick.cause)
            case who_trains.Closed(reason, True):
                self.end(Ending(State.SUCCEEDED, reason, contract.Exit.DONE, End.SUCCEEDED))
            case who_trains.Wait() | who_trains.Closed():
                self.effects.append(decision)
        return tick.replicas != 0 and not isinstance(decision, who_trains.Closed)

    def call(self, call: Call) -> None:
        before, verdict = self.state, who_trains.lost(self.state, self.now)
        self.state = before.after(call)
        if verdict.out and call.cause is Cause.LOST:
            lost = {"workers": list(verdict.out), "by": list(verdict.by), "reason": call.reason}
            self.effects.append(Record("unheard", {"generation": before.generation, **lost}))
        facts = {"generation": call.generation, "reason": call.reason, "planned": call.planned}
        self.effects.append(Record("called", facts, State.RESIZING if call.planned else State.RESTARTING, call.reason))
        for id in call.lost:
            if self.settings.fences and not (before.called and id in before.called.lost):
                self.fence(id, call.reason)
        self.effects.append(Send(tuple(self.state.reports), "called", self.message(call)))

    def message(self, call: Call) -> messages.Called:
        deadline = call.at + self.settings.timeouts.leave
        return messages.Called(call.generation, call.reason, call.planned, deadline, leave_s=deadline - self.now)

    def fence(self, id: int, reason: str) -> None:
        closed, current = messages.Closed(reason, contract.Exit.INTERRUPTED), self.state.world
        self.lose(id)
        fenced = {**self.state.fenced, id: (current.generation if current else 0, closed)}
        self.state = replace(self.state, fenced=fenced)
        self.effects += [Send((id,), "closed", closed), Fence(id, reason)]

    def form(self, new: World, cause: Known | None) -> None:
        self.judge(cause, new)
        if self.state.ending is not None:
            return
        # All members of the world have reported, so a member that is absent from now on is lost.
        self.state = replace(self.state.after(new), followed=new.generation, since=-math.inf)
        facts = {"generation": new.generation, "workers": list(new.members), "reason": new.reason}
        self.effects += [Record("world", facts, State.RUNNING, new.reason), new, Send(new.members, "world", new)]

    # Failures

    def add_failure(self, failed: Pending) -> None:
        since = self.state.pending_since if self.state.pending else self.now
        self.state = replace(self.state, pending=(*self.state.pending, failed), pending_since=since)

    def judge_if_settled(self, cause: Known | None) -> None:
        """Judge pending failures after the debounce time, even if no new world can form yet."""
        state, debounce = self.state, self.settings.debounce
        trains = any(member.standing in (MemberState.TRAINING, MemberState.DONE) for member in state.inside)
        wait_s = debounce.answer if trains and root_cause.only_echoes(state.pending) else debounce.settle
        if until(state.pending_since, wait_s, self.now) is None:
            self.judge(cause)

    def judge(self, known: Known | None, new: World | None = None) -> None:
        """Judge the pending failures. `new` is the next world."""
        pending, last = self.state.pending, self.state.world
        if not pending:
            return
        cause = root_cause.cause(pending)
        left_out = new is not None and last is not None and not set(last.members) <= set(new.members)
        secondary = cause.echo and self.settings.counts_ends and (left_out or self.explained())
        self.state = replace(self.state, pending=())
        if not (secondary and left_out):  # a member that is left out may report the cause late
            self.state = replace(self.state, counted=max(self.state.counted, cause.failure.start))
        if secondary:
            return
        if known is None:
            report = self.state.reports.get(cause.failure.worker)
            known = self.known(cause, report.failure if report else None)
        self.count(known, self.now, pending)

    def count_all_repaired(self, report: messages.Report) -> None:
        if report.generation > self.state.followed:  # another coordinator has counted earlier failures
            counted = max(self.state.counted, attempts.previous_start(report.generation, report.attempt))
            self.state = replace(self.state, followed=report.generation, counted=counted)
        for repaired in attempts.uncounted([report.past], self.state.counted, report.generation):
            if self.state.closed is None:
                self.count_repaired(repaired)

    def count_repaired(self, repaired: attempts.Repaired) -> None:
        past, ago_s = repaired
        failed = root_cause.reported(past.failure, past.worker, past.start, self.now)
        # A member may also have reported this failure.
        pending = tuple(each for each in self.state.pending if each.failure.start != past.start)
        self.state = replace(self.state, counted=past.start, pending=pending)
        self.count(self.known(failed, past.failure), self.now - ago_s, past=past)

    def known(self, failed: Pending, report: Mapping[str, Any] | None) -> Known:
        committed = max(self.state.committed, root_cause.committed(report) or 0)
        self.state = replace(self.state, committed=committed)
        return Known(failed.failure, None if failed.echo else failed.failure.step, committed)

    def count(self, known: Known, at: float, pending: Sequence[Pending] = (), *, past: attempts.Past | None = None) -> None:
        """Count a failure that occurred at time `at`. `past` is set if the members have repaired it."""
        state = self.state
        fits, policy = who_trains.fits(state.world, self.settings.sizes, state.members.values()), self.settings.policy
        failure, verdict = root_cause.judge(known, state.history, policy, at, pending=pending, current=state.world, fits=fits)
        self.state = replace(state, failure=failure.document(but=("traceback",)))
        texts = {name: text for name in ("traceback", "log_tail") if (text := getattr(failure, name))}
        facts = {**{name: getattr(failure, name) for name in _FACTS}, **texts, **({"repaired": past.attempt} if past else {})}
        if isinstance(verdict, Stop):
            self.effects.append(Record("failure", facts, failure=failure))
            return self.end(Ending(State.FAILED, verdict.reason, verdict.code, verdict.kind))
        self.state = replace(self.state, history=verdict.history, restarts=state.restarts + verdict.counted)
        shown = State.RUNNING if state.world is not None and state.called is None else State.RESTARTING
        reason = f"{past.sentence}: {verdict.reason}" if past else verdict.reason
        self.effects.append(Record("failure", facts, shown, reason, failure))
