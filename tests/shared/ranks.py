"""Worlds of ranks with agents in this process, for tests of capturing, losing and restoring state; and a sharded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import worlds
from outlast.job.contract import Env
from outlast.storage.snapshots import client, newest_snapshot, server
from outlast.storage.snapshots.newest_snapshot import Held
from outlast.storage.snapshots.part_format import Part
from outlast.training import device
from outlast.training.state import checkpoint, snapshot_capture
from outlast.training.state.snapshot_reader import Reader
from waits import until
from worlds import Ended, Training

SELDOM = {Env.CHECKPOINT_EVERY: "1000 steps"}
"""Environment without checkpoints during the test, so that a resume uses snapshots in memory."""


class Agents:
    """Snapshot side of agents, in this process: an agent per rank of the worlds in an output."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.servers: dict[int, server.Server] = {}
        self.store_reads: list[int] = []

    def start(self, worker: int, budget: int = 64 << 20, *, node: int | None = None) -> None:
        state = self.output / "workers" / str(worker)
        state.mkdir(parents=True, exist_ok=True)
        place = {Env.NODE: f"n{worker if node is None else node}"}
        environ = {Env.RUN: "r", Env.STATE: str(state), Env.RENDEZVOUS_KEY: "secret", **place}
        self.servers[worker] = server.Server(environ, budget, lambda: self.store_reads.append(worker))
        self.servers[worker].rooms.headroom = lambda: 1 << 40  # whatever else fills this machine
        self.servers[worker].start()

    def lose(self, worker: int) -> None:
        """Drop a worker's agent with its memory."""
        self.servers.pop(worker).close()

    def train(self, plan: Training, ranks: int, generation: int = 1, **env: str) -> Ended:
        """Train with this number of workers, each with an agent and one rank."""
        for worker in range(ranks):
            if worker not in self.servers:
                self.start(worker)
        return worlds.world(plan, self.output, ranks, generation=generation, **{**SELDOM, **env})

    def newest(self, generation: int) -> newest_snapshot.Candidate:
        return self._elected(generation).candidates[0]

    def has(self, generation: int) -> bool:
        return bool(self._elected(generation).candidates)

    def _elected(self, generation: int) -> newest_snapshot.Election:
        held = [Held(part, agent.address) for agent in self.servers.values() for part in agent.rooms.parts()]
        return newest_snapshot.newest(held, "r", generation)

    def settle(self) -> None:
        until(lambda: not any(agent.rooms.busy() for agent in self.servers.values()))

    def damage(self, worker: int, kind: str, step: int, *, replica: bool = False) -> None:
        """Flip a bit of the data of parts."""
        for part in self.servers[worker].rooms.parts():
            if (part.kind, part.step, part.replica) == (kind, step, replica):
                with self.servers[worker].rooms.opened(part) as room:
                    room.file.data[0] ^= 1


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for each in agents.servers.values():
        each.close()


def resumed(end: Ended) -> int:
    assert end.codes == [0] * len(end.codes), end.errors
    [step] = {result["resumed"] for result in end.results}
    return int(step)


def restored(end: Ended) -> dict[str, Any]:
    return [event for event in end.events if event["kind"] == "restored"][-1]


def same(end: Ended, calm: Ended) -> bool:
    """Return whether every rank ends with the same bits and losses as the undisturbed run."""
    since = end.results[0]["resumed"]
    return all(
        (a["hash"], a["losses"]) == (b["hash"], b["losses"][since:]) for a, b in zip(end.results, calm.results, strict=True)
    )


def killed(plan: Training, at: int) -> Training:
    return dataclasses.replace(plan, kill_at=at, eager=True)


class Rank:
    """World of one rank with an agent, whose state is captured repeatedly."""

    def __init__(self, directory: Path) -> None:
        environ = {Env.RUN: "r", Env.STATE: str(directory), Env.RENDEZVOUS_KEY: "secret"}
        self.server = server.Server(environ, 64 << 20, lambda: None)
        self.server.rooms.headroom = lambda: 1 << 40  # whatever else fills this machine
        self.server.start()
        connected = client.connect(environ)
        assert connected is not None
        self.client, self.step = connected, 0

    def begin(self, state: dict[str, Any], rank: int = 0, accelerator: device.Device | None = None) -> None:
        self.state, self.rank = state, rank
        self.capture = snapshot_capture.Capture(state, rank, (0, 1), accelerator)

    def take(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Take a snapshot, and wait until the agent holds it. Calls `meanwhile` while the state is copied."""
        self.step += 1
        at, before = (1, self.step), (1, self.step - 1)
        contents = self.capture.prepare(b"{}")
        rooms = [self.client.room(snapshot_capture.size(content, objects), at, before) for content, objects in contents]
        copied = self.capture.copy([(content, room) for (content, _), room in zip(contents, rooms, strict=True)])
        meanwhile()
        copied()
        for (content, objects), room in zip(contents, rooms, strict=True):
            index, size = snapshot_capture.write_objects(content, objects, room)
            part = Part("r", 1, self.step, 1, 0, 0, 0, 1, content.kind, bytes=size)
            self.client.publish(room, part, index, complete=before)
        while any(self.client.poll()[kind, self.step] == "" for kind in ("shared", "unique")):
            pass
        assert {self.client.poll()[kind, self.step] for kind in ("shared", "unique")} == {"held"}

    def loaded(self, into: dict[str, Any]) -> dict[str, Any]:
        held = [Held(part, self.client.address) for part in self.client.catalog()]
        candidate = newest_snapshot.newest(held, "r", 1).candidates[0]
        assert candidate.at == (1, self.step)
        reader = Reader(candidate, self.client, 0, pytest.fail)
        reader.read_indices()
        wanted = checkpoint.targets_of(reader.read_metadata(), into, 0)
        assert reader.covers(wanted)
        checkpoint.load(reader, "the snapshot", into, wanted)
        checkpoint.put(into, wanted, "the snapshot", 0)
        return into


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.client.close()
    rank.server.close()


def a_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


class Grown:
    """Object whose state grows."""

    size = 1 << 10

    def state_dict(self) -> dict[str, bytes]:
        return {"data": bytes(self.size)}

    def load_state_dict(self, state: dict[str, bytes]) -> None: ...
