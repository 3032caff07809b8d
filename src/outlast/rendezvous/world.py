"""The one place where it is decided which workers train together: a pure function of what members report.

The coordinator keeps a `State`, updates it with every report, and asks `decide` after every event
and at `look_again`. The answer: call the workers together, publish a world, wait, or close.

    state = state.heard(Member(...))                      # a worker reported
    state = state.gone(3)                                 # its connection closed, or it was silent for too long
    decision = decide(state, wanted, timeouts, now)       # ask again until it says Wait or Closed
    state = state.after(decision)                         # store it before publishing it

What workers do: after `Call(g + 1)` those that train in `g` come to WAITING, when planned after they have saved; an unplanned
call also brings back those that are DONE. After `World(g + 1)` its members take it up: TRAINING, generation g + 1. A worker that
hears of a newer world without it comes to WAITING. A LEAVING worker saves with the others and goes.

What stays true: generations only grow and each has one world; a world has an allowed size and only workers that wait; those who
hold the newest state come first, in their old order, so rank 0 always does. Every wait ends with an event or at `look_again`.
Times are seconds on one clock, a monotonic one if there is a choice; what happens when it jumps is said in `until`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


class MemberState(enum.StrEnum):
    """What a member does, as it reports itself."""

    WAITING = "waiting"
    """Ready for a world; trains in none."""
    TRAINING = "training"
    LEAVING = "leaving"
    """Asked to leave (SIGTERM, drain): saves with the others, then leaves."""
    DONE = "done"
    """Its training processes have ended with success."""


@dataclass(frozen=True)
class Member:
    """A worker, by its newest report."""

    id: int
    """Index of the worker; not its rank."""
    address: str
    """`host:port` where the others would meet if it became rank 0."""
    standing: MemberState
    generation: int = 0
    """The world it trains in, or trained in last; 0 for none."""
    since: float = 0.0
    """When it took this standing; repeating a report does not change it."""
    failed: bool = False
    """Its training processes of `generation` failed, or it was found hung."""
    why: str = ""
    """What failed, in a sentence; empty when that is not known or only echoes another's failure."""
    unheard: tuple[int, ...] = ()
    """Members of the world of `generation` that it watches and does not hear any more."""
    refused: tuple[int, ...] = ()
    """Those of them whose process is gone: their machine refuses the connection."""
    noticed: float = 0.0
    """When `unheard` grew last; repeating it does not change this."""


class Cause(enum.StrEnum):
    """Why workers are called together, for programs; people read the sentence beside it."""

    UNKNOWN = ""
    """Not told, or told by a version that knows other causes."""
    START = "start"
    RESUME = "resume"
    """The run goes on after a pause in which no worker trained."""
    LOST = "lost"
    """Workers are gone."""
    FAILED = "failed"
    LEFT = "left"
    """Workers came out of the world without a word."""
    LATE = "late"
    """Workers did not take up the world, or did not save, in time."""
    PARTLY_DONE = "partly-done"
    """Some have finished and the others will not."""
    FOREIGN = "foreign"
    """There is a world that another coordinator decided."""
    LEAVING = "leaving"
    SHRINK = "shrink"
    GROW = "grow"
    SUSPEND = "suspend"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Call:
    """Request for a re-rendezvous: the workers are to come together for `generation`.

    Another call of the same generation replaces this one: it was planned and no longer is, or more workers leave.
    """

    generation: int
    reason: str
    planned: bool
    """Training saves first; otherwise it is dropped at once."""
    at: float = 0.0
    leaving: tuple[int, ...] = ()
    """Workers that go: once they have saved, their absence is no failure."""
    cause: Cause = Cause.UNKNOWN


@dataclass(frozen=True)
class World:
    """The workers that train together."""

    generation: int
    members: tuple[int, ...]
    """Worker ids in rank order."""
    address: str
    """Where they meet: the address of rank 0."""
    reason: str
    at: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Nothing to do before the next event, or before `look_again`."""

    reason: str
    look_again: float | None = None
    steady: str = field(default="", compare=False)
    """`reason` without the seconds that are left: the same each time while nothing changes."""

    def __post_init__(self) -> None:
        if not self.steady:
            object.__setattr__(self, "steady", self.reason)


@dataclass(frozen=True)
class Closed:
    """There is no further world: the training is done, or it is suspended."""

    reason: str
    done: bool


Decision = Call | World | Wait | Closed


@dataclass(frozen=True)
class Wanted:
    """The size that the user asks for."""

    replicas: int
    """Workers; 0 suspends the job. The target is the largest allowed size up to this, and at least the smallest."""
    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    expected: frozenset[int] | None = None
    """Workers that are to be members, whether connected or still being started; we wait for absent ones until a timeout.
    None: unknown, so any worker may join until the target is reached."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for workers, in seconds."""

    start: float = 30.0
    """For workers that are not there yet, from when the smallest allowed world could be formed; while no worker holds a state."""
    recovery: float = 1.0
    """The same while survivors stand idle."""
    growth: float = 5.0
    """From a world's beginning until it may be called together to grow; also from the first newcomer, for the others to come."""
    leave: float = 75.0
    """For training to save after a planned call."""
    answer: float = 10.0
    """For a connected worker to take up a world or to put down its processes; for all to report to a restarted coordinator."""


@dataclass(frozen=True)
class State:
    """What the coordinator knows."""

    members: Mapping[int, Member]
    """Workers that are connected, and those of the world that were DONE when they went."""
    world: World | None = None
    """The last published one, whether it still trains or not."""
    called: Call | None = None
    """The last call; it is pending while its generation is newer than the world's."""
    since: float = -math.inf
    """When this coordinator took over a world that is not its own: the members get `Timeouts.answer` from then to report."""
    floor: int = 0
    """Lower bound: no generation up to this one is used, since it may have existed unseen."""

    def heard(self, member: Member) -> State:
        """A worker reported. Repeating a report changes nothing; what it says of its peers is no new standing."""
        before = self.members.get(member.id)
        if before is not None:
            if before.generation == member.generation and set(member.unheard) <= set(before.unheard):
                member = replace(member, noticed=before.noticed)
            peers = replace(before, unheard=member.unheard, refused=member.refused, noticed=member.noticed, since=member.since)
            if peers == member:
                member = replace(member, since=before.since)
            if member == before:
                return self
        return replace(self, members={**self.members, member.id: member})

    def gone(self, id: int) -> State:
        """A worker went. Who was DONE in this world may go: that it succeeded stays known."""
        member = self.members.get(id)
        if member is None:
            return self
        if (
            member.standing is MemberState.DONE
            and self.world
            and id in self.world.members
            and member.generation >= self.world.generation
        ):
            return self
        return replace(self, members={other: m for other, m in self.members.items() if other != id})

    def after(self, decision: Decision) -> State:
        """The state once a decision is taken."""
        if isinstance(decision, Call):
            return replace(self, called=decision)
        if isinstance(decision, World):
            # What was DONE in older worlds was not enough, and those that said so may be gone.
            members = {id: m for id, m in self.members.items() if m.standing is not MemberState.DONE}
            return replace(self, members=members, world=decision, called=None)
        return self


def largest(sizes: Iterable[int], available: int) -> int:
    """The largest allowed size up to `available`; 0 when none fits."""
    return max((size for size in sizes if size <= available), default=0)


def decide(state: State, wanted: Wanted, timeouts: Timeouts, now: float) -> Decision:
    """What to do next, and why in one sentence: the first rule of the table with something to say."""
    situation = _Situation(state, wanted, timeouts, now)
    return next(decision for rule in RULES if (decision := rule(situation)) is not None)


class _Situation:
    """One look at the state: what the rules ask about."""

    def __init__(self, state: State, wanted: Wanted, timeouts: Timeouts, now: float) -> None:
        self.members, self.world, self.wanted, self.timeouts, self.now = state.members, state.world, wanted, timeouts, now
        self.generation, self.ranks = (state.world.generation, state.world.members) if state.world else (0, ())
        self.ranked = frozenset(self.ranks)
        self.called = state.called if state.called and state.called.generation > self.generation else None
        """The pending call."""
        self.running = self.world is not None and self.called is None
        self.newest = max((m.generation for m in self.members.values()), default=0)
        """The newest generation that any worker has seen."""
        self.next = max(self.generation, self.newest, state.floor) + 1
        """The first that cannot have existed."""
        self.target = largest(wanted.sizes, wanted.replicas) or wanted.sizes[0]
        self.inside = [
            self.members[id] for id in self.ranks if id in self.members and self.members[id].generation >= self.generation
        ]
        """Members of the world that have taken it up, in rank order."""
        self.late = [id for id in self.ranks if id in self.members and self.members[id].generation < self.generation]
        """Members of the world that have not, or no longer: they were started again."""
        self.late_until = (
            self.until(max(state.since, *(e.at for e in (self.world, self.called) if e)), timeouts.answer) if self.late else None
        )
        absent = [id for id in self.ranks if id not in self.members]
        self.unheard_until = self.until(state.since, timeouts.answer)
        self.unheard, self.lost = ([], absent) if self.unheard_until is None else (absent, [])
        self.training = [
            m for m in self.members.values() if m.standing is MemberState.TRAINING and (m.id in self.ranked or self.world is None)
        ]
        """Those whose unsaved steps a planned call protects."""

    def until(self, at: float, timeout: float) -> float | None:
        return until(at, timeout, self.now)

    def look_again(self, *ends: float | None) -> float | None:
        """The first of these times, and of those at which members of the world will be late or lost."""
        return min((end for end in (*ends, self.late_until, self.unheard_until) if end not in (None, math.inf)), default=None)

    def those(self, standing: MemberState) -> list[int]:
        """Members of the world with this standing, in rank order."""
        return [m.id for m in self.inside if m.standing is standing]

    def call(self, cause: Cause, reason: str, *, planned: bool, leaving: Iterable[int] = ()) -> Call:
        return Call(self.next, reason, planned, self.now, tuple(leaving), cause)

    def drop(self, cause: Cause, reason: str) -> Call | None:
        """An unplanned call, unless there is nothing more to drop."""
        if self.called is None:
            return self.call(cause, reason, planned=False)
        if self.called.planned and self.training:
            return replace(self.called, cause=cause, reason=reason, planned=False, at=self.now)
        return None

    def wait(self, what: str, end: float | None, *, then: str = "", look_again: float | None = None) -> Wait:
        """Wait until `end`, and say how long that is; look again at `look_again`, else then."""
        left = f" ({math.ceil(end - self.now)} s left)" if end not in (None, math.inf) else ""
        return Wait(f"{what}{left}{then}", look_again or end, f"{what}{then}")


# The world has come to its end, or cannot go on


def everybody_is_done(s: _Situation) -> Decision | None:
    if not s.ranks or s.those(MemberState.DONE) != list(s.ranks):
        return None
    return Closed(f"{_workers(s.ranks)} {_are(s.ranks)} done", done=True)


def generation_from_elsewhere(s: _Situation) -> Decision | None:
    """Another coordinator was here, or this one has lost its state: go beyond its generations."""
    if s.called is not None:
        beyond = [m for m in s.members.values() if m.generation >= s.called.generation]
    else:
        busy = (MemberState.TRAINING, MemberState.DONE)
        beyond = [m for m in s.members.values() if m.generation > s.generation and m.standing in busy]
    if not beyond:
        return None
    planned = (s.called is None or s.called.planned) and bool(s.training) and not any(m.failed for m in beyond)
    reason = f"generation {s.newest} of {_workers(m.id for m in beyond)} was not decided here"
    return s.call(Cause.FOREIGN, reason, planned=planned, leaving=s.called.leaving if s.called else ())


def lost_workers(s: _Situation) -> Decision | None:
    leaving = frozenset(s.called.leaving if s.called is not None else ())
    lost = [id for id in s.lost if id not in leaving]
    return s.drop(Cause.LOST, f"lost {_workers(lost)}") if lost else None


def failed_workers(s: _Situation) -> Decision | None:
    failed = [m for m in s.inside if m.failed and m.standing is not MemberState.DONE]
    if not failed:
        return None
    why = next((m.why for m in failed if m.why), "") or f"{_workers(m.id for m in failed)} failed"
    return s.drop(Cause.FAILED, why)


def workers_left_untold(s: _Situation) -> Decision | None:
    left = s.those(MemberState.WAITING)
    if not s.running or not left or s.those(MemberState.LEAVING):  # with one that leaves, the others save and stop as well
        return None
    return s.drop(Cause.LEFT, f"{_workers(left)} left generation {s.generation} untold")


def world_not_taken_up(s: _Situation) -> Decision | None:
    """A worker was started again unseen, or never heard of its world; the others make no step without it."""
    if not s.late or s.late_until is not None:
        return None
    return s.drop(Cause.LATE, f"{_workers(s.late)} did not take up generation {s.generation} within {s.timeouts.answer:g} s")


# A call is pending


def grace_ran_out(s: _Situation) -> Decision | None:
    if s.called is None or not s.training or s.until(s.called.at, s.timeouts.leave) is not None:
        return None
    return s.drop(Cause.LATE, f"{_workers(m.id for m in s.training)} did not save within {s.timeouts.leave:g} s")


def done_without_the_others(s: _Situation) -> Decision | None:
    """Some had finished when the call came and the others will not: all train the last steps again."""
    done = [m.id for m in s.members.values() if m.standing is MemberState.DONE and m.generation >= s.generation]
    if s.called is None or not s.called.planned or s.training or not done:
        return None
    reason = f"only {_workers(done)} {_are(done)} done"
    return replace(s.called, cause=Cause.PARTLY_DONE, reason=reason, planned=False, at=s.now)


def more_workers_leave(s: _Situation) -> Decision | None:
    if s.called is None or not s.called.planned or not s.training:
        return None
    leaving = tuple(sorted({*s.called.leaving, *s.those(MemberState.LEAVING)}))
    if len(leaving) == len(s.called.leaving):
        return None
    return replace(s.called, cause=Cause.LEAVING, reason=f"{_workers(leaving)} {_are(leaving)} leaving", leaving=leaving)


# A world runs; it is not disturbed while it begins or ends


def world_begins(s: _Situation) -> Decision | None:
    if s.running and s.unheard:
        return s.wait(f"waiting for {_workers(s.unheard)} to report", s.unheard_until)
    if s.running and s.late:
        return s.wait(f"waiting for {_workers(s.late)} to take up generation {s.generation}", s.late_until)
    return None


def world_ends(s: _Situation) -> Decision | None:
    done = s.those(MemberState.DONE)
    if not s.running or not done:
        return None
    ended = frozenset(done)
    others = [id for id in s.ranks if id not in ended]
    return Wait(f"{_workers(done)} {_are(done)} done; waiting for {_workers(others)} to finish")


def suspended(s: _Situation) -> Decision | None:
    if s.wanted.replicas > 0:
        return None
    busy = [m.id for m in s.training] + s.those(MemberState.LEAVING)
    if s.running and busy:
        return s.call(Cause.SUSPEND, "suspended: no workers are wanted", planned=True, leaving=s.ranks)
    if s.called is not None and busy:
        end = s.until(s.called.at, s.timeouts.leave if s.called.planned else s.timeouts.answer)
        if end is not None:
            what, then = f"waiting for {_workers(busy)} to {_verb(s)}", ", then the job is suspended"
            return s.wait(what, end, then=then, look_again=s.look_again(end))
    return Closed("suspended: no workers are wanted", done=False)


def forming(s: _Situation) -> Decision | None:
    """Publish the largest world that can still form as soon as all its members wait; each timeout that ends makes it smaller."""
    if s.running:
        return None
    here = [m for m in s.members.values() if m.standing is MemberState.WAITING]
    coming, coming_until = _coming(s)
    absent_until = _absent_until(s, here)
    connected = _in_order(s, [*here, *coming])
    absent: list[int] = []
    if s.wanted.expected is not None and absent_until is not None:
        leaving = {m.id for m in s.members.values() if m.standing is MemberState.LEAVING}
        absent = sorted(s.wanted.expected - leaving - {m.id for m in connected})
    anybody = s.wanted.expected is None and absent_until is not None
    size = s.target if anybody else largest(s.wanted.sizes, min(s.target, len(connected) + len(absent)))
    if not size:
        return Wait(f"{_here(s, here)}, and nobody else is on the way", s.look_again(coming_until if coming else None))
    chosen = connected[:size]
    unready = [m.id for m in chosen if m.standing is not MemberState.WAITING]
    lacking = size - len(chosen)
    if not unready and not lacking:
        return _world(s, chosen)

    look_again = s.look_again(coming_until if unready else None, absent_until if lacking else None)
    if unready:
        return s.wait(f"waiting for {_workers(unready)} to {_verb(s)}", coming_until, look_again=look_again)
    whom = _workers(absent[:lacking]) if absent else _count(lacking, "more worker")
    if absent_until == math.inf:
        return Wait(f"waiting for {whom}: {_here(s, here)}", look_again)
    fewer = largest(s.wanted.sizes, min(s.target, len(here)))
    then = f", then training {_goes_on(s)} with {fewer} of {s.target}"
    return s.wait(f"waiting for {whom}", absent_until, then=then, look_again=look_again)


# A world trains


def workers_leave(s: _Situation) -> Decision | None:
    leaving = s.those(MemberState.LEAVING)
    if not leaving:
        return None
    return s.call(Cause.LEAVING, f"{_workers(leaving)} {_are(leaving)} leaving", planned=True, leaving=leaving)


def too_many_workers(s: _Situation) -> Decision | None:
    surplus = s.ranks[s.target :]
    if not surplus:
        return None
    return s.call(Cause.SHRINK, f"shrinking from {len(s.ranks)} to {s.target}", planned=True, leaving=surplus)


def newcomers(s: _Situation) -> Decision | None:
    """Growing costs a save and a restart: it is done once for all who come, and not soon after the last change."""
    waiting = sorted(m.id for m in s.members.values() if m.standing is MemberState.WAITING and m.id not in s.ranked)
    available = len(s.ranks) + len(waiting)
    size = largest(s.wanted.sizes, min(s.target, available))
    if s.world is None or size <= len(s.ranks):
        return None
    hoped = s.target
    if s.wanted.expected is not None:
        hoped = largest(s.wanted.sizes, min(s.target, available + len(s.wanted.expected - s.members.keys())))
    ends = [s.until(s.world.at, s.timeouts.growth)]
    if hoped > size:
        ends.append(s.until(min(s.members[id].since for id in waiting), s.timeouts.growth))
    end = max((end for end in ends if end is not None), default=None)
    who = _workers(waiting[: size - len(s.ranks)])
    if end is None:
        return s.call(Cause.GROW, f"growing from {len(s.ranks)} to {size} with {who}", planned=True)
    return s.wait(f"{_trains(s)}; {who} may join soon", end)


def all_is_well(s: _Situation) -> Decision | None:
    return Wait(_trains(s))


RULES: tuple[Callable[[_Situation], Decision | None], ...] = (
    everybody_is_done,
    generation_from_elsewhere,
    lost_workers,
    failed_workers,
    workers_left_untold,
    world_not_taken_up,
    grace_ran_out,
    done_without_the_others,
    more_workers_leave,
    world_begins,
    world_ends,
    suspended,
    forming,
    workers_leave,
    too_many_workers,
    newcomers,
    all_is_well,
)
"""In this order; the first with something to say wins. Those after `forming` are asked only while a world trains."""


# How a world is formed


def _coming(s: _Situation) -> tuple[Sequence[Member], float | None]:
    """Connected workers that have yet to put down what they do, and until when they are awaited."""
    if s.called is None:
        return (), None
    if s.called.planned and s.training:
        return s.training, s.until(s.called.at, s.timeouts.leave)
    end = s.until(s.called.at, s.timeouts.answer)
    busy = [m for m in s.members.values() if m.standing in (MemberState.TRAINING, MemberState.DONE)]
    return (busy, end) if end is not None else ((), None)


def _absent_until(s: _Situation, here: Sequence[Member]) -> float | None:
    """Until when workers that are not connected are awaited: without end while the smallest allowed world cannot be formed."""
    least = s.wanted.sizes[0]
    if len(here) < least:
        return math.inf
    at = sorted(m.since for m in here)[least - 1]
    if s.called is None:
        return s.until(at, s.timeouts.start)
    survivors = any(m.generation >= max(s.generation, 1) for m in here)
    return s.until(max(at, s.called.at), s.timeouts.recovery if survivors else s.timeouts.start)


def _in_order(s: _Situation, members: Sequence[Member]) -> list[Member]:
    """Those that hold the newest state, by their rank in the last world; then the others by id, first those that wait."""
    rank = {id: rank for rank, id in enumerate(s.ranks)}
    newest = max((m.generation for m in members), default=0)

    def place(m: Member) -> tuple[int, int, int]:
        if m.generation == newest:
            return 0, rank.get(m.id, len(rank)), m.id
        return 1, m.standing is not MemberState.WAITING, m.id

    return sorted(members, key=place)


def _world(s: _Situation, chosen: Sequence[Member]) -> World:
    size = f"{len(chosen)} of {s.target}" if len(chosen) < s.target else f"all {s.target}" if s.target > 1 else "1 worker"
    why = f"{s.called.reason}; " if s.called and s.called.cause is not Cause.RESUME else ""
    generation = s.called.generation if s.called else s.next
    reason = f"{why}training {_goes_on(s)} with {size}"
    return World(generation, tuple(m.id for m in chosen), chosen[0].address, reason, s.now)


def until(at: float, timeout: float, now: float) -> float | None:
    """When a timeout that began at `at` ends; None when it is over.

    A beginning in the future means that the clock went back. If by less than the timeout, no time has passed yet. If by more,
    it is unknown how much has, and the timeout is over. So no wait is longer than twice its timeout, however the clock jumps.
    """
    end = at + timeout
    return None if now >= end or at > now + timeout else end


# Words


def _workers(ids: Iterable[int]) -> str:
    names = [str(id) for id in ids]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"{len(names)} workers" if len(names) > 8 else f"workers {', '.join(names[:-1])} and {names[-1]}"


def _are(ids: Sequence[int]) -> str:
    return "is" if len(ids) == 1 else "are"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _here(s: _Situation, here: Sequence[Member]) -> str:
    least = s.wanted.sizes[0]
    return f"{len(here)} of at least {_count(least, 'worker')} {'is' if 1 in (len(here), least) else 'are'} here"


def _verb(s: _Situation) -> str:
    return "save" if s.called and s.called.planned else "stop"


def _goes_on(s: _Situation) -> str:
    return "goes on" if s.called else "starts"


def _trains(s: _Situation) -> str:
    return f"{_count(len(s.ranks), 'worker')} train{'s' if len(s.ranks) == 1 else ''} in generation {s.generation}"
