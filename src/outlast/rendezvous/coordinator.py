"""Who decides for one run: hears its members, publishes calls and worlds, judges failures and says when it is over.

The decisions are `world.decide` and `restarts.judge`; this is what every decider does about them, whoever it is: the launcher of
one machine (`local.launcher`), the agent of worker 0 (`rendezvous.worker0`), or a member that was elected
(`rendezvous.etcd.election`).
What differs between those is the abstract methods. May die at any moment: what must survive is kept by `remember`, before anybody
is told.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from outlast import contract
from outlast.rendezvous import restarts, world
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.world import Cause, Standing
from outlast.status import End, Failure, State

if TYPE_CHECKING:
    from outlast import spec

SETTLE_S = 1.0
"""Failures of one generation are collected this long, so that the first of them is judged and not its echoes."""
CAUSE_S = 0.5
"""How long the echoes of a failure wait for its cause."""

_FACTS = ("rank", "code", "reason", "cause", "traceback", "log_tail", "time", "step", "hung", "early")
"""What a `Failure` takes from `sockets.Report.failure`."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a run asks of its decider."""

    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    policy: restarts.Policy
    patience: world.Patience

    @classmethod
    def of(cls, fields: spec.Spec) -> Self:
        """Those of a job file."""
        patience = dataclasses.replace(world.Patience(), leave=fields.interruption.grace.total_seconds())
        return cls(fields.workers.allowed(), restarts.Policy(fields.restarts.limit, fields.restarts.window), patience)


def reported(told: Mapping[str, Any], worker: int, generation: int, now: float) -> tuple[Failure, bool]:
    """What a member says has failed, a `sockets.Report.failure`, and whether it only echoes another failure. What cannot be read
    still counts: the job must neither stop by it nor be tried again without end."""
    failure = {key: told[key] for key in _FACTS if key in told}
    where, echo = {"worker": worker, "generation": generation}, bool(told.get("echo"))
    try:
        if not (
            sockets.is_count(told.get("code"))
            and sockets.is_number(told.get("time", 0.0))
            and sockets.is_count(told.get("step") or 0)
        ):
            raise ValueError("no code, time or step is like this")
        return Failure.model_validate({**failure, **where}), echo
    except ValueError:
        reason = f"worker {worker} failed, and its report of how cannot be read: its agent is of another version"
        return Failure.model_validate({"code": contract.Exit.FAILED.value, "reason": reason, "time": now, **where}), echo


class Decider(abc.ABC):
    """All that is known of one run. `heard` and `gone` take what the transport brings; `decide` follows from it."""

    def __init__(self, terms: Terms, clock: Callable[[], float] = time.time) -> None:
        self.sizes, self.policy, self.patience = terms.sizes, terms.policy, terms.patience
        self.clock = clock
        self.history = restarts.History()
        self.restarts = 0
        """Failures that counted since the start of the run."""
        self.reports: dict[int, sockets.Report] = {}
        self.known = world.State({})
        """What `world.decide` goes by."""
        self.pending: list[tuple[bool, Failure]] = []
        """Failures of the current generation, each with whether it only echoes another."""
        self.pending_since = 0.0
        """When the first of them was heard of, by our clock: theirs are other processes', if not other machines'."""
        self.judged = 0
        """The newest generation whose failure has been judged; what is reported of it later is known."""
        self.unanswered_s = 5.0
        """How long echoes are not judged while a member has not answered that may be their cause."""
        self.farewell: sockets.Closed | None = None
        """What everybody who reports is told once there is no further world."""

    # What this decider is

    @abc.abstractmethod
    def send(self, id: int, kind: str, content: object) -> None:
        """Say something to a member, see `sockets.Server.send`."""

    @abc.abstractmethod
    def poke(self) -> None:
        """Something has happened: decide soon."""

    @abc.abstractmethod
    def remember(self) -> None:
        """Keep safe what a decider that is started again must know."""

    @abc.abstractmethod
    def say(self, state: State, reason: str) -> None:
        """Tell people where the run stands."""

    @abc.abstractmethod
    def note(self, kind: str, **facts: Any) -> None:
        """Write an event to the ledger."""

    @abc.abstractmethod
    def progress(self, failure: Failure, *, echo: bool) -> tuple[Failure, int | None, int]:
        """The failure with the step that the run had reached; the step that raised, None when it is not known; the newest
        committed step."""

    @abc.abstractmethod
    def formed(self, new: world.World) -> None:
        """A world has been published; its members are told after this."""

    @abc.abstractmethod
    def failed(self, failure: Failure) -> None:
        """A failure has been judged."""

    @abc.abstractmethod
    def over(self, state: State, reason: str, code: int, end: End = End.UNKNOWN) -> None:
        """There is no further world, and workers are to end with this code."""

    # What members say

    def heard(self, report: sockets.Report) -> None:
        """A member has reported."""
        before = self.reports.get(report.id)
        self.reports[report.id] = report
        if before is not None and dataclasses.replace(before, since=report.since) == report:
            return  # a heartbeat
        failure, echo = None, False
        if report.failed and report.failure:
            failure, echo = reported(report.failure, report.id, report.generation, self.clock())
        self.known = self.known.heard(
            world.Member(
                report.id,
                report.address,
                Standing(report.standing),
                report.generation,
                self.clock(),
                report.failed,
                failure.reason if failure and not echo else "",
            )
        )
        now = self.known.world
        if failure and now and self.judged < report.generation == now.generation:
            self.add_failure(failure, echo=echo)
        # It may have missed what was said before it connected.
        if self.known.called is not None:
            self.send(report.id, "called", self._call(self.known.called))
        elif now is not None and report.id in now.members and report.generation < now.generation:
            self.send(report.id, "world", now)
        if self.farewell is not None:
            self.send(report.id, "closed", self.farewell)
        self.poke()

    def gone(self, id: int) -> None:
        """A member's connection is closed."""
        self.reports.pop(id, None)
        self.known = self.known.gone(id)
        self.poke()

    def add_failure(self, failure: Failure, *, echo: bool) -> None:
        """Something failed in the current generation; it is judged when the others have had time to say so, too."""
        if not self.pending:
            self.pending_since = self.clock()
        self.pending.append((echo, failure))
        self.poke()

    # Decisions

    def decide(self, replicas: int, expected: Iterable[int] | None) -> world.Decision | None:
        """Take the next decision and act on it; None while it would be too early. `expected` as in `world.Wanted`."""
        now = self.clock()
        if self.pending and all(echo for echo, _ in self.pending) and 0 <= now - self.pending_since < CAUSE_S:
            return None  # whoever died is still ending; a call now would stop it before it could say why
        wanted = world.Wanted(replicas, self.sizes, None if expected is None else frozenset(expected))
        decision = world.decide(self.known, wanted, self.patience, now)
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
        """The newest generation that there has been."""
        called = self.known.called.generation - 1 if self.known.called else 0
        return max(called, self.known.world.generation if self.known.world else 0)

    def _call(self, call: world.Call) -> sockets.Called:
        until = call.at + self.patience.leave
        return sockets.Called(call.generation, call.reason, call.planned, until, leave_s=until - self.clock())

    def _publish_call(self, call: world.Call) -> None:
        self.known = self.known.after(call)
        self.note("called", generation=call.generation, reason=call.reason, planned=call.planned)
        self.say(State.RESIZING if call.planned else State.RESTARTING, call.reason)
        for id in self.reports:
            self.send(id, "called", self._call(call))

    def _publish_world(self, new: world.World) -> None:
        if not self.judge():
            return
        self.known = self.known.after(new)
        self.remember()  # the generation must grow even if we die now
        self.note("world", generation=new.generation, workers=list(new.members), reason=new.reason)
        self.say(State.RUNNING, new.reason)
        self.formed(new)
        for id in new.members:
            self.send(id, "world", new)

    # Failures

    def judge_when_settled(self) -> None:
        """Judge what has failed although no new world can be formed yet."""
        patience = self.unanswered_s if self._may_be_answered() else SETTLE_S
        if self.pending and not 0 <= self.clock() - self.pending_since <= patience:
            self.judge()

    def _may_be_answered(self) -> bool:
        """Whether there are only echoes yet, and members that still say that they train: one of those may be the cause."""
        now = self.known.world
        inside = [member for id, member in self.known.members.items() if now and id in now.members]
        trains = any(m.standing is Standing.TRAINING and m.generation == now.generation for m in inside if now)
        return trains and all(echo for echo, _ in self.pending)

    def judge(self) -> bool:
        """Judge the failures that have come together; False when the run ends by it."""
        if not self.pending:
            return True
        echo, first = min(self.pending, key=cause_first)
        members = self.known.world.members if self.known.world else ()
        everywhere = restarts.raised_everywhere(first, self.pending, members)
        self.pending.clear()
        self.judged = max(self.judged, first.generation)
        failure, raised, committed = self.progress(first, echo=echo)
        judged = failure.model_copy(update={"step": raised})
        verdict = restarts.judge(self.history, judged, committed, self.clock(), self.policy, everywhere=everywhere)
        counted = isinstance(verdict, restarts.Stop) or verdict.counted
        self.failed(failure.model_copy(update={"counted": counted}))
        facts = failure.model_dump(include={"generation", "worker", "rank", "code", "reason", "cause", "step"})
        self.note("failure", **facts, counted=counted)
        if isinstance(verdict, restarts.Stop):
            self.over(State.FAILED, verdict.reason, verdict.code, verdict.kind)
            return False
        self.history = verdict.history
        self.restarts += counted
        self.say(State.RESTARTING, verdict.reason)
        self.remember()
        return True


def cause_first(pending: tuple[bool, Failure]) -> tuple[bool, bool, float]:
    """Orders failures of one generation: deaths before errors, errors before their echoes, the earlier before the later."""
    echo, failure = pending
    return echo, not contract.killed(failure.code), failure.time


def after(generation: int, now: float) -> world.State:
    """The state of a run whose newest generation has been that; the first is what a new run in a store begins behind. `now` is
    the time of the decider's clock."""
    cause, reason = (Cause.RESUME, "the run goes on") if generation > 1 else (Cause.START, "training starts")
    called = world.Call(generation + 1, reason, False, now, cause=cause)
    return world.State({}, called=called) if generation else world.State({})
