"""The elected decider and the member beside it, one step at a time, against an etcd in memory."""

from __future__ import annotations

import dataclasses
import random
import time
from datetime import timedelta
from typing import Any

import pytest

from outlast.base.clock import Clock
from outlast.base.errors import EtcdAway, Superseded
from outlast.job import contract
from outlast.job.status import State
from outlast.rendezvous import coordinator, messages, restart_budget, world
from outlast.rendezvous.etcd import client as etcd
from outlast.rendezvous.etcd import election, key_schema
from outlast.rendezvous.etcd import gateway as servers
from outlast.rendezvous.etcd.gateway import Outcome
from outlast.rendezvous.etcd.member import EtcdMember, Identity
from outlast.rendezvous.world import MemberState
from simulated_etcd import Link, SimulatedEtcd

OF = key_schema.Keys.of("/outlast", "team/a job")


class Voice:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended: list[tuple[str, str, int]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def event(self, kind: str, **facts: Any) -> None: ...

    def finished(self, state: State, reason: str, code: int) -> None:
        self.ended.append((str(state), reason, code))


class Bench:
    """An etcd, and who is to meet there."""

    def __init__(self) -> None:
        self.etcd = SimulatedEtcd()
        self.words = 0
        self.stepped = self.slept = 0.0
        self.steady = Clock(lambda: 1e6 + self.etcd.now + self.stepped, lambda: self.etcd.now - self.slept)

    def word(self) -> str:
        self.words += 1
        return f"word-{self.words}"

    def member(self, token: str, id: int | None = None, *, skew: float = 0.0, **fields: Any) -> EtcdMember:
        how = {"clock": lambda: self.etcd.now + skew, **{name: fields.pop(name) for name in ("clock", "wall") if name in fields}}
        who = Identity("r", id, token, most=3, **fields)
        member = EtcdMember(Link(self.etcd, random.Random(0)), OF, who, choose=min, **how)
        self.hear(member)
        member.report = dataclasses.replace(member.report, address=f"{token}:1")
        member.publish()
        return member

    def hear(self, *members: EtcdMember) -> None:
        for member in members:
            member.listed(member._store.range(OF.decided, prefix=True))

    def candidate(self, token: str, *, skew: float = 0.0, limit: int = 1, **fields: Any) -> tuple[election.Candidate, Voice]:
        settings = coordinator.Settings((1, 2, 3), restart_budget.Policy(limit, timedelta(hours=1)), world.Timeouts(start=2.0))
        voice = Voice()
        link = Link(self.etcd, random.Random(0))
        how = {"clock": lambda: self.etcd.now + skew, "random": lambda: 0.0, "nonce": self.word, **fields}
        candidate = election.Candidate(link, OF, election.ElectionConfig(settings, voice, token, **how))
        self.turn(candidate, seconds=0.0)
        return candidate, voice

    def turn(self, *candidates: election.Candidate, seconds: float = 3.0, keep: tuple[EtcdMember, ...] = ()) -> None:
        """Time passes, in which these decide, and those members renew their leases."""
        for _ in range(max(1, round(seconds / 0.25))):
            for candidate in candidates:
                candidate.listed(candidate._store.range(candidate.prefix, prefix=True))
                candidate.turn()
            for member in keep:
                self.hear(member)
                member.publish()
            self.etcd.pass_(0.25 if seconds else 0.0)

    def said(self) -> key_schema.Published:
        said = key_schema.Published.loads(self.etcd.kvs[OF.published].value)
        assert said is not None
        return said


@pytest.fixture
def bench() -> Bench:
    return Bench()


def trains(bench: Bench, *members: EtcdMember) -> None:
    for member in members:
        bench.hear(member)
        assert member.world is not None
        member.report = dataclasses.replace(
            member.report, standing=MemberState.TRAINING, generation=member.world.generation, failed=False, failure=None
        )
        member.publish()


def fails(member: EtcdMember, reason: str = "it failed", *, time: float = 0.0, echo: bool = False) -> None:
    failure = {"rank": 0, "code": 1, "reason": reason, "traceback": "", "time": time, "echo": echo, "step": None}
    member.report = dataclasses.replace(
        member.report, standing=MemberState.WAITING, failed=True, failure={**failure, "committed": None}
    )
    member.publish()


def test_who_decides_goes_by_a_clock_that_never_steps() -> None:
    settings = coordinator.Settings((1,), restart_budget.Policy(1, timedelta(hours=1)), world.Timeouts())
    running = etcd.Running(servers.address("etcd://a"), "r", election.ElectionConfig(settings, Voice()))
    client = etcd.Board(servers.address("etcd://a"), Identity("r", 0))
    assert isinstance(running._candidate._config.clock, Clock)
    assert isinstance(client.membership._clock, Clock)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_wall_clock_that_steps_costs_nothing(bench: Bench, step: float) -> None:
    (decides, _) = bench.candidate("d", clock=bench.steady)
    a, b = (bench.member(name, clock=bench.steady, wall=lambda: bench.etcd.now + bench.stepped) for name in "ab")
    bench.turn(decides, seconds=5, keep=(a, b))
    trains(bench, a, b)
    c = bench.member("c", clock=bench.steady)
    bench.turn(decides, seconds=8, keep=(a, b, c))
    before = bench.said()
    assert before.called
    assert before.called.planned
    bench.stepped = step
    bench.turn(decides, seconds=20, keep=(a, b, c))
    assert bench.said() == before


def test_when_all_machines_sleep_leases_are_made_again_and_the_world_goes_on(bench: Bench) -> None:
    (decides, _) = bench.candidate("d", clock=bench.steady)
    a, b = (bench.member(name, clock=bench.steady) for name in "ab")
    bench.turn(decides, seconds=5, keep=(a, b))
    trains(bench, a, b)
    bench.turn(decides, seconds=5, keep=(a, b))
    before = bench.said()
    bench.etcd.pass_(400)
    bench.slept = 400.0
    assert not [key for key in bench.etcd.kvs if key.startswith(OF.members)]
    bench.turn(decides, seconds=30, keep=(a, b))
    after = bench.said()
    assert (after.world.generation, after.called, after.restarts) == (before.world.generation, None, 0)  # type: ignore[union-attr]


def test_names_of_runs_may_hold_anything() -> None:
    assert OF.root == "/outlast/team%2Fa%20job"
    assert key_schema.run_of("/outlast", OF.member(3)) == "team/a job"
    assert key_schema.run_of("/outlast", "/outlast/x/else") == ""


def test_a_decider_that_was_deposed_writes_and_says_nothing(bench: Bench) -> None:
    (old, old_voice), member = bench.candidate("old"), bench.member("m")
    bench.turn(old, seconds=5, keep=(member,))
    trains(bench, member)
    bench.turn(old, seconds=1, keep=(member,))
    assert bench.said().by == "old"
    bench.turn(seconds=6, keep=(member,))  # it is frozen, and its lease ends
    new, _ = bench.candidate("new")
    bench.turn(new, seconds=2, keep=(member,))
    assert bench.said().by == "new"
    fails(member)
    term, said = old.term, len(old_voice.said)
    assert term is not None
    term.listed(old._store.range(f"{OF.root}/", prefix=True))
    with pytest.raises(election.Deposed):
        term.turn()
    assert bench.said().by == "new"
    assert len(old_voice.said) == said


def test_a_listing_that_was_asked_for_before_the_election_says_nothing_of_members(bench: Bench) -> None:
    a, b = bench.member("a"), bench.member("b")
    candidate, _ = bench.candidate("d")
    before = candidate.prefix
    bench.turn(candidate, keep=(a, b))
    trains(bench, a, b)
    bench.turn(candidate, seconds=0.0)
    assert candidate.term
    candidate.listed(candidate._store.range(before, prefix=True), before)
    assert candidate.term.state.reports.keys() == {0, 1}


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_node_that_gives_up_ends_the_run_unless_the_others_have_gone_on_without_it(bench: Bench, cut_off: bool) -> None:
    members = [bench.member(token, nnodes="1:3") for token in "abc"]
    *others, lost = members
    candidate, voice = bench.candidate("d", nnodes="1:3")
    bench.turn(candidate, keep=tuple(members))
    trains(bench, *members)
    if cut_off:
        bench.turn(candidate, seconds=6.0, keep=tuple(others))
        for member in others:
            member.report = dataclasses.replace(member.report, standing=MemberState.WAITING)
            member.publish()
        bench.turn(candidate, keep=tuple(others))
        trains(bench, *others)
    failure = {"rank": 0, "code": 79, "reason": "worker 2 gives up", "traceback": "", "time": 0.0, "echo": False}
    lost.report = dataclasses.replace(lost.report, standing=MemberState.LEAVING, failed=True, failure=failure)
    lost.publish()
    bench.turn(candidate, keep=tuple(others), seconds=1.0)
    assert voice.ended == ([] if cut_off else [("Failed", "worker 2 gives up", 1)])
    end = messages.Closed("worker 2 gives up", contract.Exit.FAILED, "BackoffLimitExceeded")
    assert [member.closed for member in others] == [None if cut_off else end] * 2
    assert bench.said().world.members == ((0, 1) if cut_off else (0, 1, 2))


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_of_other_sizes_is_another_unless_it_was_killed_just_now(bench: Bench, killed: bool) -> None:
    old = bench.member("a", nnodes="1:1")
    candidate, _ = bench.candidate("d", nnodes="1:1")
    bench.turn(candidate, keep=(old,))
    trains(bench, old)
    new = bench.member("b", nnodes="2:2")
    bench.turn(*() if killed else (candidate,), keep=(new,) if killed else (old, new), seconds=3.0)
    assert new.closed is None
    bench.turn(*() if killed else (candidate,), keep=(new,) if killed else (old, new), seconds=5.0)
    reason = "run r has --nnodes=1, and this node has --nnodes=2: another job has this --rdzv-id; give each its own"
    assert new.closed == (None if killed else messages.Closed(reason, contract.Exit.MISCONFIGURED))
    assert old.closed is None


def test_a_decider_that_is_cut_off_when_all_are_done_says_so_when_it_is_back(bench: Bench) -> None:
    member = bench.member("a")
    candidate, voice = bench.candidate("d")
    bench.turn(candidate, keep=(member,))
    trains(bench, member)
    bench.turn(candidate, seconds=0.0)
    member.report = dataclasses.replace(member.report, standing=MemberState.DONE)
    member.publish()
    link = candidate._store
    assert isinstance(link, Link)
    txn = link.txn

    def last(*parts: Any) -> Outcome:
        outcome = txn(*parts)
        link.cut = True
        return outcome

    link.txn = last  # type: ignore[method-assign]
    with pytest.raises(EtcdAway):
        bench.turn(candidate, seconds=0.0)
    assert (bench.said().done, bench.said().closed) == ((0,), None)
    link.txn = txn  # type: ignore[method-assign]
    bench.turn(keep=(member,), seconds=6.0)
    link.cut = False
    bench.turn(candidate, keep=(member,), seconds=3.0)
    assert voice.ended == [("Succeeded", "worker 0 is done", 0)]
    assert member.closed == messages.Closed("worker 0 is done", 0, "JobSucceeded")


def test_an_index_that_came_to_another_process_names_nobody_in_an_older_world(bench: Bench) -> None:
    (decides, _), a, b = bench.candidate("d"), bench.member("a"), bench.member("b")
    bench.turn(decides, seconds=5, keep=(a, b))
    trains(bench, a, b)
    assert (a.id, b.id) == (0, 1)
    bench.etcd.end(b._lease or 0)
    c = bench.member("c")
    assert c.id == 1
    assert c.world is None
    assert bench.said().world == a.world
    bench.turn(decides, seconds=0, keep=(a,))
    assert bench.said().called is not None
    assert bench.said().called.reason == "lost worker 1"  # type: ignore[union-attr]


def test_a_later_process_of_a_fixed_index_takes_the_place_of_the_one_before(bench: Bench) -> None:
    a = bench.member("a", 0)
    b = bench.member("b", 0)
    a.report = dataclasses.replace(a.report, standing=MemberState.LEAVING)
    with pytest.raises(Superseded, match="another process is worker 0 of run r now, in the place of this one"):
        a.publish()
    b.publish()


def test_a_member_that_has_something_new_to_say_all_the_time_keeps_its_lease(bench: Bench) -> None:
    member = bench.member("a")
    [key] = bench.etcd.kvs
    created = bench.etcd.kvs[key].created
    for generation in range(20):
        member.report = dataclasses.replace(member.report, generation=generation)
        bench.etcd.pass_(1.0)
        member.publish()
    assert bench.etcd.kvs[key].created == created


def test_a_member_whose_peers_watch_it_may_stand_still_for_5_s(bench: Bench) -> None:
    member = bench.member("m", 0)
    key = OF.member(0)
    revisions = []
    for mesh in (False, True, False):
        member.report = dataclasses.replace(member.report, mesh=mesh)
        member.publish()
        revisions.append(bench.etcd.kvs[key].created)
        bench.etcd.pass_(9.75 if len(revisions) > 1 else 4.75)
        assert key in bench.etcd.kvs
    assert len({*revisions}) == 1, "it was there all the time"
    bench.etcd.pass_(0.25)
    assert key not in bench.etcd.kvs


def test_failures_count_on_when_another_decides_and_no_clock_of_others_is_believed(bench: Bench) -> None:
    (first, _), member = bench.candidate("first", skew=5e5), bench.member("m", skew=-1e6)
    bench.turn(first, seconds=5, keep=(member,))
    trains(bench, member)
    fails(member, time=1e9)
    bench.turn(first, seconds=3, keep=(member,))
    assert (bench.said().restarts, bench.said().world.generation) == (1, 2)  # type: ignore[union-attr]
    trains(bench, member)
    first.resign()
    second, voice = bench.candidate("second", skew=-5e5)
    bench.turn(second, seconds=1, keep=(member,))
    fails(member)
    bench.turn(second, seconds=3)
    assert bench.said().closed is not None
    assert voice.ended[0][1] == "it failed; restarts.limit (1 within 1h without a new checkpoint) is used up"


def test_who_decides_goes_on_from_what_the_version_before_has_published(bench: Bench) -> None:
    text = """{"by": "old", "born": "i2", "before": "i1", "terms": "", "world": {"generation": 4, "members": [0, 1], "address":
        "a:1", "reason": "training starts", "at": 9.25, "held": 40, "mesh_addresses": ["", ""]}, "tokens": ["a", "b"], "called":
        null, "leave_s": 75.0, "closed": null, "why": "", "floor": 3, "done": [], "judged": 3, "restarts": 5, "failures":
        [[100.0, 30, null], [50.0, 30, 40]], "failure": {"worker": 1, "code": 1, "reason": "it failed"}, "attempt": 2, "ended":
        {"c": "it is lost"}, "lost": [[2, 2.5, 1]]}"""
    link = Link(bench.etcd, random.Random(0))
    link.txn([], [servers.put(OF.published, text, link.grant(600))])
    before = bench.said()
    (decides, _), a, b = bench.candidate("new"), bench.member("a", 0), bench.member("b", 1)
    bench.turn(decides, seconds=1, keep=(a, b))
    after, passed = bench.said(), bench.said().failures[0][0] - 100
    assert 0 <= passed <= 1
    assert after.failures == ((100 + passed, 30, None), (50 + passed, 30, 40))
    assert after.lost == ((2, 2.5 + passed, 1),)
    assert after.world == dataclasses.replace(before.world, at=after.world.at)  # type: ignore[union-attr, type-var]
    carried = ("incarnation", "previous_incarnation", "tokens", "called", "closed", "min_generation", "counted", "attempt")
    for name in (*carried, "restarts", "failure", "ended"):
        assert getattr(after, name) == getattr(before, name), name
    assert (after.by, after.restarts, after.counted, after.attempt, after.min_generation) == ("new", 5, 3, 2, 3)


def test_what_members_have_repaired_is_counted_once_also_when_another_decides(bench: Bench) -> None:
    (first, _), a, b = bench.candidate("first", limit=9), bench.member("a", 0), bench.member("b", 1)
    bench.turn(first, seconds=5, keep=(a, b))
    trains(bench, a, b)
    generation = bench.said().world.generation  # type: ignore[union-attr]

    def repaired(*attempts: int) -> None:
        failure = {"rank": 1, "code": 137, "reason": "rank 1 on worker 1 was killed by SIGKILL", "time": 1.0}
        past = tuple({"generation": generation, "attempt": each, "worker": 1, "failure": failure} for each in attempts)
        for member in (a, b):
            member.report = dataclasses.replace(member.report, attempt=attempts[-1], past=past)
            member.publish()

    def counted() -> tuple[int, tuple[int, int], int, object]:
        said = bench.said()
        return said.restarts, (said.counted, said.attempt), len(said.failures), said.called

    repaired(1, 2)
    bench.turn(first, seconds=1, keep=(a, b))
    assert counted() == (2, (generation, 1), 2, None)
    first.resign()
    second, voice = bench.candidate("second", limit=9)
    bench.turn(second, seconds=1, keep=(a, b))
    assert counted() == (2, (generation, 1), 2, None)
    repaired(1, 2, 3)
    bench.turn(second, seconds=1, keep=(a, b))
    assert counted() == (3, (generation, 2), 3, None)
    assert f"repaired by its workers, attempt 3 of generation {generation}: rank 1" in voice.said[-1]
    second.resign()
    repaired(1, 2, 3, 4)  # while nobody decides
    third, _ = bench.candidate("third", limit=9)
    bench.turn(third, seconds=1, keep=(a, b))
    assert counted() == (4, (generation, 3), 4, None)
    bench.etcd.lose_data()
    bench.turn(third, seconds=5, keep=(a, b))
    assert counted() == (0, (generation, 3), 0, None)  # who has no history counts nobody else's
    repaired(1, 2, 3, 4, 5)
    bench.turn(third, seconds=1, keep=(a, b))
    assert counted() == (1, (generation, 4), 1, None)


def test_a_process_that_the_others_do_not_hear_is_told_to_end_also_by_the_next_coordinator(bench: Bench) -> None:
    pods = {"limit": 9, "replicas": 3}
    decides, _ = bench.candidate("d", **pods)
    a, b, c = (bench.member(token, id) for id, token in enumerate("abc"))
    bench.turn(decides, seconds=5, keep=(a, b, c))
    trains(bench, a, b, c)
    for member in (a, b):
        member.report = dataclasses.replace(member.report, unheard=(2,))
        member.publish()
    bench.turn(decides, seconds=0.25)
    lost = "lost worker 2: workers 0 and 1 do not hear it"
    said = bench.said()
    assert said.called is not None
    assert (said.called.lost, said.called.reason, said.ended) == ((2,), lost, {"c": lost})
    for member in (a, b):
        member.report = member.report.changed(MemberState.WAITING)
        member.publish()
    bench.turn(decides, seconds=0.25)
    assert bench.said().world.members == (0, 1)  # type: ignore[union-attr]
    trains(bench, a, b)
    decides.resign()
    bench.turn(bench.candidate("e", **pods)[0], seconds=1, keep=(a, b, c))
    assert c.closed == messages.Closed(lost, contract.Exit.INTERRUPTED)
    again = bench.member("c2", 2)
    successor, _ = bench.candidate("f", **pods)
    bench.turn(successor, seconds=6, keep=(a, b, again))
    assert (again.closed, bench.said().called, bench.said().ended) == (None, None, {"c": lost})
    assert [(id, times) for id, _, times in bench.said().lost] == [(2, 1)]


def test_a_clock_that_is_set_back_while_a_cause_is_awaited_holds_up_nothing(bench: Bench) -> None:
    a, b = bench.member("a"), bench.member("b")
    candidate, _ = bench.candidate("d")
    bench.turn(candidate, keep=(a, b))
    trains(bench, a, b)
    bench.turn(candidate, seconds=0.0)
    assert candidate.term
    fails(a, echo=True)
    bench.turn(candidate, seconds=0.0)
    assert bench.said().called is None
    candidate.term.clock = lambda: bench.etcd.now - 3600
    bench.turn(candidate, seconds=0.0)
    assert bench.said().called is not None


def test_a_failure_that_is_none_of_an_echo_is_judged_at_once_and_said(bench: Bench) -> None:
    (decides, _), a, b = bench.candidate("d", limit=9, replicas=2), bench.member("a", 0), bench.member("b", 1)
    bench.turn(decides, seconds=5, keep=(a, b))
    trains(bench, a, b)
    fails(a)
    bench.turn(decides, seconds=2, keep=(a, b))
    failure = bench.said().failure or {}
    assert (bench.said().restarts, failure["worker"], failure["reason"], failure["counted"]) == (1, 0, "it failed", True)
    decides.resign()
    bench.turn(bench.candidate("second", limit=9, replicas=2)[0], seconds=1, keep=(a, b))
    assert bench.said().failure == failure


def test_the_time_for_a_planned_call_counts_from_when_it_is_heard(bench: Bench) -> None:
    (decides, _), a = bench.candidate("d", skew=9e5), bench.member("a", skew=-500.0)
    bench.turn(decides, seconds=5, keep=(a,))
    trains(bench, a)
    b = bench.member("b")
    bench.turn(decides, seconds=8, keep=(a, b))
    assert a.called is not None
    assert a.called.planned
    assert 0 <= time.time() + a.called.leave_s - a.called.deadline < 20


def test_a_world_that_etcd_has_forgotten_is_taken_up_and_generations_are_passed_over(bench: Bench) -> None:
    (decides, _), a = bench.candidate("d"), bench.member("a")
    bench.turn(decides, seconds=5, keep=(a,))
    trains(bench, a)
    bench.etcd.lose_data()
    a.publish()
    bench.turn(decides, seconds=3, keep=(a,))
    assert bench.said().world is not None
    assert dataclasses.replace(bench.said().world, at=0.0) == dataclasses.replace(a.world, at=0.0)  # type: ignore[type-var]
    assert bench.said().min_generation == 101
    fails(a)
    bench.turn(decides, seconds=3, keep=(a,))
    assert bench.said().world.generation == 102  # type: ignore[union-attr]


def test_a_member_takes_up_all_keys_that_have_changed_in_one_revision() -> None:
    """The keys of a lease are deleted in one revision when it ends."""
    member = EtcdMember(Link(SimulatedEtcd(), random.Random(0)), OF, Identity("a"))
    member.happened([servers.KeyValue(OF.leader, "", 4, 4)])
    assert member._leader
    member.happened([servers.Gone(OF.published, 5), servers.Gone(OF.leader, 5)])
    assert member._leader is None
