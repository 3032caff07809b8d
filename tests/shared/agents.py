"""Agents without workers: what they do for the snapshots of ranks, in this process; and what worlds with them leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import worlds
from outlast.job.contract import Env
from outlast.storage.snapshots import election, server
from outlast.storage.snapshots.election import Held
from waits import until
from worlds import Ended, Training

SELDOM = {Env.CHECKPOINT_EVERY: "1000 steps"}
"""No checkpoint while it lasts: what is resumed is in memory."""


class Agents:
    """What agents do for snapshots, in this process: one for each rank of the worlds in an output."""

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
        self.servers[worker].start()

    def lose(self, worker: int) -> None:
        """The memory of a worker is gone with it."""
        self.servers.pop(worker).close()

    def train(self, plan: Training, ranks: int, generation: int = 1, **env: str) -> Ended:
        """Train with as many workers, each with an agent and one rank."""
        for worker in range(ranks):
            if worker not in self.servers:
                self.start(worker)
        return worlds.world(plan, self.output, ranks, generation=generation, **{**SELDOM, **env})

    def newest(self, generation: int) -> election.Candidate:
        """What is there to go on from."""
        return self._elected(generation).candidates[0]

    def has(self, generation: int) -> bool:
        """Whether there is anything to go on from."""
        return bool(self._elected(generation).candidates)

    def _elected(self, generation: int) -> election.Election:
        held = [Held(part, agent.address) for agent in self.servers.values() for part in agent.rooms.parts()]
        return election.newest(held, "r", generation)

    def settle(self) -> None:
        """Wait until what ranks have left behind is held."""
        until(lambda: not any(agent.rooms.busy() for agent in self.servers.values()))

    def damage(self, worker: int, kind: str, step: int, *, replica: bool = False) -> None:
        """Change a bit of the data of parts."""
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
    """The last event of a restore."""
    return [event for event in end.events if event["kind"] == "restored"][-1]


def same(end: Ended, calm: Ended) -> bool:
    """Whether every rank ends with the same bits and losses as undisturbed."""
    since = end.results[0]["resumed"]
    return all(
        (a["hash"], a["losses"]) == (b["hash"], b["losses"][since:]) for a, b in zip(end.results, calm.results, strict=True)
    )


def killed(plan: Training, at: int) -> Training:
    return dataclasses.replace(plan, kill_at=at, eager=True)
