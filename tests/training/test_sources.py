"""What is wrong with a snapshot is found when training goes on from memory, it is said, and the next best is read."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.base.errors import NotRestored, StoreError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.storage import checkpoints
from outlast.storage.snapshots import agent_messages, client, server
from outlast.storage.snapshots.client import Client
from outlast.storage.snapshots.part_format import Part
from outlast.training.state import background_save, checkpoint, newest_on_disks, resuming, snapshot_capture, snapshot_reader
from outlast.training.state.resuming import Restored
from outlast.training.state.shared_disks import Disks
from waits import until

MEMORY = 1 << 20


class Beside(Disks):
    """Of a rank that hears, when parts are listed, what the other worker lists."""

    other: Callable[[], list[tuple[str, Part]]] | None = None
    ways: tuple[tuple[int, int], ...] = ()
    """The ways back on the disk of the other."""

    def gather(self, value: Any) -> list[Any]:
        other, self.other = self.other, None
        listed = other() if other else []
        return [value, *(((), resuming.packed(address, [part], ways_back=self.ways)) for address, part in listed)]


class World:
    """Two workers of a rank each, with agents: they keep replicas of each other's parts. Worker 0 goes on alone."""

    def __init__(self, directory: Path, budget: int) -> None:
        self.directory = directory
        self.agents: list[server.Server] = []
        self.clients: list[Client] = []
        self.store_reads = 0
        self.stored: Callable[[], tuple[int, int] | None] = lambda: None
        """What the store says is its newest checkpoint."""
        self.coming: Path | None = None
        """What it has."""
        self.ways: tuple[tuple[int, int], ...] = ()
        for worker in range(2):
            environ = {Env.RUN: "r", Env.STATE: str(directory / str(worker)), Env.RENDEZVOUS_KEY: "secret"}
            Path(environ[Env.STATE]).mkdir()
            self.agents.append(server.Server(environ, budget, self._asked, lambda: self.stored()))
            self.agents[-1].rooms.headroom = lambda: 1 << 40  # whatever else fills this machine
            self.agents[-1].start()
            self.clients.append(self.connected(worker))
        self.other: Callable[[], list[tuple[str, Part]]] = lambda: self.listed(1)

    def connected(self, worker: int) -> Client:
        return client.connect({Env.STATE: str(self.directory / str(worker))})

    def _asked(self) -> None:
        self.store_reads += 1
        if self.coming is None:
            raise StoreError("the store is away", retry=True)
        shutil.copytree(self.coming, self.directory / self.coming.name)

    def saved(self, step: int, where: str = ".") -> Path:
        """A checkpoint of this step, in generation 1."""
        directory = self.directory / where
        directory.mkdir(exist_ok=True)
        checkpoints.acquire(directory, "r", 1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        writer = background_save.Saver(directory, "r", 1, retention=checkpoints.Retention(2), report=lambda *_, **__: None)
        writer.begin(step, checkpoint.capture(self.state(step), rank=0, ranks=1))
        assert writer.wait() == background_save.Outcome(step, committed=True)
        writer.close()
        dist.destroy_process_group()
        return directory / contract.checkpoint_name(step)

    def listed(self, worker: int) -> list[tuple[str, Part]]:
        return [(self.agents[worker].address, part) for part in self.clients[worker].catalog()]

    def state(self, step: int = 0) -> dict[str, Any]:
        net = torch.nn.Linear(8, 8)
        for parameter in net.parameters():
            parameter.data.fill_(step)
        return {"net": net}

    def take(self, step: int, kinds: tuple[str, ...] = ("shared", "unique")) -> None:
        """Both take a snapshot; of the last rank only these kinds are complete."""
        at, before = (1, step), (1, step - 1)
        for rank, of in enumerate(self.clients):
            capturing = snapshot_capture.Capture(self.state(step), rank, (0, 1))
            contents = capturing.prepare(b"{}" if rank == 0 else b"")
            rooms = [of.room(snapshot_capture.size(content, objects), at, before) for content, objects in contents]
            capturing.copy([(content, room) for (content, _), room in zip(contents, rooms, strict=True)])()
            for (content, objects), room in zip(contents, rooms, strict=True):
                if rank == 1 and content.kind not in kinds:
                    continue
                index, size = snapshot_capture.write_objects(content, objects, room)
                to = [self.agents[1 - rank].address] if content.kind == "unique" else []
                part = Part("r", *at, 2, rank, rank, 0, 1, content.kind, bytes=size)
                of.publish(room, part, index, to=to, complete=before)
                until(lambda of=of, part=part: of.poll()[part.kind, step] == ("replicated" if part.kind == "unique" else "held"))

    def damage(self, *workers: int, **of: object) -> None:
        """Change a bit of these parts."""
        for worker in workers:
            rooms = self.agents[worker].rooms
            for part in rooms.parts():
                if all(getattr(part, name) == value for name, value in of.items()):
                    with rooms.opened(part) as room:
                        room.file.data[0] ^= 1

    @contextlib.contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """The port of worker 1's agent refuses everybody, for so long."""
        agent = self.agents[1]
        number = agent_messages.tcp.host_port(agent.address)[1]
        agent._port.close()

        def comes_back() -> None:
            agent._port._listener = socket.create_server(("127.0.0.1", number))
            agent._port._accept()

        timer = threading.Timer(seconds, comes_back)
        timer.start()
        yield
        timer.cancel()

    def restored(self) -> tuple[Restored, int]:
        """What worker 0 goes on from in the next generation, alone: what it says that was, and what is in its weights."""
        state, disks = self.state(), Beside([0], 0, None)
        disks.other, disks.ways = self.other, self.ways
        with contextlib.ExitStack() as held, contextlib.closing(self.connected(0)) as rank:
            search = newest_on_disks.Search(self.directory, "r", disks, (0, 1), held, lambda *_, **__: None)
            found = resuming.restore(state, search, rank, 2)
        [value] = set(state["net"].weight.flatten().tolist())
        return found, int(value)

    def close(self) -> None:
        for each in (*self.clients, *self.agents):
            each.close()


Made = Callable[[int], World]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with contextlib.ExitStack() as stack:

        def make(budget: int = MEMORY) -> World:
            world = World(tmp_path, budget)
            stack.callback(world.close)
            return world

        yield make


def torn(world: World) -> None:
    """Rank 1 died while it wrote its part of step 3."""
    world.take(3, kinds=("shared",))


def stale(world: World, agents: int = 1) -> None:
    """Worker 0's memory is used again after it was listed."""
    other = world.other

    def listed() -> list[tuple[str, Part]]:
        found = other()
        for agent in world.agents[:agents]:
            agent.rooms.forget((1, 1))
        return found

    world.other = listed


def gone(world: World) -> None:
    """All memory of step 2 is used again after it was listed."""
    stale(world, agents=2)


def foreign(world: World) -> None:
    """Worker 1 has snapshots of another run and of a generation that has not been."""
    listed = [(where, dataclasses.replace(part, run="s", step=9)) for where, part in world.listed(1)]
    listed += [(where, dataclasses.replace(part, generation=3)) for where, part in world.listed(1)]
    world.other = lambda: listed


def wrong_here(world: World) -> None:
    world.damage(0, kind="unique", step=2)


def wrong_everywhere(world: World) -> None:
    world.damage(0, 1, kind="unique", step=2, rank=0)


def lying_of_its_own(world: World) -> None:
    """Worker 1 says that its parts of step 2 are of step 7."""
    own = [(where, part) for where, part in world.listed(1) if part.step == 2 and not part.replica]
    listed = [(where, dataclasses.replace(part, step=7)) for where, part in own]
    world.other = lambda: listed


def lying_of_all(world: World) -> None:
    """Worker 1 says that it has everything of step 7."""
    every = [part for worker in range(2) for _, part in world.listed(worker) if part.step == 2 and not part.replica]
    listed = [(world.agents[1].address, dataclasses.replace(part, step=7)) for part in every]
    world.other = lambda: [*world.listed(1), *listed]


def handing_out_another(world: World) -> None:
    """Worker 0's weights of step 2 are damaged, and worker 1 hands out those of step 1 for them."""
    world.damage(0, kind="shared", step=2)
    rooms, listed = world.agents[1].rooms, world.listed(1)
    world.other = lambda: listed
    new, old = (next(part for part in rooms.parts() if (part.kind, part.step) == ("shared", step)) for step in (2, 1))
    with rooms.opened(new) as one, rooms.opened(old) as other:
        one.part, other.part = old, new


@pytest.mark.parametrize(
    ("wrong", "step", "source", "said"),
    [
        (torn, 2, "memory", ["the snapshot of step 3 (generation 1) lacks what rank 1 of 2 alone had"]),
        (stale, 2, "peer", ["is not in the memory of this worker any more (in the memory of worker 0", "another copy is read"]),
        (
            gone,
            1,
            "memory",
            ["the snapshot of step 2 (generation 1) cannot be used: rank 0:", "not in the memory of this worker"],
        ),
        (foreign, 2, "memory", ["run s is another run than r: its snapshot of step 9 does", "generation 3 is not over"]),
        (wrong_here, 2, "peer", ["has a wrong checksum in a snapshot (in the memory of worker 0", "another copy is read"]),
        (wrong_everywhere, 1, "memory", ["step 2 (generation 1) cannot be used: rank 0: rng/0 has a wrong checksum"]),
        (lying_of_its_own, 2, "memory", ["the snapshot of step 7 (generation 1) lacks what rank 0 of 2 alone had"]),
        (lying_of_all, 2, "memory", ["the snapshot of step 7 (generation 1) cannot be used", "not in the memory of this worker"]),
        (
            handing_out_another,
            1,
            "memory",
            ["another copy is read", "the index of the shared part of rank 1 of step 2 (generation 1) has digest"],
        ),
    ],
)
def test_what_is_wrong_is_found_and_said_and_the_next_best_is_read(
    made: Made, caplog: pytest.LogCaptureFixture, wrong: Callable[[World], None], step: int, source: str, said: list[str]
) -> None:
    world = made(MEMORY)
    world.take(1)
    world.take(2)
    wrong(world)
    with caplog.at_level(logging.WARNING, "outlast"):
        found, value = world.restored()
    assert (found.at, value, found.source, world.store_reads) == ((1, step), step, source, 0)
    for each in said:
        assert each in caplog.text


def test_whoever_has_the_newest_state_may_be_away_for_a_moment(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    world = made(MEMORY)
    world.take(1)
    world.take(2)
    world.agents[0].rooms.forget(None)
    with caplog.at_level(logging.WARNING, "outlast"), world.away(1.0):
        found, value = world.restored()
    assert (found.at, value, found.source) == ((1, 2), 2, "peer")
    assert caplog.text.count("it is tried again") == 1
    assert "step 1" not in caplog.text


def test_nothing_is_given_up_while_nothing_is_loaded_and_the_next_start_tries_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_reader, "PATIENCE_S", 0.2)
    world = made(MEMORY)
    world.take(1)
    world.take(2)
    for room in world.agents[0].rooms._rooms.values():
        if room.part and (room.part.kind, room.part.rank) == ("unique", 0):
            room.clear()
    listed = world.listed(0), world.listed(1)
    reason = "no snapshot in memory could be read, and there is no checkpoint; the next start tries again"
    with world.away(60), pytest.raises(NotRestored, match=reason):
        world.restored()
    assert (world.listed(0), world.listed(1)) == listed
    with world.away(0):
        found, value = world.restored()
    assert (found.at, value) == ((1, 2), 2)


def test_what_is_out_of_reach_for_long_gives_way_to_the_next_best_with_a_warning_that_names_both(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_reader, "PATIENCE_S", 0.2)
    world = made(MEMORY)
    world.saved(1)
    world.take(2)
    world.agents[0].rooms.forget(None)
    with caplog.at_level(logging.WARNING, "outlast"), world.away(60):
        found, value = world.restored()
    assert (found.step, value, found.source) == (1, 1, "disk")
    assert "the snapshot of step 2 (generation 1) is out of reach: rank 0: the unique part of rank" in caplog.text
    assert "training goes on from step 1 instead of step 2" in caplog.text


@pytest.mark.parametrize(
    ("stored", "disk", "step", "source", "reads"),
    [(5, 3, 5, "store", 1), (5, 0, 5, "store", 1), (2, 0, 2, "memory", 0), (1, 3, 3, "disk", 0), (0, 0, 2, "memory", 0)],
)
def test_the_latest_of_memory_disk_and_store_counts(
    made: Made, stored: int, disk: int, step: int, source: str, reads: int
) -> None:
    """Snapshots may have ended long ago, and the last ones may have been saved where nobody is left."""
    world = made(MEMORY)
    world.take(1)
    world.take(2)
    if disk:
        world.saved(disk)
    if stored:
        world.coming = world.saved(stored, "store")
        world.stored = lambda: (1, stored)
    found, value = world.restored()
    assert (found.step, value, found.source, world.store_reads) == (step, step, source, reads)


@pytest.mark.parametrize(
    ("agreed", "source", "reads", "here"), [(2, "memory", 0, True), (1, "memory", 0, False), (0, "", 1, False)]
)
def test_states_after_a_way_back_do_not_count_wherever_they_are(
    made: Made, agreed: int, source: str, reads: int, here: bool
) -> None:
    """The way back is recorded on the disk here, or only on the other worker's."""
    world = made(MEMORY)
    world.take(1)
    world.take(2)
    late = world.saved(3)
    world.coming, world.stored = world.saved(5, "store"), lambda: (1, 5)
    if here:
        checkpoints.withdraw(world.directory, "r", [(1, agreed)])
    else:
        world.ways = ((1, agreed),)
    found, value = world.restored()
    assert (found.step, value, found.source, world.store_reads) == (agreed, agreed, source, reads)
    assert (found.most, found.committed) == (agreed, 0)
    assert checkpoints.ways_back(world.directory, "r") == [(1, agreed)]
    assert checkpoints.verify(late.with_name(f"{late.name}.withdrawn-0")) is None


@pytest.mark.parametrize("silent", [True, False])
def test_a_store_that_does_not_answer_does_not_keep_a_job_from_what_is_in_memory(
    made: Made, silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_NEWEST_S", 0.1)
    world = made(MEMORY)
    world.take(1)
    answers = threading.Event()
    world.stored = (lambda: (answers.wait(), None)[1]) if silent else lambda: (1, 5)
    with caplog.at_level(logging.WARNING, "outlast"):
        found, value = world.restored()
    answers.set()
    assert (found.at, value, found.source) == ((1, 1), 1, "memory")
    assert ("the store has not answered within" if silent else "step 5 is in the store and cannot be fetched") in caplog.text
