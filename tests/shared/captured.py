"""A world of one with an agent, whose state is captured again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.job.contract import Env
from outlast.storage.snapshots import client, election, server
from outlast.storage.snapshots.election import Held
from outlast.storage.snapshots.parts import Part
from outlast.training import device
from outlast.training.state import capture, checkpoint
from outlast.training.state.memory_reader import Reader


class Rank:
    """A world of one with an agent, whose state is captured again and again."""

    def __init__(self, directory: Path) -> None:
        environ = {Env.RUN: "r", Env.STATE: str(directory), Env.RENDEZVOUS_KEY: "secret"}
        self.server = server.Server(environ, 64 << 20, lambda: None)
        self.server.start()
        connected = client.connect(environ)
        assert connected is not None
        self.client, self.step = connected, 0

    def begin(self, state: dict[str, Any], rank: int = 0, accelerator: device.Device | None = None) -> None:
        self.state, self.rank = state, rank
        self.capture = capture.Capture(state, rank, (0, 1), accelerator)

    def take(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Take a snapshot, and wait until it is held; `meanwhile` is what training does while it is copied."""
        self.step += 1
        at, before = (1, self.step), (1, self.step - 1)
        contents = self.capture.prepare(b"{}")
        rooms = [self.client.room(capture.size(content, objects), at, before) for content, objects in contents]
        copied = self.capture.copy([(content, room) for (content, _), room in zip(contents, rooms, strict=True)])
        meanwhile()
        copied()
        for (content, objects), room in zip(contents, rooms, strict=True):
            index, size = capture.placed(content, objects, room)
            part = Part("r", 1, self.step, 1, 0, 0, 0, 1, content.kind, bytes=size)
            self.client.publish(room, part, index, complete=before)
        while any(self.client.poll()[kind, self.step] == "" for kind in ("shared", "unique")):
            pass
        assert {self.client.poll()[kind, self.step] for kind in ("shared", "unique")} == {"held"}

    def loaded(self, into: dict[str, Any]) -> dict[str, Any]:
        """The newest snapshot, loaded into a state."""
        held = [Held(part, self.client.address) for part in self.client.catalog()]
        candidate = election.newest(held, "r", 1).candidates[0]
        assert candidate.at == (1, self.step)
        reader = Reader(candidate, self.client, 0, pytest.fail)
        reader.learn()
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
    """A thing whose state grows."""

    size = 1 << 10

    def state_dict(self) -> dict[str, bytes]:
        return {"data": bytes(self.size)}

    def load_state_dict(self, state: dict[str, bytes]) -> None: ...
