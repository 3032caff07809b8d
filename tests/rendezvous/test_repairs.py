"""Members whose coordinator says nothing: with real meshes and stores, their processes only imagined."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outlast.job import contract
from outlast.job.workerfiles import notice_file, progress_file
from outlast.rendezvous import world_store
from outlast.rendezvous.membership import Membership
from outlast.rendezvous.messages import Called, Closed, Report
from outlast.rendezvous.repairs import Repairs
from outlast.rendezvous.who_trains import World
from waits import until

KILLED = {"rank": 1, "code": 137, "reason": "rank 1 on worker 1 was killed by SIGKILL", "time": 5.0, "echo": False}


class Client:
    """A member's side of a transport whose coordinator has published one world and is away since."""

    def __init__(self, id: int, members: tuple[int, ...]) -> None:
        self.id = id
        self.members = members
        self.called: Called | None = None
        self.closed: Closed | None = None
        self.world: World | None = None
        self.said = Report("r", id, "waiting")
        self.reports: list[Report] = []
        self._changed = threading.Condition()

    def report(self, standing: str, **fields: Any) -> None:
        with self._changed:
            self.said = self.said.changed(standing, **fields)
            self.reports.append(self.said)

    def amend(self, **fields: Any) -> None:
        self.said = dataclasses.replace(self.said, **fields)

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(min(timeout_s, 0.02))

    def close(self) -> None:
        pass


class Members:
    """The agents of a world. `start` forms it; later each thread does what torch's agent does."""

    def __init__(self, directory: Path, size: int, faster: float) -> None:
        self.clients = [Client(id, tuple(range(size))) for id in range(size)]
        self.members = []
        for client in self.clients:
            state = directory / str(client.id)
            state.mkdir()
            member = Membership(client, run_id="r", state=state, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
            member.key, member.repairs = b"k" * 32, Repairs(client.id, 10, lambda: faster * time.monotonic())
            self.members.append(member)
        self.pool = ThreadPoolExecutor(size)
        self.busy: tuple[int, ...] = ()
        """Those that do something else."""

    def start(self) -> None:
        started = [self.pool.submit(member.next_world, world_store.connect) for member in self.members]
        until(lambda: all(client.said.address for client in self.clients))
        for client in self.clients:
            meshes = tuple(each.said.mesh_address for each in self.clients)
            client.world = World(1, client.members, self.clients[0].said.address, "training starts", mesh_addresses=meshes)
        self.met(started)
        if len(self.clients) > 1:
            until(lambda: all(member.mesh and member.mesh.complete for member in self.members))

    def fail(self, id: int, failure: dict[str, Any] = KILLED) -> list[Future[Any]]:
        """Processes of one fail; the others train until they are asked to stop."""

        def trains(member: Membership) -> Any:
            if member is self.members[id]:
                member.failed(failure)
            else:
                until(lambda: member.must_stop() or member.closed)
            return member.next_world(world_store.connect)

        return [self.pool.submit(trains, member) for each, member in enumerate(self.members) if each not in self.busy]

    def met(self, futures: list[Future[Any]]) -> None:
        """All are in one world, and its store works."""
        stores = [future.result(timeout=60) for future in futures]
        stores[0].set(f"greeting-{self.members[0].attempt}", "hello")
        assert all(store.get(f"greeting-{self.members[0].attempt}") == b"hello" for store in stores)
        assert [member.rank for member in self.members] == [*range(len(stores))]

    def end(self) -> None:
        for client in self.clients:
            client.closed = Closed("over", 0)
        self.pool.shutdown()
        for member in self.members:
            member.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(size: int, faster: float = 1.0) -> Members:
        made.append(Members(tmp_path, size, faster))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("size", [1, 3])
def test_members_meet_again_in_the_same_generation_at_a_fresh_store(members: Callable[..., Members], size: int) -> None:
    world = members(size)
    for attempt in (1, 2):
        world.met(world.fail(size // 2))
        assert [member.attempt for member in world.members] == [attempt] * size
        assert {member.numbers[contract.Env.ATTEMPT] for member in world.members} == {str(attempt)}
        assert {(client.said.standing, client.said.generation, client.said.attempt) for client in world.clients} == {
            ("training", 1, attempt)
        }
    past = [{"generation": 1, "attempt": attempt, "worker": size // 2, "failure": KILLED} for attempt in (1, 2)]
    told = [[{**each} for each in client.said.past] for client in world.clients]
    for each in told:
        assert 0 < each[0].pop("at") < each[1].pop("at"), "by the clock of the member"
    assert told == [past] * size
    assert not any(report.failed for client in world.clients for report in client.reports)


def leaves(world: Members) -> None:
    notice_file.write(world.members[2].notice, "leave", "evicted", time.time() + 60)


def hears_a_call(world: Members) -> None:
    world.clients[2].called = Called(2, "lost worker 7", False, time.time() + 60)


def has_finished(world: Members) -> None:
    world.members[2].done()
    world.pool.submit(world.members[2].next_world, world_store.connect)
    until(lambda: world.clients[2].said.standing == "done")
    world.busy = (2,)


def is_of_another_version(world: Members) -> None:
    mesh = world.members[2].mesh
    assert mesh is not None
    del mesh.handlers["attempt"]


def is_gone(world: Members) -> None:
    mesh = world.members[2].mesh
    assert mesh is not None
    mesh.close()


@pytest.mark.parametrize("what", [leaves, hears_a_call, has_finished, is_of_another_version, is_gone])
def test_the_coordinator_decides_when_one_member_cannot(members: Callable[..., Members], what: Callable[..., None]) -> None:
    world = members(3)
    what(world)
    world.fail(1)
    until(lambda: world.clients[1].said.failed)
    assert world.clients[1].said.failure == KILLED
    assert [member.attempt for member in world.members] == [0, 0, 0]


def test_what_another_attempt_would_not_help_is_reported_as_ever(members: Callable[..., Members]) -> None:
    world = members(1)
    failure = {**KILLED, "code": 78}
    world.fail(0, failure)
    until(lambda: world.clients[0].said.failed)
    assert (world.clients[0].said.failure, world.members[0].attempt) == (failure, 0)


def test_a_call_that_comes_while_they_agree_is_followed(members: Callable[..., Members]) -> None:
    """One member's processes take long to end: the coordinator hears of the failure, and its call comes first."""
    world = members(2, 10.0)
    world.members[0].dies = lambda: True
    world.fail(1)
    until(lambda: world.clients[1].said.failed, 30)
    for client in world.clients:
        client.called = Called(2, KILLED["reason"], False, time.time() + 60)
    world.members[0].dies = lambda: False
    until(lambda: world.clients[0].said.standing == "waiting")
    assert [member.attempt for member in world.members] == [0, 0]


def test_what_was_held_before_a_world_is_told_once(members: Callable[..., Members]) -> None:
    world = members(1)
    writer = progress_file.Writer(world.members[0]._state, 0)
    writer.write(progress_file.Progress(generation=1, rank=0, phase="train", snapshot=20))
    world.clients[0].called = Called(2, "growing", False, time.time() + 60)
    [joins] = world.fail(0)
    until(lambda: world.clients[0].said.standing == "waiting")
    assert world.clients[0].said.held == 20
    world.clients[0].world = World(2, (0,), world.clients[0].said.address, "growing")
    joins.result(timeout=60)
    assert (world.clients[0].said.standing, world.clients[0].said.held) == ("training", 0)
    writer.close()


def test_members_that_were_late_go_on_when_the_last_is_ready(members: Callable[..., Members]) -> None:
    world = members(2, 10.0)
    world.members[0].dies = lambda: True
    futures = world.fail(1)
    until(lambda: world.clients[1].said.failed, 30)
    world.members[0].dies = lambda: False
    world.met(futures)
    assert [(client.said.standing, client.said.failed, client.said.attempt) for client in world.clients] == [
        ("training", False, 1)
    ] * 2


def test_a_pause_before_the_next_start_ends_when_the_worker_is_told_to_leave(members: Callable[..., Members]) -> None:
    alone = members(1)
    (member,) = alone.members
    member.pause_s = 600.0
    (started,) = alone.fail(0)
    until(lambda: member.attempt == 1)
    assert not started.done()
    notice_file.write(member.notice, "leave", "its node goes", time.time() + 60)
    assert started.result(timeout=60)
    assert member.world.members == (0,)
