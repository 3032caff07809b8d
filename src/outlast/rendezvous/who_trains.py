"""Decides which workers train together, as a pure function of the members' reports.

The coordinator keeps a `State`, updates it with every report, and calls `decide` after every event and at `look_again`.

    state = state.reported(Member(...))                   # a worker reported
    state = state.gone(3)                                 # its connection closed, or it was silent for too long
    decision = decide(state, desired, timeouts, now)      # repeat until the decision is Wait or Closed
    state = state.after(decision)                         # store it before publishing it

A `Call(g + 1)` makes the workers that train in generation `g` WAITING, after a save if the call is planned. An unplanned call
also makes DONE workers WAITING. A `World(g + 1)` makes its members join it and become TRAINING.

Invariants: generations only grow, and each has one world. A world has an allowed size and consists of waiting workers. Holders of
the newest state come first, in their old order, so rank 0 always holds it. No world begins from a state that is older than one
that a leaving worker is about to save. Every wait ends with an event or at `look_again`. Times are seconds on one clock,
preferably a monotonic one; see `base.clock.until` for clock jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from outlast.base.clock import until
from outlast.rendezvous import partition, sentences
from outlast.rendezvous.vocabulary import (
    Call,
    Cause,
    Closed,
    Decision,
    Desired,
    Member,
    MemberState,
    State,
    Timeouts,
    Wait,
    World,
)

__all__ = ["Call", "Cause", "Closed", "Decision", "Desired", "Member", "MemberState", "State", "Timeouts", "Wait", "World"]


def largest(sizes: Iterable[int], available: int) -> int:
    """Return the largest of `sizes` up to `available`; 0 if none fits."""
    return max((size for size in sizes if size <= available), default=0)


def allowed(sizes: Sequence[int], members: Iterable[Member]) -> tuple[int, ...]:
    """Return the `sizes` that divide the newest reported batch; all of them if none does, or if no batch is known."""
    newest = max((member.batch for member in members), default=())
    batch = newest[-1] if newest else 0
    return tuple(size for size in sizes if batch % size == 0) or tuple(sizes)


def fits(world: World | None, sizes: Sequence[int], members: Iterable[Member]) -> bool:
    """Return whether a world's size is still `allowed`, given what its members have reported since it formed."""
    return world is None or len(world.members) in allowed(sizes, members)


def decide(state: State, desired: Desired, timeouts: Timeouts, now: float) -> Decision:
    """Return the decision of the first rule that returns one."""
    situation = _Situation(state, desired, timeouts, now)
    decision = next(decision for rule in RULES if (decision := rule(situation)) is not None)
    again = min((end for end in (situation.verdict.look_again, *situation.held.values()) if end is not None), default=math.inf)
    if isinstance(decision, Wait) and again < (decision.look_again or math.inf):
        return replace(decision, look_again=again)
    return decision


def lost(state: State, now: float) -> partition.Verdict:
    """Return the verdict on the unresponsive members of the running world."""
    if state.world is None:
        return partition.Verdict()
    ranks, generation = state.world.members, state.world.generation
    members = (state.members[id] for id in ranks if id in state.members)
    inside = [m for m in members if m.generation == generation and m.standing is not MemberState.DONE and not m.again]
    if not any(m.unheard for m in inside):
        return partition.Verdict()
    views = {m.id: partition.View(m.unheard, m.refused, m.noticed, m.standing is MemberState.WAITING) for m in inside}
    called = state.called if state.called and state.called.generation > generation and not state.called.planned else None
    return partition.decide(ranks, views, now, called_at=called.at if called else None)


class _Situation:
    def __init__(self, state: State, desired: Desired, timeouts: Timeouts, now: float) -> None:
        self.wanted = largest(desired.sizes, desired.replicas) or desired.sizes[0]
        """The target size before `allowed` excludes sizes that do not divide the batch."""
        desired = replace(desired, sizes=allowed(desired.sizes, state.members.values()))
        self.world, self.desired, self.timeouts, self.now, self.held_step = state.world, desired, timeouts, now, state.held
        self.verdict = lost(state, now)
        cut = {*self.verdict.lost, *self.verdict.gone}
        held = {id: end for id, loss in state.lost.items() if (end := self.until(loss.at, loss.held_s)) is not None}
        here = {id: m for id, m in state.members.items() if id not in cut}
        free = {id: m for id, m in here.items() if id not in held}
        enough = len(free) >= desired.sizes[0]
        self.members, self.held = (free, held) if enough else (here, {})
        """Members that may train, and the time until which each recently lost member is excluded."""
        self.generation, self.ranks = (state.world.generation, state.world.members) if state.world else (0, ())
        self.ranked = frozenset(self.ranks)
        self.called = state.called if state.called and state.called.generation > self.generation else None
        self.running = self.world is not None and self.called is None
        self.newest = max((m.generation for m in state.members.values()), default=0)
        self.next = max(self.generation, self.newest, state.min_generation) + 1
        """The lowest generation that is certainly unused."""
        self.target = largest(desired.sizes, desired.replicas) or desired.sizes[0]
        self.inside = [
            self.members[id] for id in self.ranks if id in self.members and self.members[id].generation >= self.generation
        ]
        self.late = [id for id in self.ranks if id in self.members and self.members[id].generation < self.generation]
        """Members that have not joined the world, or were restarted after they joined it."""
        self.late_until = (
            self.until(max(state.since, *(e.at for e in (self.world, self.called) if e)), timeouts.answer) if self.late else None
        )
        previous = (self.members[id].generation for id in self.late if self.members[id].held)
        self.stepped = min(previous, default=math.inf)
        """The newest generation in which a step may have been taken. No step is possible in a generation that a holder of state
        has not joined."""
        absent = [id for id in self.ranks if id not in state.members or (id in self.late and id in state.departed)]
        self.unheard_until = self.until(state.since, timeouts.answer)
        doubted = {peer for m in self.inside if m.generation == self.generation for peer in m.unheard}
        self.unheard = [id for id in absent if self.unheard_until is not None and id not in doubted]
        absent = [id for id in absent if id not in self.unheard]
        leaving = frozenset(self.called.leaving if self.called is not None else ())
        absent = [id for id in (*absent, *self.verdict.gone) if id not in leaving]
        self.lost = [id for id in self.ranks if id in {*absent, *self.verdict.lost}]
        self.training = [
            m for m in self.members.values() if m.standing is MemberState.TRAINING and (m.id in self.ranked or self.world is None)
        ]
        """Members whose unsaved steps a planned call protects."""

    def until(self, at: float, timeout: float) -> float | None:
        return until(at, timeout, self.now)

    def look_again(self, *ends: float | None) -> float | None:
        """Return the earliest of `ends` and of the deadlines at which members become late or lost."""
        return min((end for end in (*ends, self.late_until, self.unheard_until) if end not in (None, math.inf)), default=None)

    def with_standing(self, standing: MemberState) -> list[int]:
        return [m.id for m in self.inside if m.standing is standing]

    def call(self, cause: Cause, reason: str, *, planned: bool, leaving: Iterable[int] = ()) -> Call:
        return Call(self.next, reason, planned, self.now, tuple(leaving), cause)

    def drop(self, cause: Cause, reason: str) -> Call | None:
        """Return an unplanned call; None if a pending call is already unplanned, or has already stopped all training."""
        if self.called is None:
            return self.call(cause, reason, planned=False)
        if self.called.planned and self.training:
            return replace(self.called, cause=cause, reason=reason, planned=False, at=self.now)
        return None

    def wait(self, what: str, end: float | None, *, then: str = "", look_again: float | None = None) -> Wait:
        """Return a wait until `end`, with the remaining seconds in its reason. `look_again` defaults to `end`."""
        left = f" ({math.ceil(end - self.now)} s left)" if end not in (None, math.inf) else ""
        return Wait(f"{what}{left}{then}", look_again or end, f"{what}{then}")


# The world has ended, or cannot continue


def everybody_is_done(s: _Situation) -> Decision | None:
    if not s.ranks or s.with_standing(MemberState.DONE) != list(s.ranks):
        return None
    return Closed(f"{sentences.workers(s.ranks)} {sentences.are(s.ranks)} done", done=True)


def generation_from_elsewhere(s: _Situation) -> Decision | None:
    """Continue with an unused generation if another coordinator was active, or if this coordinator has lost its state."""
    if s.called is not None:
        beyond = [m for m in s.members.values() if m.generation >= s.called.generation]
    else:
        busy = (MemberState.TRAINING, MemberState.DONE)
        beyond = [m for m in s.members.values() if m.generation > s.generation and m.standing in busy]
    if not beyond:
        return None
    planned = (s.called is None or s.called.planned) and bool(s.training) and not any(m.failed for m in beyond)
    reason = f"generation {s.newest} of {sentences.workers(m.id for m in beyond)} was not decided here"
    return s.call(Cause.FOREIGN, reason, planned=planned, leaving=s.called.leaving if s.called else ())


def lost_workers(s: _Situation) -> Decision | None:
    if not s.lost:
        return None
    cut, called = s.verdict, s.called
    reason = f"lost {sentences.workers(s.lost)}" + sentences.how_lost(s.lost, cut.lost, cut.gone, cut.by)
    if (call := s.drop(Cause.LOST, reason)) is not None:
        return replace(call, lost=(*call.lost, *(id for id in cut.lost if id not in call.lost)))
    if called is None or set(cut.lost) <= set(called.lost):
        return None
    lost = (*called.lost, *(id for id in cut.lost if id not in called.lost))
    return replace(called, cause=Cause.LOST, reason=reason, lost=lost)


def a_majority_is_unheard(s: _Situation) -> Decision | None:
    """Call all members if a minority cannot hear a silent majority, to find out which members answer."""
    if not s.verdict.ask:
        return None
    return s.drop(Cause.LOST, f"{sentences.do_not_hear(s.verdict.by, s.verdict.ask)}: call all, to find out which are alive")


def failed_workers(s: _Situation) -> Decision | None:
    failed = [m for m in s.inside if m.failed and m.standing is not MemberState.DONE]
    if not failed:
        return None
    why = next((m.why for m in failed if m.why), "") or f"{sentences.workers(m.id for m in failed)} failed"
    return s.drop(Cause.FAILED, why)


def workers_left_unasked(s: _Situation) -> Decision | None:
    left = s.with_standing(MemberState.WAITING)
    if not s.running or not left or s.with_standing(MemberState.LEAVING):  # a LEAVING member stops the others, after a save
        return None
    return s.drop(Cause.LEFT, f"{sentences.workers(left)} left generation {s.generation} without a call")


def world_not_joined(s: _Situation) -> Decision | None:
    """Call all members if a worker does not join its world in time, because the other workers cannot step without it."""
    if not s.late or s.late_until is not None:
        return None
    return s.drop(
        Cause.LATE, f"{sentences.workers(s.late)} did not join generation {s.generation} within {s.timeouts.answer:g} s"
    )


# A call is pending


def grace_ran_out(s: _Situation) -> Decision | None:
    if s.called is None or not s.training or s.until(s.called.at, s.timeouts.leave) is not None:
        return None
    return s.drop(Cause.LATE, f"{sentences.workers(m.id for m in s.training)} did not save within {s.timeouts.leave:g} s")


def done_without_the_others(s: _Situation) -> Decision | None:
    """Make a planned call unplanned if some members are done and the others cannot finish without them, so that all repeat the
    last steps."""
    done = [m.id for m in s.members.values() if m.standing is MemberState.DONE and m.generation >= s.generation]
    if s.called is None or not s.called.planned or s.training or not done:
        return None
    reason = f"only {sentences.workers(done)} {sentences.are(done)} done"
    return replace(s.called, cause=Cause.PARTLY_DONE, reason=reason, planned=False, at=s.now)


def more_workers_leave(s: _Situation) -> Decision | None:
    if s.called is None or not s.called.planned or not s.training:
        return None
    leaving = tuple(sorted({*s.called.leaving, *s.with_standing(MemberState.LEAVING)}))
    if len(leaving) == len(s.called.leaving):
        return None
    return replace(
        s.called, cause=Cause.LEAVING, reason=f"{sentences.workers(leaving)} {sentences.are(leaving)} leaving", leaving=leaving
    )


# A world runs; no planned call interrupts its beginning or end


def world_begins(s: _Situation) -> Decision | None:
    if s.running and s.unheard:
        return s.wait(f"waiting for {sentences.workers(s.unheard)} to report", s.unheard_until)
    if s.running and s.late:
        return s.wait(f"waiting for {sentences.workers(s.late)} to join generation {s.generation}", s.late_until)
    return None


def world_ends(s: _Situation) -> Decision | None:
    done = s.with_standing(MemberState.DONE)
    if not s.running or not done:
        return None
    ended = frozenset(done)
    others = [id for id in s.ranks if id not in ended]
    return Wait(f"{sentences.workers(done)} {sentences.are(done)} done; waiting for {sentences.workers(others)} to finish")


def suspended(s: _Situation) -> Decision | None:
    if s.desired.replicas > 0:
        return None
    busy = [m.id for m in s.training] + s.with_standing(MemberState.LEAVING)
    if s.running and busy:
        return s.call(Cause.SUSPEND, "suspended: no workers are wanted", planned=True, leaving=s.ranks)
    if s.called is not None and busy:
        end = s.until(s.called.at, s.timeouts.leave if s.called.planned else s.timeouts.answer)
        if end is not None:
            what, then = f"waiting for {sentences.workers(busy)} to {_verb(s)}", ", then the job is suspended"
            return s.wait(what, end, then=then, look_again=s.look_again(end))
    if s.called is not None and not s.called.planned and not s.called.leaving:
        here = [m for m in s.members.values() if m.standing is MemberState.WAITING]
        if len(here) >= s.desired.sizes[0] and any(m.held and m.owes for m in here):
            return None  # they form one more world, to save a step that may only be in their memory
    return Closed("suspended: no workers are wanted", done=False)


def forming(s: _Situation) -> Decision | None:
    """Publish the largest world that can still form, once all its members are waiting. Each timeout that expires shrinks it."""
    if s.running:
        return None
    here = [m for m in s.members.values() if m.standing is MemberState.WAITING]
    coming, coming_until = _coming(s)
    absent_until = _absent_until(s, here)
    connected = _in_order(s, [*here, *coming])
    absent: list[int] = []
    if s.desired.expected is not None and absent_until is not None:
        leaving = {m.id for m in s.members.values() if m.standing is MemberState.LEAVING}
        absent = sorted(s.desired.expected - leaving - s.held.keys() - {m.id for m in connected})
    anybody = s.desired.expected is None and absent_until is not None
    size = s.target if anybody else largest(s.desired.sizes, min(s.target, len(connected) + len(absent)))
    if not size:
        return Wait(f"{_here(s, here)}, and no other is starting", s.look_again(coming_until if coming else None))
    chosen = connected[:size]
    unready = [m.id for m in chosen if m.standing is not MemberState.WAITING]
    missing = size - len(chosen)
    if not unready and not missing:
        saving, saving_until = _saving(s, chosen)
        if saving:
            return s.wait(f"waiting for {sentences.workers(saving)} to save and leave", saving_until)
        return _world(s, chosen)

    look_again = s.look_again(coming_until if unready else None, absent_until if missing else None)
    if unready:
        return s.wait(f"waiting for {sentences.workers(unready)} to {_verb(s)}", coming_until, look_again=look_again)
    whom = sentences.workers(absent[:missing]) if absent else sentences.count(missing, "more worker")
    if absent_until == math.inf:
        return Wait(f"waiting for {whom}: {_here(s, here)}", look_again)
    fewer = largest(s.desired.sizes, min(s.target, len(here)))
    then = f", then training {_goes_on(s)} with {fewer} of {s.wanted}"
    return s.wait(f"waiting for {whom}", absent_until, then=then, look_again=look_again)


# A world trains


def workers_leave(s: _Situation) -> Decision | None:
    leaving = s.with_standing(MemberState.LEAVING)
    if not leaving:
        return None
    return s.call(Cause.LEAVING, f"{sentences.workers(leaving)} {sentences.are(leaving)} leaving", planned=True, leaving=leaving)


def too_many_workers(s: _Situation) -> Decision | None:
    surplus = s.ranks[s.target :]
    if len(s.ranks) <= s.wanted:  # the batch limits only later worlds
        return None
    return s.call(Cause.SHRINK, f"shrinking from {len(s.ranks)} to {s.target}", planned=True, leaving=surplus)


def newcomers(s: _Situation) -> Decision | None:
    """Grow once for all newcomers, and not soon after the last change, because growing costs a save and a restart."""
    waiting = sorted(m.id for m in s.members.values() if m.standing is MemberState.WAITING and m.id not in s.ranked)
    available = len(s.ranks) + len(waiting)
    size = largest(s.desired.sizes, min(s.target, available))
    if s.world is None or size <= len(s.ranks):
        return None
    hoped = s.target
    if s.desired.expected is not None:
        hoped = largest(s.desired.sizes, min(s.target, available + len(s.desired.expected - s.members.keys() - s.held.keys())))
    ends = [s.until(s.world.at, s.timeouts.growth)]
    if hoped > size:
        ends.append(s.until(min(s.members[id].since for id in waiting), s.timeouts.growth))
    end = max((end for end in ends if end is not None), default=None)
    who = sentences.workers(waiting[: size - len(s.ranks)])
    if end is None:
        return s.call(Cause.GROW, f"growing from {len(s.ranks)} to {size} with {who}", planned=True)
    return s.wait(f"{_trains(s)}; {who} may join soon", end)


def lost_workers_are_kept_out(s: _Situation) -> Decision | None:
    """Keep lost workers out for a while, because a flapping connection could otherwise end world after world."""
    missing = sorted(s.held.keys() - s.ranked)
    if not missing or len(s.ranks) >= s.target:
        return None
    return s.wait(
        f"{_trains(s)}; {sentences.workers(missing)} {sentences.was(missing)} lost and may join again", min(s.held.values())
    )


def all_is_well(s: _Situation) -> Decision | None:
    if len(s.ranks) == s.target < s.wanted:
        why = sentences.cannot_share(s.wanted)
        verb = "trains" if s.target == 1 else "train"
        return Wait(f"{s.target} of {s.wanted} workers {verb} in generation {s.generation}: {why}", idle=why)
    return Wait(_trains(s))


RULES: tuple[Callable[[_Situation], Decision | None], ...] = (
    everybody_is_done,
    generation_from_elsewhere,
    lost_workers,
    a_majority_is_unheard,
    failed_workers,
    workers_left_unasked,
    world_not_joined,
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
    lost_workers_are_kept_out,
    all_is_well,
)
"""The first rule that returns a decision wins. Rules after `forming` are reached only while a world trains."""


# Forming a world


def _coming(s: _Situation) -> tuple[Sequence[Member], float | None]:
    """Return the connected workers that are still saving or stopping, and their deadline."""
    if s.called is None:
        return (), None
    if s.called.planned and s.training:
        return s.training, s.until(s.called.at, s.timeouts.leave)
    end = s.until(s.called.at, s.timeouts.answer)
    busy = [m for m in s.members.values() if m.standing in (MemberState.TRAINING, MemberState.DONE)]
    return (busy, end) if end is not None else ((), None)


def _saving(s: _Situation, chosen: Sequence[Member]) -> tuple[list[int], float | None]:
    """Return the leaving workers whose state is newer than that of the `chosen` workers, and the deadline for their save."""
    newest = max((min(m.generation, s.stepped), m.held) for m in chosen)
    leaving = [m for m in s.members.values() if m.standing is MemberState.LEAVING and m.owes and (m.generation, m.held) > newest]
    called = s.called.at if s.called is not None else -math.inf
    ends = {m.id: end for m in leaving if (end := s.until(max(called, m.since), s.timeouts.leave)) is not None}
    return sorted(ends), max(ends.values(), default=None)


def _absent_until(s: _Situation, here: Sequence[Member]) -> float | None:
    """Return the deadline for workers that are not connected; infinite while the smallest allowed world cannot form."""
    least = s.desired.sizes[0]
    if len(here) < least:
        return math.inf
    at = sorted(m.since for m in here)[least - 1]
    if s.called is None:
        return s.until(at, s.timeouts.start)
    survivors = any(m.generation >= max(s.generation, 1) for m in here)
    if s.world is not None and max(m.held for m in here) < s.world.held:
        survivors = False  # none of them has restored the state, and its holder is still missing
    return s.until(max(at, s.called.at), s.timeouts.recovery if survivors else s.timeouts.start)


def _in_order(s: _Situation, members: Sequence[Member]) -> list[Member]:
    """Sort members: holders of the newest state by old rank, then other waiting members by id, then the rest by id."""
    rank = {id: rank for rank, id in enumerate(s.ranks)}
    newest = max((min(m.generation, s.stepped) for m in members), default=0)

    def place(m: Member) -> tuple[int, int, int]:
        if m.generation >= newest:
            return 0, rank.get(m.id, len(rank)), m.id
        return 1, m.standing is not MemberState.WAITING, m.id

    return sorted(members, key=place)


def _world(s: _Situation, chosen: Sequence[Member]) -> World:
    size = f"{len(chosen)} of {s.wanted}" if len(chosen) < s.wanted else f"all {s.target}" if s.target > 1 else "1 worker"
    size += f": {sentences.cannot_share(s.wanted)}" if len(chosen) == s.target < s.wanted else ""
    why = f"{s.called.reason}; " if s.called and s.called.cause is not Cause.RESUME else ""
    generation = s.called.generation if s.called else s.next
    reason = f"{why}training {_goes_on(s)} with {size}"
    meshes = tuple(m.mesh_address for m in chosen) if any(m.mesh_address for m in chosen) else ()
    return World(generation, tuple(m.id for m in chosen), chosen[0].address, reason, s.now, s.held_step, meshes)


# Phrases for reasons


def _here(s: _Situation, here: Sequence[Member]) -> str:
    least = s.desired.sizes[0]
    return f"{len(here)} of at least {sentences.count(least, 'worker')} {'is' if 1 in (len(here), least) else 'are'} here"


def _verb(s: _Situation) -> str:
    return "save" if s.called and s.called.planned else "stop"


def _goes_on(s: _Situation) -> str:
    return "goes on" if s.called else "starts"


def _trains(s: _Situation) -> str:
    return f"{sentences.count(len(s.ranks), 'worker')} train{'s' if len(s.ranks) == 1 else ''} in generation {s.generation}"
