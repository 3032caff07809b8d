"""The elected decider and the member beside it, one step at a time, against an etcd in memory."""

from __future__ import annotations

import dataclasses
import itertools
import random
from datetime import timedelta
from typing import Any

import pytest

from outlast.base.clock import Clock
from outlast.base.errors import EtcdAway
from outlast.job import contract
from outlast.job.status import State
from outlast.rendezvous import coordinator, messages, restart_budget, who_trains
from outlast.rendezvous.etcd import client as etcd
from outlast.rendezvous.etcd import election, key_schema
from outlast.rendezvous.etcd import gateway as servers
from outlast.rendezvous.etcd.gateway import Outcome
from outlast.rendezvous.etcd.member import EtcdMember, Identity
from outlast.rendezvous.who_trains import MemberState
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


def says(member: EtcdMember, **fields: Any) -> None:
    """It reports this, too."""
    member.report = dataclasses.replace(member.report, **fields)
    member.publish()


class Bench:
    """An etcd, and who is to meet there."""

    def __init__(self) -> None:
        self.etcd, self.words = SimulatedEtcd(), map("word-{}".format, itertools.count())

    def member(self, token: str, id: int | None = None, **fields: Any) -> EtcdMember:
        who = Identity("r", id, token, most=3, **fields)
        member = EtcdMember(Link(self.etcd, random.Random(0)), OF, who, choose=min, clock=lambda: self.etcd.now)
        self.hear(member)
        says(member, address=f"{token}:1")
        return member

    def hear(self, *members: EtcdMember) -> None:
        for member in members:
            member.listed(member._store.range(OF.decided, prefix=True))

    def candidate(self, token: str, **fields: Any) -> tuple[election.Candidate, Voice]:
        settings = coordinator.Settings((1, 2, 3), restart_budget.Policy(1, timedelta(hours=1)), who_trains.Timeouts(start=2.0))
        voice = Voice()
        link = Link(self.etcd, random.Random(0))
        how = {"clock": lambda: self.etcd.now, "random": lambda: 0.0, "nonce": lambda: next(self.words), **fields}
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
        says(member, standing=MemberState.TRAINING, generation=member.world.generation, failed=False, failure=None)


def fails(member: EtcdMember) -> None:
    failure = {"rank": 0, "code": 1, "reason": "it failed", "time": 0.0}
    says(member, standing=MemberState.WAITING, failed=True, failure=failure)


def test_who_decides_goes_by_a_clock_that_never_steps() -> None:
    settings = coordinator.Settings((1,), restart_budget.Policy(1, timedelta(hours=1)), who_trains.Timeouts())
    running = etcd.Running(servers.address("etcd://a"), "r", election.ElectionConfig(settings, Voice()))
    client = etcd.Board(servers.address("etcd://a"), Identity("r", 0))
    assert isinstance(running._candidate._config.clock, Clock)
    assert isinstance(client.membership._clock, Clock)


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
            says(member, standing=MemberState.WAITING)
        bench.turn(candidate, keep=tuple(others))
        trains(bench, *others)
    failure = {"rank": 0, "code": 79, "reason": "worker 2 gives up", "traceback": "", "time": 0.0, "echo": False}
    says(lost, standing=MemberState.LEAVING, failed=True, failure=failure)
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
    says(member, standing=MemberState.DONE)
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


def test_a_process_that_takes_an_index_and_reports_twice_is_of_the_next_world(bench: Bench) -> None:
    (candidate, _), one = bench.candidate("it"), bench.member("one", 0)
    bench.turn(candidate, seconds=5, keep=(one,))
    trains(bench, one)
    bench.turn(candidate, seconds=1, keep=(one,))
    two = bench.member("two", 0)
    candidate.listed(candidate._store.range(candidate.prefix, prefix=True))
    candidate._store.loss = 1.0  # type: ignore[attr-defined] # the call is decided, and not yet published
    with pytest.raises(EtcdAway):
        candidate.turn()
    candidate._store.loss = 0.0  # type: ignore[attr-defined]
    says(two, held=1)
    bench.turn(candidate, seconds=5, keep=(two,))
    world = bench.said().world
    assert world is not None
    assert (world.generation, world.address) == (2, "two:1")


def test_a_member_that_has_something_new_to_say_all_the_time_keeps_its_lease(bench: Bench) -> None:
    member = bench.member("a")
    [key] = bench.etcd.kvs
    created = bench.etcd.kvs[key].created
    for generation in range(20):
        bench.etcd.pass_(1.0)
        says(member, generation=generation)
    assert bench.etcd.kvs[key].created == created


def test_a_member_whose_peers_watch_it_may_stand_still_for_5_s(bench: Bench) -> None:
    member = bench.member("m", 0)
    key = OF.member(0)
    revisions = []
    for mesh in (False, True, False):
        says(member, mesh=mesh)
        revisions.append(bench.etcd.kvs[key].created)
        bench.etcd.pass_(9.75 if len(revisions) > 1 else 4.75)
        assert key in bench.etcd.kvs
    assert len({*revisions}) == 1, "it was there all the time"
    bench.etcd.pass_(0.25)
    assert key not in bench.etcd.kvs


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
