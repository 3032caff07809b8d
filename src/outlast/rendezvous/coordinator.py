"""Coordination of one run: process its members' reports, publish calls and worlds, judge failures and end the run.

The decisions are `world.decide` and `root_cause.judge`; a `Coordinator` carries them out in the process that coordinates: the
launcher of one machine (`local.launcher`), the agent of worker 0 (`rendezvous.worker0`), or an elected member
(`rendezvous.etcd.election`). These processes override the methods in the first section. A coordinator may die at any moment:
`remember` stores the state for its successor before any member is notified.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from outlast.job import contract
from outlast.job.contract import End
from outlast.job.failure import Failure
from outlast.job.status import State
from outlast.rendezvous import attempts, messages, partition, restart_budget, root_cause, world
from outlast.rendezvous.root_cause import Pending
from outlast.rendezvous.world import Call, Cause, MemberState, World

if TYPE_CHECKING:
    from outlast.job import spec


_FACTS = {"generation", "worker", "rank", "code", "reason", "cause", "step", "counted", "attempt"}
"""Fields of a failure in the ledger."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run's coordinator."""

    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    policy: restart_budget.Policy
    timeouts: world.Timeouts

    @classmethod
    def of(cls, fields: spec.Spec) -> Self:
        """Return the settings from a job's spec."""
        timeouts = dataclasses.replace(world.Timeouts(), leave=fields.interruption.grace.total_seconds())
        return cls(fields.workers.allowed(), restart_budget.Policy(fields.restarts.limit, fields.restarts.window), timeouts)


@dataclasses.dataclass(frozen=True)
class CoordinatorState:
    """The part of a coordinator's state that its successor cannot learn from the members. Times are ages in seconds, since clocks
    differ. The fields' names are those in `launcher.json` and, but for a few (`etcd.key_schema`), in etcd."""

    world: World | None = None
    called: Call | None = None
    closed: messages.Closed | None = None
    min_generation: int = 0
    """Lower bound of generations: calls use newer ones."""
    counted: int = 0
    """The newest generation with a counted failure."""
    attempt: int = 0
    """Attempt of that failure in generation `counted`, see `failure.Failure.attempt`."""
    restarts: int = 0
    """Number of failures counted since the start of the run."""
    failures: tuple[tuple[float, int, int | None], ...] = ()
    """`restart_budget.Record`s, each with its age instead of its time."""
    failure: Mapping[str, Any] | None = None
    """The last counted failure, a `failure.Failure`."""
    lost: tuple[tuple[int, float, int], ...] = ()
    """`partition.Loss`es that keep members out of worlds, each as id, age, and number of consecutive losses."""

    @property
    def generation(self) -> int:
        """The newest generation that may have existed."""
        called = self.called.generation - 1 if self.called else 0
        return max(self.min_generation, called, self.world.generation if self.world else 0)


class Coordinator:
    """The coordinator of one run. The transport calls `on_report` and `on_gone`; `decide` acts on the new state."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.sizes, self.policy, self.timeouts = settings.sizes, settings.policy, settings.timeouts
        self.clock = clock
        self.history: restart_budget.History = ()
        self.restarts = 0
        self.failure: Mapping[str, Any] | None = None
        self.reports: dict[int, messages.Report] = {}
        self.state = world.State({})
        """The input of `world.decide`."""
        self.pending: list[Pending] = []
        """Failures of the current generation that are not judged yet."""
        self.pending_since = 0.0
        """Time at which the first pending failure arrived, on our clock; `Failure.time` is on the sender's clock."""
        self.counted = 0, 0
        """The newest start of processes (generation, attempt) with a counted failure; its further failures are ignored."""
        self.followed = 0
        """The newest generation that a member reported, or that we or our predecessor published."""
        self.committed = 0
        """The newest committed step in any reported failure."""
        self.debounce = root_cause.COORDINATOR
        self.gives_up = True
        """True if workers of a failed job exit with GIVEN_UP, so that the controller of their pods stops, too."""
        self.closed: messages.Closed | None = None
        """The final result, sent to every member that reports."""
        self.fenced: dict[int, tuple[int, messages.Closed]] = {}
        """Connected members that count as lost, each with the generation of the loss and the message for the member."""

    # Overridden by implementations

    def send(self, id: int, kind: str, content: object) -> None:
        """Send a message to a member, see `sockets.Server.send`. No override is needed where members read the published state."""

    def wake(self) -> None:
        """Schedule a decision, since the state has changed."""

    def remember(self) -> None:
        """Persist the values that a successor cannot learn from the members."""

    def say(self, state: State, reason: str) -> None:
        """Print or publish the state of the run for people."""
        raise NotImplementedError

    def event(self, kind: str, **facts: Any) -> None:
        """Write an event to the ledger."""
        raise NotImplementedError

    def progress(self, failure: Failure, *, echo: bool) -> tuple[Failure, int | None, int]:
        """Return the failure with the step that the run had reached, the step that raised it (None if unknown), and the newest
        committed step."""
        report = self.reports.get(failure.worker)
        self.committed = max(self.committed, root_cause.committed(report.failure) or 0 if report else 0)
        return failure, None if echo else failure.step, self.committed

    def fence(self, id: int, reason: str) -> None:
        """Exclude an unresponsive member from the run, and make its process exit and restart."""
        generation = self.state.world.generation if self.state.world else 0
        self.fenced[id] = generation, messages.Closed(reason, contract.Exit.INTERRUPTED)
        self.reports.pop(id, None)
        self.state = self.state.gone(id)
        self.send(id, "closed", self.fenced[id][1])

    def formed(self, new: world.World) -> None:
        """Hook for a published world, before its members are notified."""

    def failed(self, failure: Failure) -> None:
        """Hook for a judged failure."""

    def over(self, state: State, reason: str, code: int, end: End = End.UNKNOWN) -> None:
        """End the run; workers exit with this code."""
        if self.closed is not None or state is State.SUSPENDED:
            return  # suspending a job removes its workers
        if state is State.FAILED and code != contract.Exit.MISCONFIGURED and self.gives_up:
            code = contract.Exit.GIVEN_UP
        self.closed = messages.Closed(reason, code, end)
        self.event("finished", state=str(state), reason=reason, code=code)
        self.say(state, reason)
        self.finished(state, self.closed)
        for id in list(self.reports):
            self.send(id, "closed", self.closed)

    def finished(self, state: State, closed: messages.Closed) -> None:
        """Hook for the end of the run, to record it."""

    # The state for a successor

    def written(self) -> CoordinatorState:
        """Return the state for a successor."""
        state, now = self.state, self.clock()
        failures = tuple((now - at, committed, step) for at, committed, step in self.history)
        lost = tuple((id, now - loss.at, loss.times) for id, loss in state.lost.items() if loss.held)
        rest = *self.counted, self.restarts, failures, self.failure, lost
        return CoordinatorState(state.world, state.called, self.closed, state.min_generation, *rest)

    def restore(self, last: CoordinatorState, ago_s: float = 0.0) -> None:
        """Continue from a predecessor's state, written `ago_s` seconds ago. Its end is left to the caller."""
        now = self.clock()
        then = now - ago_s
        self.counted, self.restarts, self.failure = (last.counted, last.attempt), last.restarts, last.failure
        self.history = tuple(restart_budget.Record(then - age, committed, step) for age, committed, step in last.failures)
        current = last.world and dataclasses.replace(last.world, at=now)
        called = last.called and dataclasses.replace(last.called, at=now)
        lost = {id: partition.Loss(then - age, times) for id, age, times in last.lost}
        self.state = world.State({}, current, called, min_generation=last.min_generation, lost=lost)
        self.followed = self.generation()

    # Reports

    def on_report(self, report: messages.Report) -> None:
        """Process a member's report."""
        last = self.reports.get(report.id)
        self.reports[report.id] = report
        if last is not None and dataclasses.replace(last, since=report.since) == report:
            return  # a heartbeat
        if report.id in self.fenced:
            generation, closed = self.fenced[report.id]
            if report.generation == generation:
                return self.send(report.id, "closed", closed)
            del self.fenced[report.id]  # the worker was restarted
        failed: Pending | None = None
        if report.failed and report.failure:
            failed = root_cause.reported(report.failure, report.id, (report.generation, report.attempt), self.clock())
        self._count_repaired(report)
        why = failed.failure.reason if failed and not failed.echo else ""
        self.state = self.state.reported(report.member(report.id, since=self.clock(), received=self.clock(), why=why))
        now = self.state.world
        of_now = now and (report.generation == now.generation or report.again)  # the world may have moved on without this worker
        is_new = failed and of_now and self.counted < failed.failure.start
        if failed and failed.echo and failed.failure.left and not self.pending:
            failed = None  # it stopped because of a call, whose cause was another one
        if failed and is_new and not root_cause.is_part_of_call(failed.echo, self.state.called, self.counted, report.generation):
            self.add_failure(failed.failure, echo=failed.echo)
        # The member may have missed messages that were sent before it connected.
        if self.state.called is not None:
            self.send(report.id, "called", self._call(self.state.called))
        elif now is not None and report.id in now.members and report.generation < now.generation:
            self.send(report.id, "world", now)
        if self.closed is not None:
            self.send(report.id, "closed", self.closed)
        self.wake()

    def on_gone(self, id: int) -> None:
        """Process the loss of a member's connection."""
        self.reports.pop(id, None)
        self.state = self.state.gone(id)
        self.wake()

    def add_failure(self, failure: Failure, *, echo: bool) -> None:
        """Add a failure of the current generation, to be judged once the other members have had time to report."""
        if not self.pending:
            self.pending_since = self.clock()
        self.pending.append(Pending(echo, failure))
        self.wake()

    # Decisions

    def decide(self, replicas: int, expected: Iterable[int] | None) -> world.Decision | None:
        """Take the next decision and act on it; returns None if it is too early. `expected` as in `world.Desired`."""
        now = self.clock()
        if root_cause.held_until(self.pending, self.pending_since, now, self.debounce) and not world.lost(self.state, now).out:
            return None
        desired = world.Desired(replicas, self.sizes, None if expected is None else frozenset(expected))
        decision = world.decide(self.state, desired, self.timeouts, now)
        match decision:
            case world.Call():
                self._publish_call(decision)
            case world.World():
                self._publish_world(decision)
            case world.Closed(reason, True):
                self.over(State.SUCCEEDED, reason, contract.Exit.DONE, End.SUCCEEDED)
            case world.Closed(reason):
                self.over(State.SUSPENDED, reason, contract.Exit.INTERRUPTED)
        return decision

    def generation(self) -> int:
        """Return the newest published generation."""
        called = self.state.called.generation - 1 if self.state.called else 0
        return max(called, self.state.world.generation if self.state.world else 0)

    def _call(self, call: world.Call) -> messages.Called:
        until = call.at + self.timeouts.leave
        return messages.Called(call.generation, call.reason, call.planned, until, leave_s=until - self.clock())

    def _publish_call(self, call: world.Call) -> None:
        verdict, generation = world.lost(self.state, self.clock()), self.generation()
        new = [id for id in call.lost if self.state.called is None or id not in self.state.called.lost]
        self.state = self.state.after(call)
        if verdict.out and call.cause is Cause.LOST:
            self.event("unheard", generation=generation, workers=list(verdict.out), by=list(verdict.by), reason=call.reason)
        self.event("called", generation=call.generation, reason=call.reason, planned=call.planned)
        self.say(State.RESIZING if call.planned else State.RESTARTING, call.reason)
        for id in new:
            self.fence(id, call.reason)
        for id in self.reports:
            self.send(id, "called", self._call(call))

    def _publish_world(self, new: world.World) -> None:
        if not self.judge():
            return
        self.state, self.followed = self.state.after(new), new.generation
        self.remember()  # the generation must grow even if we die now
        self.event("world", generation=new.generation, workers=list(new.members), reason=new.reason)
        self.say(State.RUNNING, new.reason)
        self.formed(new)
        for id in new.members:
            self.send(id, "world", new)

    # Failures

    def judge_when_settled(self) -> None:
        """Judge pending failures after the debounce time, even if no new world can form yet."""
        now, world_now = self.clock(), self.state.world
        trains = world_now is not None and any(
            m.standing in (MemberState.TRAINING, MemberState.DONE) and m.generation == world_now.generation
            for id, m in self.state.members.items()
            if id in world_now.members
        )
        if root_cause.settled_at(self.pending, self.pending_since, now, self.debounce, unanswered=trains) is None:
            self.judge()

    def judge(self) -> bool:
        """Judge the pending failures; returns False if that ends the run."""
        if not self.pending:
            return True
        pending, self.pending = self.pending, []
        echo, first = root_cause.cause(pending)
        self.counted = max(self.counted, first.start)
        members = self.state.world.members if self.state.world else ()
        failure, raised, committed = self.progress(first, echo=echo)
        budget = root_cause.Budget(self.history, self.policy, committed)
        fits = world.fits(self.state.world, self.sizes, self.state.members.values())
        judged = root_cause.judge(failure, raised, budget, self.clock(), pending=pending, members=members, fits=fits)
        if self._counted(*judged):
            trains = self.state.world is not None and self.state.called is None
            self.say(State.RUNNING if trains else State.RESTARTING, judged[1].reason)
            return True
        return False

    def _count_repaired(self, report: messages.Report) -> None:
        """Count failures that the members have repaired, and end the run once its budget is used up."""
        if report.generation > self.followed:  # of another coordinator, which has counted earlier failures
            self.followed = report.generation
            self.counted = max(self.counted, attempts.previous_start(report.generation, report.attempt))
        for past, ago_s in attempts.uncounted([report.past], self.counted, report.generation):
            if self.closed is not None:
                return
            echo, failure = root_cause.reported(past.failure, past.worker, past.start, self.clock())
            self.counted = failure.start
            self.pending = [each for each in self.pending if each.failure.start != failure.start]  # also reported as a failure
            self.committed = max(self.committed, root_cause.committed(past.failure) or 0)
            budget = root_cause.Budget(self.history, self.policy, self.committed)
            judged = root_cause.judge(failure, None if echo else failure.step, budget, self.clock() - ago_s)
            if self._counted(*judged, repaired=past.attempt):
                trains = self.state.called is None
                self.say(State.RUNNING if trains else State.RESTARTING, f"{past.sentence}: {judged[1].reason}")

    def _counted(self, failure: Failure, verdict: restart_budget.Restart | restart_budget.Stop, **facts: Any) -> bool:
        """Apply a verdict; returns False if it ends the run."""
        self.failure = failure.document(but=("traceback",))
        self.failed(failure)
        texts = {name: text for name in ("traceback", "log_tail") if (text := getattr(failure, name))}
        self.event("failure", **{name: getattr(failure, name) for name in _FACTS}, **texts, **facts)
        if isinstance(verdict, restart_budget.Stop):
            self.over(State.FAILED, verdict.reason, verdict.code, verdict.kind)
            return False
        self.history = verdict.history
        self.restarts += verdict.counted
        self.remember()
        return True


def after(generation: int, now: float) -> world.State:
    """Return the initial state of a run that continues after `generation`; a new run in a store continues after generation 1.
    `now` is on the coordinator's clock."""
    cause, reason = (Cause.RESUME, "the run goes on") if generation > 1 else (Cause.START, "training starts")
    called = world.Call(generation + 1, reason, False, now, cause=cause)
    return world.State({}, called=called) if generation else world.State({})
