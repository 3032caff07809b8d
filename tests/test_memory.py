"""Training that goes on from the memory of its agents: the same bits, no step again, no store, whatever is lost or damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import worlds
from outlast import contract
from outlast.contract import Env
from outlast.snapshots import server
from worlds import LAST, Calm, Ended, Training, hashes

KEY = "secret of the run"


class Agents:
    """The memory of agents in this process, one for each rank of a world without checkpoints on its way."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.servers: dict[int, server.Server] = {}
        self.store_reads: list[int] = []

    def start(self, worker: int, budget: int = 64 << 20) -> server.Server:
        state = self.output / "workers" / str(worker)
        state.mkdir(parents=True, exist_ok=True)
        environ = {Env.RUN: "r", Env.STATE: str(state), Env.RENDEZVOUS_KEY: KEY, "OUTLAST_NODE": f"n{worker}"}
        self.servers[worker] = server.Server(environ, budget, lambda: self.store_reads.append(worker))
        self.servers[worker].start()
        return self.servers[worker]

    def lose(self, worker: int) -> None:
        """The machine of a worker is gone, and another one comes."""
        self.servers.pop(worker).close()

    def world(self, plan: Training, ranks: int, generation: int = 1, **env: str) -> Ended:
        """Train with as many workers, each with an agent."""
        for worker in range(ranks):
            if worker not in self.servers:
                self.start(worker)
        processes = started(functools.partial(worlds.train, plan), self.output, ranks, generation, **env)
        return worlds.ended(processes, self.output)


def started(program: Any, output: Path, ranks: int, generation: int, **env: str) -> Any:
    names = [str(rank) for rank in range(ranks)]
    return worlds.started(program, output, ranks, generation=generation, disks=names, **env)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for each in agents.servers.values():
        each.close()
