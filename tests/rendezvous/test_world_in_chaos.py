"""Hypothesis plays the world around a decider: workers come, die, are cut off, speak late or twice; clocks jump;
users change their mind.

Whatever happens, what is published stays true to its promises, and once nothing more happens everything settles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outlast.rendezvous import world
from outlast.rendezvous.partition import LONGEST_HELD_S
from outlast.rendezvous.world import Call, Closed, Decision, Desired, Member, MemberState, State, Timeouts, Wait, World

TIMEOUTS = Timeouts()
LONGEST = 2 * max(TIMEOUTS.start, TIMEOUTS.leave, LONGEST_HELD_S)
IDS = st.integers(0, 6)


@dataclass
class Worker:
    """A worker that does what `rendezvous.world` asks of it, when it comes to it."""

    now: Member
    """What it would report."""
    connected: bool = True
    hangs: bool = False
    """Its training does not stop when told."""
    call: Call | None = None
    world: World | None = None
    """What it was told last."""

    def obey(self) -> bool:
        """Do the next thing it was told; False when there is none."""
        me = self.now
        if me.standing is MemberState.LEAVING or (self.hangs and me.standing is MemberState.TRAINING):
            return False
        if self.world and self.world.generation > me.generation:
            if me.standing is not MemberState.WAITING:
                self.now = replace(me, standing=MemberState.WAITING)
                return True
            if me.id in self.world.members:
                self.now = replace(
                    me, standing=MemberState.TRAINING, generation=self.world.generation, failed=False, held=0, owes=True
                )
                return True
        called = self.call is not None and self.call.generation > me.generation
        if called and (me.standing is MemberState.TRAINING or (me.standing is MemberState.DONE and not self.call.planned)):
            self.now = replace(me, standing=MemberState.WAITING, held=1, owes=not self.call.planned)
            return True
        return False


class Job:
    """A decider and its workers. Every decision is checked before it is obeyed."""

    def __init__(self, sizes: tuple[int, ...], replicas: int, knows_names: bool) -> None:
        self.state = State({})
        self.sizes = sizes
        self.replicas = replicas
        self.knows_names = knows_names
        self.awaited: frozenset[int] = frozenset()
        """Workers that are expected and may never come."""
        self.now = 1_000_000.0
        self.workers: dict[int, Worker] = {}
        self.worlds: list[World] = []
        self.calls: list[Call] = []
        self.starts = 0
        self.broken: set[frozenset[int]] = set()
        """Pairs of workers between which nothing passes."""
        self.lies: dict[int, tuple[int, ...]] = {}
        """Of workers that err about whom they do not hear."""

    @property
    def wanted(self) -> Desired:
        return Desired(self.replicas, self.sizes, self.awaited.union(self.workers) if self.knows_names else None)

    def start(self, id: int) -> None:
        self.starts += 1
        self.workers[id] = Worker(Member(id, f"host-{id}:{self.starts}", MemberState.WAITING))
        self.report(id)

    def report(self, id: int) -> None:
        """The truth, as every heartbeat says it; whoever reports is told what it has missed."""
        worker = self.workers[id]
        if worker.connected:
            told = replace(worker.now, since=self.now, noticed=self.now)
            self.state = self.state.reported(replace(told, unheard=self.unheard(worker), refused=self.refused(worker)))
            worker.call, worker.world = self.state.called, self.state.world

    def unheard(self, worker: Worker) -> tuple[int, ...]:
        """Whom of its world a worker does not hear; each watches all, as in small worlds."""
        me = worker.now
        trains = worker.world is not None and me.generation == worker.world.generation and me.generation > 0
        ranks = worker.world.members if worker.world and trains else ()
        found = {id for id in ranks if id != me.id and (id not in self.workers or frozenset((id, me.id)) in self.broken)}
        return tuple(sorted(found | set(self.lies.get(me.id, ())))) if me.id in ranks else ()

    def refused(self, worker: Worker) -> tuple[int, ...]:
        return tuple(id for id in self.unheard(worker) if id not in self.workers)

    def end(self, id: int) -> None:
        del self.workers[id]
        self.state = self.state.gone(id)

    def look(self) -> Decision:
        decision = world.decide(self.state, self.wanted, TIMEOUTS, self.now)
        assert decision == world.decide(self.state, self.wanted, TIMEOUTS, self.now)
        self.check(decision)
        self.state = self.state.after(decision)
        if isinstance(decision, Call | World):
            (self.calls if isinstance(decision, Call) else self.worlds).append(decision)
            for id in decision.lost if isinstance(decision, Call) else ():
                if id in self.workers:  # it is killed, and started again
                    self.end(id)
                    self.start(id)
            for worker in self.workers.values():
                if worker.connected:
                    worker.call, worker.world = self.state.called, self.state.world
        return decision

    def check(self, decision: Decision) -> None:
        before, members = self.state, self.state.members
        ranks = before.world.members if before.world else ()
        generation = before.world.generation if before.world else 0
        pending = before.called if before.called and before.called.generation > generation else None
        assert decision.reason
        match decision:
            case World():
                assert decision.generation > max((w.generation for w in self.worlds), default=0)
                assert pending is None or decision.generation == pending.generation
                assert before.world is None or pending is not None, "a running world is not replaced without a call"
                sizes = world.allowed(self.sizes, members.values())
                assert len(decision.members) in sizes
                assert len(decision.members) <= max(sizes[0], self.replicas)
                assert all(members[id].standing is MemberState.WAITING for id in decision.members)
                assert decision.address == members[decision.members[0]].address
                verdict = world.lost(before, self.now)
                assert not {*verdict.lost, *verdict.gone} & set(decision.members)
                assert decision.at == self.now
                # No step was made in a world that one who holds the state has never taken up.
                late = [members[id] for id in ranks if id in members and members[id].generation < generation]
                stepped = min([generation, *(m.generation for m in late if m.held)])
                survivors = [id for id in ranks if id in decision.members and members[id].generation >= stepped]
                assert list(decision.members[: len(survivors)]) == survivors
                newest = max((min(members[id].generation, stepped), members[id].held) for id in decision.members)
                leaving = [
                    m
                    for m in members.values()
                    if m.standing is MemberState.LEAVING and m.owes and (m.generation, m.held) > newest
                ]
                begun = pending.at if pending else -math.inf
                assert not any(world.until(max(begun, m.since), TIMEOUTS.leave, self.now) for m in leaving), (
                    "what is saved is lost"
                )
            case Call():
                assert decision.generation > max(generation, *(m.generation for m in members.values()), 0)
                if pending is not None and decision.generation == pending.generation:
                    more = set(decision.lost) > set(pending.lost)
                    assert pending.planned or more
                    assert not decision.planned or more or set(decision.leaving) > set(pending.leaving)
                elif pending is not None:
                    assert decision.generation > pending.generation
            case Wait():
                assert decision.look_again is None or self.now < decision.look_again <= self.now + LONGEST
            case Closed():
                assert decision.done or self.replicas == 0
                here = [m for m in members.values() if m.standing is MemberState.WAITING and m.held and m.owes]
                crashed = pending and not pending.planned and not pending.leaving
                trains = any(m.standing in (MemberState.TRAINING, MemberState.LEAVING) for m in members.values())
                least = world.allowed(self.sizes, members.values())[0]
                enough = sum(m.standing is MemberState.WAITING for m in members.values()) >= least
                assert decision.done or not (here and crashed and enough) or trains, "what is in their memory is lost"
                if decision.done:
                    assert {(members[id].standing, members[id].generation) for id in ranks} == {(MemberState.DONE, generation)}

    def settle(self) -> Decision:
        """Nothing more happens from outside: who was told something does it, who leaves goes, time passes."""
        self.broken.clear()
        self.lies.clear()
        worlds = len(self.worlds)
        for _ in range(60):
            decision = self.look()
            moved = isinstance(decision, Call | World)
            for id in list(self.workers):
                if self.step(id):
                    moved = True
            if isinstance(decision, Closed):
                break
            if not moved and isinstance(decision, Wait):
                if decision.look_again is None:
                    break
                self.now = decision.look_again
        else:
            raise AssertionError(f"does not settle: {decision} {self.state}")
        assert len(self.worlds) - worlds <= 3, f"flaps: {self.worlds[worlds:]}"
        self.check_settled(decision)
        return decision

    def step(self, id: int) -> bool:
        worker, known = self.workers[id], self.state.members
        moved = worker.connected and worker.obey()
        if worker.connected and worker.now.standing is MemberState.LEAVING:
            self.end(id)
            return True
        ranks = self.state.world.members if self.state.world and not self.state.called else ()
        ends = id in ranks and any(rank in known and known[rank].standing is MemberState.DONE for rank in ranks)
        if ends and worker.now.standing is MemberState.TRAINING and not worker.now.failed:
            moved = True
            if worker.hangs:
                worker.now = replace(worker.now, failed=True)
            else:
                worker.now = replace(worker.now, standing=MemberState.DONE)
        before = self.state
        self.report(id)
        return moved or self.state != before

    def check_settled(self, decision: Decision) -> None:
        """Whoever can train does, as many as may."""
        if isinstance(decision, Closed):
            return
        assert self.replicas > 0
        formed = self.state.world if self.state.called is None else None
        trains = {
            id
            for id, w in self.workers.items()
            if w.connected and formed and w.now.standing is MemberState.TRAINING and w.now.generation == formed.generation
        }
        able = {id for id, w in self.workers.items() if w.connected and (not w.hangs or w.now.standing is MemberState.WAITING)}
        sizes = world.allowed(self.sizes, self.state.members.values())
        if formed and len(formed.members) not in sizes:  # it began before the batch was known
            assert len(trains) in self.sizes
        else:
            target = world.largest(sizes, self.replicas) or sizes[0]
            assert len(trains) == world.largest(sizes, min(target, len(able | trains))), (decision, self.state)
        assert trains == set(formed.members if formed else ())
        assert not any(self.workers[id].now.failed for id in trains)


FATES = [
    "dies",
    "dies and is back before anybody looks",
    "is cut off",
    "is reachable again",
    "hangs",
    "fails",
    "fails and waits",
    "waits untold",
    "leaves",
    "holds",
    "owes nothing",
    "finishes",
    "obeys",
    "knows the batch",
]


class Chaos(RuleBasedStateMachine):
    """Everything that may happen, in any order."""

    @initialize(
        sizes=st.sets(st.integers(1, 6), min_size=1).map(lambda sizes: tuple(sorted(sizes))),
        replicas=st.integers(1, 7),
        knows_names=st.booleans(),
    )
    def submitted(self, sizes: tuple[int, ...], replicas: int, knows_names: bool) -> None:
        self.job = Job(sizes, replicas, knows_names)
        self.said: list[Member] = []
        for id in range(replicas):
            self.job.start(id)
        self.job.settle()

    @rule(id=IDS)
    def a_worker_starts(self, id: int) -> None:
        if id not in self.job.workers:
            self.job.start(id)

    @precondition(lambda self: self.job.workers)
    @rule(data=st.data(), what=st.sampled_from(FATES), heard=st.booleans())
    def something_happens_to_a_worker(self, data: st.DataObject, what: str, heard: bool) -> None:
        job = self.job
        id = data.draw(st.sampled_from(sorted(job.workers)))
        worker, now = job.workers[id], job.workers[id].now
        self.said.append(now)
        match what, now.standing:
            case "dies", _:
                job.end(id)
                return
            case "dies and is back before anybody looks", _:
                job.start(id)
                return
            case "is cut off", _:
                worker.connected = False
                job.state = job.state.gone(id)
            case "is reachable again", _:
                worker.connected = True
                job.report(id)
            case "hangs", _:
                worker.hangs = not worker.hangs
            case "fails", MemberState.TRAINING:
                worker.now = replace(now, failed=True)
            case "fails and waits", MemberState.TRAINING:
                worker.now = replace(now, failed=True, standing=MemberState.WAITING, held=1)
            case "waits untold", MemberState.TRAINING:
                worker.now = replace(now, standing=MemberState.WAITING)
            case "leaves", MemberState.WAITING | MemberState.TRAINING:
                worker.now = replace(now, standing=MemberState.LEAVING, owes=True)
            case "holds", MemberState.WAITING | MemberState.LEAVING:
                worker.now = replace(now, held=data.draw(st.integers(0, 3)))
            case "owes nothing", _:
                worker.now = replace(now, owes=False)
            case "finishes", MemberState.TRAINING if not now.failed:
                worker.now = replace(now, standing=MemberState.DONE)
            case "obeys", _:
                worker.obey()
            case "knows the batch", _:
                worker.now = replace(now, batch=(now.generation, 0, data.draw(st.integers(0, 12))))
        if heard:
            job.report(id)

    @rule(ids=st.frozensets(IDS, min_size=1, max_size=6), heals=st.booleans())
    def a_network_is_cut(self, ids: frozenset[int], heals: bool) -> None:
        """These hear nobody else, and nobody else hears them; or all that was cut is whole."""
        if heals:
            self.job.broken.clear()
        else:
            self.job.broken |= {frozenset((one, other)) for one in ids for other in range(7) if other not in ids}
        for id in self.job.workers:
            self.job.report(id)

    @rule(id=IDS, of=st.frozensets(IDS, max_size=6))
    def a_worker_errs_about_others(self, id: int, of: frozenset[int]) -> None:
        self.job.lies[id] = tuple(sorted(of - {id}))
        if id in self.job.workers:
            self.job.report(id)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def something_old_arrives(self, data: st.DataObject) -> None:
        late = data.draw(st.sampled_from(self.said))
        worker = self.job.workers.get(late.id)
        if worker and worker.connected:
            self.job.state = self.job.state.reported(replace(late, since=self.job.now))

    @rule(replicas=st.integers(0, 7))
    def is_scaled(self, replicas: int) -> None:
        self.job.replicas = replicas

    @rule(ids=st.frozensets(IDS))
    def others_are_expected(self, ids: frozenset[int]) -> None:
        self.job.awaited = ids

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.job.now += seconds

    @rule(seconds=st.floats(-1e5, 1e5))
    def clock_jumps(self, seconds: float) -> None:
        self.job.now += seconds

    @rule()
    def decider_is_started_again(self) -> None:
        job = self.job
        reports = [w.world for w in job.workers.values() if w.connected and w.world and w.now.generation == w.world.generation]
        newest = max(filter(None, [*job.worlds[-1:], *reports]), key=lambda each: each.generation, default=None)
        job.state = State({}, newest, since=job.now)

    @rule(rarely=st.sampled_from([False, False, False, True]))
    def decider_has_lost_its_memory(self, rarely: bool) -> None:
        """No generation is made twice as long as somebody trains in the newest."""
        job = self.job
        newest = job.worlds[-1].generation if job.worlds else None
        trains = [w.now for w in job.workers.values() if w.connected and w.now.standing is MemberState.TRAINING]
        if rarely and any(m.generation == newest for m in trains):
            job.state = State({})
            for id in job.workers:
                job.report(id)
            job.look()

    @rule(times=st.integers(1, 3))
    def decider_looks(self, times: int) -> None:
        for _ in range(times):
            self.job.look()

    @rule()
    def nothing_happens_for_long(self) -> None:
        self.job.settle()

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.job.settle()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=3 * settings.default.max_examples, stateful_step_count=40)


PEACEFUL = st.one_of(
    st.tuples(st.just("start"), IDS),
    st.tuples(st.just("leave"), IDS),
    st.tuples(st.just("scale"), st.integers(0, 6)),
    st.tuples(st.just("pass"), st.integers(0, 40)),
)


@given(events=st.lists(PEACEFUL, max_size=30), knows_names=st.booleans())
def test_no_step_is_lost_while_nobody_fails(events: list[tuple[str, int]], knows_names: bool) -> None:
    job = Job((1, 2, 3, 4, 6), 3, knows_names)
    for what, number in events:
        match what:
            case "start" if number not in job.workers:
                job.start(number)
            case "leave" if number in job.workers:
                job.workers[number].now = replace(job.workers[number].now, standing=MemberState.LEAVING)
                job.report(number)
                job.look()
            case "scale":
                job.replicas = number
            case "pass":
                job.now += number
        job.look()
        for id in list(job.workers):
            job.step(id)
    job.settle()
    assert all(call.planned for call in job.calls), job.calls
