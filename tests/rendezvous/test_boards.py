"""What each board does for a member, whoever coordinates: reports arrive, messages are heard, an outage loses neither. What the
coordinators make of the reports is in `test_coordinators.py`."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import apiserver
from coordinators import Coordinator, Etcd, Operator, Sockets
from outlast.job import contract
from outlast.rendezvous import member_client, transport
from outlast.rendezvous.messages import Called, Closed
from outlast.rendezvous.who_trains import World
from waits import until

WORLD, ALONE = World(1, (0, 1), "10.0.0.1:5", "all here", 5.0), World(1, (0,), "10.0.0.1:5", "all here", 5.0)
FAILED = {"rank": 0, "code": 1, "reason": "it failed", "time": 0.0}
Member = Callable[..., transport.Client]


@pytest.fixture(params=["launcher", "worker 0", "etcd", "operator"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    match request.param:
        case "etcd":
            yield Etcd(server := request.getfixturevalue("shared_etcd"))
            if server.process is None:  # its data are still there, those of other tests, too
                server.start()
        case "operator":
            made = Operator()
            with apiserver.entered(made.api, tmp_path, monkeypatch):
                yield made
        case _:
            connected = Sockets(tmp_path / "socket" if request.param == "launcher" else None)
            yield connected
            connected.close()


@pytest.fixture
def member(coordinator: Coordinator, tmp_path: Path) -> Iterator[Member]:
    """Makes members of the run, which go at the end."""
    with contextlib.ExitStack() as made:
        yield lambda id, process="p": made.enter_context(contextlib.closing(coordinator.client(id, process, state=tmp_path)))


@pytest.fixture
def trains(coordinator: Coordinator, member: Member) -> transport.Client:
    """A member that has reported, and hears of its world."""
    one = member(0)
    one.report("waiting")
    until(lambda: coordinator.report(0))
    coordinator.tell(world=ALONE)
    until(lambda: one.world == ALONE)
    return one


def standing(coordinator: Coordinator, id: int) -> str | None:
    report = coordinator.report(id)
    return str(report.standing) if report else None


def test_a_report_arrives_and_keeps_what_is_not_said_anew(coordinator: Coordinator, member: Member) -> None:
    one, other = member(0), member(1)
    other.amend(unheard=(0,))
    one.report("waiting", address="10.0.0.7:4711")
    until(lambda: standing(coordinator, 0) == "waiting")
    assert coordinator.report(1) is None, "nothing is sent before the first report"
    one.report("training", generation=2)
    one.amend(mesh=True, unheard=(1,), refused=(1,), batch=(2, 0, 64))
    until(lambda: (report := coordinator.report(0)) and report.refused)
    report = coordinator.report(0)
    assert report
    assert (report.run, report.standing, report.generation, report.address) == ("run", "training", 2, "10.0.0.7:4711")
    assert (report.mesh, report.unheard, report.refused, report.batch) == (True, (1,), (1,), (2, 0, 64))
    one.report("waiting", generation=3)
    until(lambda: standing(coordinator, 0) == "waiting")
    report = coordinator.report(0)
    assert report
    assert (report.mesh, report.unheard, report.refused, report.batch) == (False, (), (), (2, 0, 64))


def test_worlds_calls_and_the_end_are_heard_by_all(coordinator: Coordinator, member: Member) -> None:
    members = [member(id) for id in (0, 1)]
    for id, each in enumerate(members):
        each.report("waiting")
        until(lambda id=id: coordinator.report(id))
    assert [(each.world, each.called, each.closed) for each in members] == [(None, None, None)] * 2
    coordinator.tell(world=WORLD)
    until(lambda: all(each.world == WORLD for each in members))
    # On an own clock, but for the operator, whose clock is trusted to agree with those of nodes.
    skew_s = 0.0 if isinstance(coordinator, Operator) else -1e6
    coordinator.tell(called=Called(2, "more come", True, time.time() + skew_s + 100, leave_s=100.0))
    until(lambda: all(each.called and each.called.generation == 2 for each in members))
    for each in members:
        assert each.called
        assert (each.called.reason, each.called.planned) == ("more come", True)
        assert 0 < each.called.deadline - time.time() <= 100
    coordinator.tell(world=World(2, (1, 0), "10.0.0.2:5", "more came", 6.0))
    until(lambda: all(each.world and each.world.members == (1, 0) for each in members))
    coordinator.tell(closed=Closed("all done", contract.Exit.DONE, "JobSucceeded"))
    until(lambda: all(each.closed for each in members))
    assert {each.closed for each in members} == {Closed("all done", contract.Exit.DONE, "JobSucceeded")}


def test_an_outage_loses_nothing_of_either_side_and_is_said_once(
    coordinator: Coordinator, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, back = coordinator.outage
    coordinator.cut()
    one = member(0)
    one.report("waiting")
    coordinator.mend()
    until(lambda: coordinator.report(0))
    coordinator.tell(world=ALONE)
    until(lambda: one.world)
    out = io.StringIO()  # capfd loses what is printed between its reading and its truncating
    monkeypatch.setattr(sys, "stdout", out)
    coordinator.cut()
    one.report("waiting", generation=1, failed=True, failure=FAILED)
    until(lambda: away in out.getvalue())
    assert (one.world, one.closed) == (ALONE, None)
    coordinator.mend()
    until(lambda: (report := coordinator.report(0)) and report.failure == FAILED)
    coordinator.tell(world=World(2, (0,), "10.0.0.1:5", "again", 6.0))
    until(lambda: one.world and one.world.generation == 2)
    assert one.closed is None, "it is the same process that connects again"
    until(lambda: back in out.getvalue())
    assert len(out.getvalue().splitlines()) == 2 * bool(away)


def test_of_two_processes_of_one_index_the_later_is_the_member_and_the_other_leaves(
    coordinator: Coordinator, member: Member
) -> None:
    old = member(0, "old")
    old.report("training", generation=1)
    until(lambda: coordinator.report(0))
    new = member(0, "new")
    new.report("waiting")
    until(lambda: standing(coordinator, 0) == "waiting")
    old.report("training", generation=1, failed=True)
    until(lambda: old.closed)
    assert old.closed
    assert (old.closed.code, "in the place of this one" in old.closed.reason) == (contract.Exit.INTERRUPTED, True)
    assert (standing(coordinator, 0), new.closed) == ("waiting", None)


def test_who_goes_says_its_last_word_first_and_ends_its_threads(coordinator: Coordinator, member: Member) -> None:
    before = set(threading.enumerate())
    one, other = member(0), member(1)
    for each in (one, other):
        each.report("waiting")
    until(lambda: coordinator.report(0) and coordinator.report(1))
    one.report("leaving")
    one.close()
    until(lambda: coordinator.report(0) is None)
    assert standing(coordinator, 1) == "waiting"
    other.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("outlast-")]


def test_who_goes_waits_for_nobody_that_is_away(
    coordinator: Coordinator, trains: transport.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_client, "LAST_S", 3600)
    coordinator.cut()
    trains.report("leaving")
    trains.close()


def test_news_that_cannot_be_processed_once_deafens_nobody(
    coordinator: Coordinator, member: Member, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one, mistakes = member(0), [TypeError("a mistake")]
    watch = one._board.watch

    def failing() -> Iterator[bool]:
        for each in watch():
            if mistakes:
                raise mistakes.pop()
            yield each

    monkeypatch.setattr(one._board, "watch", failing)
    one.report("waiting")
    until(lambda: coordinator.report(0))
    coordinator.tell(world=ALONE)
    until(lambda: one.world)
    assert "news could not be processed; trying again" in capfd.readouterr().out


def test_what_makes_no_sense_is_said_and_passed_over(
    coordinator: Coordinator, trains: transport.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator.garble()
    until(lambda: re.search(r"outlast \| .*(invalid|is missing)", capfd.readouterr().out))
    assert (trains.world, trains.closed) == (ALONE, None)
    coordinator.tell(closed=Closed("all done", contract.Exit.DONE))
    until(lambda: trains.closed)
    assert trains.closed == Closed("all done", contract.Exit.DONE)


def test_a_member_of_a_run_that_is_over_is_no_member_of_the_next(coordinator: Coordinator, trains: transport.Client) -> None:
    coordinator.another_run()
    closed = until(lambda: trains.closed)
    assert (closed.code, closed.reason.startswith("run run is over")) == (contract.Exit.FAILED, True)
