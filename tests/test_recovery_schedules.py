"""Worlds that are struck three times by chance, with memory only: the newest state that is left wins, and no bit differs.

Ten of 200 schedules; OUTLAST_TEST_SCHEDULES=200 for all.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import worlds
from outlast.workerfiles import progress
from test_memory import SELDOM, Agents, restored, same
from worlds import Calm, Training

RANKS = 3


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for each in agents.servers.values():
        each.close()


def moment(agents: Agents, generation: int, rng: random.Random) -> tuple[str, Callable[[], bool]]:
    """When to strike: at a step, while a snapshot is made or replicated, or while the world finds out where to go on."""
    step = rng.randrange(2, 17)

    def records() -> list[progress.Progress]:
        found = (progress.read(agents.output / "workers" / str(rank), 0) for rank in range(RANKS))
        return [each for each in found if each and each.generation == generation]

    def parts() -> list[int]:
        return [part.step for agent in agents.servers.values() for part in agent.rooms.parts() if part.generation == generation]

    match kind := rng.choice(["step", "snapshot", "replication", "election"]):
        case "step":
            return kind, lambda: any(each.step >= step for each in records())
        case "snapshot":  # some parts of the newest are held
            return kind, lambda: any(0 < parts().count(at) < 2 * RANKS for at in parts() if at >= step)
        case "replication":  # all, but not all replicas
            return kind, lambda: any(2 * RANKS <= parts().count(at) < 3 * RANKS for at in parts() if at >= step)
        case _:
            return kind, lambda: any(each.phase == "restore" for each in records())


def strike(agents: Agents, plan: Training, generation: int, rng: random.Random) -> None:
    """Train until the moment comes, or to the end; then kill a process, all, or a worker with its memory, and so the world."""
    program = functools.partial(worlds.train, plan)
    processes = worlds.started(program, agents.output, RANKS, generation=generation, **SELDOM)
    _, come = moment(agents, generation, rng)
    while not come() and all(process.is_alive() for process in processes):
        time.sleep(0.001)
    for process in rng.sample(processes, rng.choice([1, 1, RANKS])):
        process.kill()
    if rng.random() < 0.4:  # one, as there is one replica
        lost = rng.randrange(RANKS)
        processes[lost].kill()
        agents.lose(lost)
        agents.start(lost)
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("OUTLAST_TEST_SCHEDULES", "10"))))
def test_a_random_schedule_of_losses_ends_with_the_same_bits_from_memory_alone(agents: Agents, calm: Calm, seed: int):
    rng = random.Random(seed)
    plan = Training("mlp", rng.choice(["sgd", "adamw"]), sharded=rng.random() < 0.5)
    eager = Training(plan.net, plan.optimizer, sharded=plan.sharded, eager=True, pause_s=0.01)
    for rank in range(RANKS):
        agents.start(rank)
    for generation in (1, 2, 3):
        strike(agents, eager, generation, rng)
    reads = len(agents.store_reads)
    expected = agents.newest(4).at if agents.has(4) else (0, 0)
    end = agents.train(eager, RANKS, 4)
    assert end.codes == [0] * RANKS, end.errors
    assert restored(end)["step"] == expected[1], "neither older nor newer than what was left"
    assert len(agents.store_reads) == reads + (expected == (0, 0)), "a store is asked only where nobody has a snapshot"
    assert same(end, calm(plan, RANKS))
