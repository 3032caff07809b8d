"""Training that goes on from the memory of its agents: the same bits, each sample once, whatever is lost or damaged.

Worlds are struck three times by chance, with memory only: the newest state that is left wins, and no bit differs. A quarter each
has one replica, has two and may lose two workers at once, has two ranks in each worker, or has two workers on each node and may
lose a node; some of the first three are resized on the way. Ten of 200 schedules: OUTLAST_TEST_SCHEDULES=200 for all, 60:90 for
these. What each did is in its output (-rP). In others a worker is told to leave (-k leaves), or those that hold what the others
need are out of reach for 10 s (-k reach).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing.connection
import random
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerProcess

import pytest

import worlds
from outlast.job import contract
from outlast.job.contract import Env, Exit
from outlast.job.ledger import read
from outlast.job.workerfiles import progress_file
from outlast.job.workerfiles.progress_file import Progress
from outlast.storage import checkpoints
from ranks import SELDOM, Agents, killed, restored, resumed, same
from seeds import seeds
from worlds import Calm, Training

FIRST = 4
"""k until it is chosen."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the worlds of a schedule."""

    workers: tuple[int, ...] = (3, 3, 3, 3)
    """By generation."""
    local: int = 1
    """Ranks of each worker."""
    replicas: int = 1
    node: int = 1
    """Workers of each node. Whole nodes are lost."""

    def env(self) -> dict[str, str]:
        return {**SELDOM, Env.REPLICAS: str(self.replicas)}

    def nodes(self, workers: Iterable[int]) -> set[int]:
        """Where these workers are."""
        return {worker // self.node for worker in workers}


def drawn(rng: random.Random) -> Shape:
    sizes = rng.choice([(3, 3, 3, 3)] * 3 + [(3, 2, 3, 2), (2, 3, 2, 3)])
    twos = rng.choice([(2, 2, 2, 2), (2, 2, 2, 2), (2, 1, 2, 1)])
    return rng.choice([Shape(sizes), Shape(sizes, replicas=2), Shape(twos, local=2), Shape((4, 4, 4, 4), node=2)])


class Relay(socketserver.ThreadingTCPServer):
    """The way to the data port of an agent; while it is `cut` whoever comes is hung up on."""

    daemon_threads = True
    cut = False

    def __init__(self, to: str) -> None:
        self.to = int(to.rpartition(":")[2])
        super().__init__(("127.0.0.1", 0), Way)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Way(socketserver.BaseRequestHandler):
    """One connection through it."""

    server: Relay

    def handle(self) -> None:
        if self.server.cut:
            return
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.to)) as other:
            ends = {self.request: other, other: self.request}
            while not self.server.cut:
                for end in multiprocessing.connection.wait(list(ends), 0.1):
                    if not (data := end.recv(1 << 16)):
                        return
                    ends[end].sendall(data)


class Struck:
    """Worlds of one shape, and what is known of what they leave."""

    def __init__(self, agents: Agents, shape: Shape, plan: Training, rng: random.Random) -> None:
        self.agents, self.shape, self.plan, self.rng = agents, shape, plan, rng
        self.newest = 0, 0
        """What there is in memory to go on from."""
        self.saved = 0
        """The newest step that whoever left has saved."""
        self.floor = 0
        """The same, of the worlds before this one."""
        self.relays: list[Relay] = []
        self.lost: set[int] = set()
        """The nodes that were lost since a snapshot was complete."""
        self.survives = 0
        """How many it survives."""
        self.told: list[dict[str, object]] = []
        """Of each strike, what it was."""

    def records(self, generation: int) -> list[Progress]:
        """The last records of the ranks of a generation."""
        workers, local = self.shape.workers[generation - 1], range(self.shape.local)
        found = (progress_file.read(self.agents.output / "workers" / str(w), n) for w in range(workers) for n in local)
        return [each for each in found if each and each.generation == generation]

    def moment(self, generation: int) -> Callable[[], bool]:
        """When to strike: at a step, while a snapshot is made or replicated, or while the world finds out where to go on."""
        step, workers = self.rng.randrange(2, 17), self.shape.workers[generation - 1]
        held = 2 * workers * self.shape.local
        replicated = held + workers * self.shape.local * min(self.shape.replicas, workers - 1)

        def parts() -> list[int]:
            every = (part for agent in self.agents.servers.values() for part in agent.rooms.parts())
            return [part.step for part in every if part.generation == generation]

        kind = self.rng.choice(["step", "snapshot", "replication", *(["election"] if generation > 1 else [])])
        self.told.append({"at": kind})
        match kind:
            case "step":
                return lambda: any(each.step >= step for each in self.records(generation))
            case "snapshot":  # some parts of the newest are held
                return lambda: any(0 < parts().count(at) < held for at in parts() if at >= step)
            case "replication":  # all, but not all replicas
                return lambda: any(held <= parts().count(at) < replicated for at in parts() if at >= step)
            case _:
                return lambda: any(each.phase == "restore" for each in self.records(generation))

    def start(self, worker: int) -> None:
        """Start an agent, behind a relay."""
        self.agents.start(worker, node=worker // self.shape.node)
        port = self.agents.servers[worker]._port
        self.relays.append(Relay(port.address))
        port.address = self.relays[-1].address

    def strike(self, generation: int, *, leaves: bool = False) -> None:
        """Train until the moment comes; then kill a process, all, or workers with their memory, and at last the rest. If one
        `leaves` it is told so, and all save and end by themselves before workers are lost."""
        rng, workers, local = self.rng, self.shape.workers[generation - 1], self.shape.local
        reads = len(self.agents.store_reads)
        program = functools.partial(worlds.train, self.plan)
        how = self.shape.env()
        processes = worlds.started(program, self.agents.output, workers * local, generation=generation, local=local, **how)
        come = self.moment(generation)
        while not come() and all(process.is_alive() for process in processes):
            time.sleep(0.001)
        self.told[-1]["came"] = all(process.is_alive() for process in processes)
        if leaves:
            self.leave(rng.randrange(workers), processes)
        else:
            for process in rng.sample(processes, rng.choice([1, 1, len(processes)])):
                process.kill()
        lost = self.chosen(generation)
        for worker in lost:
            for process in processes[worker * local : (worker + 1) * local]:
                process.kill()
        for worker in lost:
            self.agents.lose(worker)
        for process in processes:
            process.kill()
            process.join()
        for worker in range(self.shape.workers[generation]):
            if worker not in self.agents.servers:
                self.start(worker)
        self.agents.settle()
        self.check(generation, lost, reads)

    def leave(self, worker: int, processes: list[ForkServerProcess]) -> None:
        """Tell a worker to leave, and wait until all have saved and ended."""
        notice = self.agents.output / "workers" / str(worker) / contract.NOTICE
        notice.write_text("{}")
        for process in processes:
            process.join(60)
        notice.unlink()
        assert {process.exitcode for process in processes} <= {0, Exit.INTERRUPTED}
        self.saved = max(each.step for each in checkpoints.list_(self.agents.output / contract.CHECKPOINTS))
        self.told[-1]["saved"] = self.saved

    def out_of_reach(self, generation: int, seconds: float) -> None:
        """Cut all ways between agents until so long after the ranks of a generation look for what to go on from."""

        def cut() -> None:
            while not any(each.phase == "restore" for each in self.records(generation)):
                time.sleep(0.001)
            time.sleep(seconds)
            for relay in self.relays:
                relay.cut = False

        for relay in self.relays:
            relay.cut = True
        threading.Thread(target=cut, daemon=True).start()

    def chosen(self, generation: int) -> list[int]:
        """The workers that are lost: those that the next world does not have, and of as many nodes as there are replicas."""
        workers, rng = range(self.shape.workers[generation - 1]), self.rng
        left = set(range(self.shape.workers[generation], len(workers)))
        more = rng.choice([0, 0, self.shape.replicas, self.shape.replicas]) - len(self.shape.nodes(left))
        others = sorted(self.shape.nodes(workers) - self.shape.nodes(left))
        nodes = self.shape.nodes(left) | set(rng.sample(others, min(max(0, more), len(others) - 1)))
        self.told[-1]["lost"] = lost = [worker for worker in workers if worker // self.shape.node in nodes]
        return lost

    def check(self, generation: int, lost: list[int], reads: int) -> None:
        """Whether the world began with the newest there was, and has left what it must."""
        records, before = self.records(generation), self.newest
        began = [
            e["step"]
            for e in read(self.agents.output / contract.LEDGER)
            if (e["kind"], e.get("generation")) == ("restored", generation)
        ]
        assert all(step >= max(before[1], self.floor) for step in began), "never older than the newest that could be reached"
        self.floor = self.saved
        assert before == (0, 0) or len(self.agents.store_reads) == reads, "a store is asked only where nobody has a snapshot"
        known = generation, max((each.snapshot for each in records if each.snapshot > before[1]), default=0)  # else the old one
        if known[1]:
            self.lost, nodes = set(), self.shape.nodes(range(self.shape.workers[generation - 1]))
            self.survives = min(self.shape.replicas, len(nodes) - 1)
        self.lost |= self.shape.nodes(lost)
        self.newest = self.agents.newest(generation + 1).at if self.agents.has(generation + 1) else (0, 0)
        self.told[-1].update(complete=known[1], newest=self.newest)
        if len(self.lost) > self.survives or self.saved >= max(before[1], known[1]) > 0:  # what was saved is on the disk
            return
        assert self.newest >= max(before, known if known[1] else before), "a complete one outlives as many losses as replicas"
        trained = [each for each in records if each.phase == "train"]
        if self.plan.patient and began and len(trained) == self.shape.workers[generation - 1] * self.shape.local:
            every = max(each.every for each in trained) or FIRST
            assert min(each.step for each in trained) - self.newest[1] <= every + 1, "k steps, and the snapshot in progress"


def seen_once(agents: Agents) -> bool:
    """Whether each sample is in the steps that count exactly once."""
    began = {e["generation"]: e["step"] for e in read(agents.output / contract.LEDGER) if e["kind"] == "restored"}
    seen: Counter[tuple[int, int]] = Counter()
    last = worlds.LAST
    for generation in sorted(began, reverse=True):
        for path in agents.output.glob(f"consumed-*-{generation}.jsonl"):
            for record in map(json.loads, path.read_text().splitlines()):
                if began[generation] < record["step"] <= last:
                    seen.update((record["epoch"], index) for index in record["indices"])
        last = min(last, began[generation])
    return set(seen.values()) == {1} and len(seen) == 4 * 150


def a_schedule(agents: Agents, seed: int) -> tuple[Struck, Training]:
    """What a seed stands for: who trains, and what, as if nothing happened to it."""
    rng = random.Random(seed)
    plan = Training("mlp", rng.choice(["sgd", "adamw"]), sharded=rng.random() < 0.5)
    shape = drawn(rng)
    struck = Struck(agents, shape, dataclasses.replace(plan, eager=True, pause_s=0.01, patient=rng.random() < 0.5), rng)
    for worker in range(struck.shape.workers[0]):
        struck.start(worker)
    return struck, plan


def ends(struck: Struck, plan: Training, calm: Calm) -> None:
    """Train the last world to its end, and see that it has begun with the newest there was and changes nothing."""
    agents, shape = struck.agents, struck.shape
    print(json.dumps([dataclasses.asdict(shape), "FSDP2" if plan.sharded else "DDP", struck.told]))
    reads, ranks = len(agents.store_reads), shape.workers[3] * shape.local
    end = worlds.world(struck.plan, agents.output, ranks, generation=4, local=shape.local, **shape.env())
    assert end.codes == [0] * ranks, end.errors
    assert restored(end)["step"] >= max(struck.newest[1], struck.saved), "never older than what was left"
    assert len(agents.store_reads) == reads + (struck.newest == (0, 0)), "a store is asked only where nobody has a snapshot"
    assert seen_once(agents)
    if len(set(shape.workers)) == 1:
        assert same(end, calm(plan, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3))
def test_when_a_worker_leaves_in_each_world_no_step_is_lost_that_it_has_saved(agents: Agents, calm: Calm, seed: int):
    struck, plan = a_schedule(agents, seed)
    for generation in (1, 2, 3):
        struck.strike(generation, leaves=generation != 2)
    ends(struck, plan, calm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3))
def test_when_holders_are_out_of_reach_for_10_s_no_step_is_lost_that_they_hold(agents: Agents, calm: Calm, seed: int):
    struck, plan = a_schedule(agents, seed)
    for generation in (1, 2, 3):
        struck.strike(generation)
    struck.out_of_reach(4, 10.0)
    ends(struck, plan, calm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(10))
def test_a_random_schedule_of_losses_ends_with_the_same_bits_from_memory_alone(agents: Agents, calm: Calm, seed: int):
    struck, plan = a_schedule(agents, seed)
    for generation in (1, 2, 3):
        struck.strike(generation)
    ends(struck, plan, calm)


# Struck once


PLANS = [
    pytest.param(Training("conv", "adamw", epochs=2), 2, id="DDP", marks=pytest.mark.slow),
    pytest.param(Training("mlp", "adamw", epochs=2, sharded=True), 2, id="FSDP2"),
    pytest.param(Training("conv", "sgd", epochs=2), 3, id="DDP of 3", marks=pytest.mark.slow),
    pytest.param(Training("mlp", "sgd", epochs=2, sharded=True), 3, id="FSDP2 of 3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_killed_it_goes_on_from_memory_with_the_same_bits_and_without_a_store(
    agents: Agents, calm: Calm, plan: Training, ranks: int
):
    end = agents.train(killed(plan, 8), ranks)
    assert end.codes == [-9] * ranks, end.errors
    assert agents.store_reads == [0], "at the first start: nobody has anything"
    expected = agents.newest(2).at
    again = agents.train(plan, ranks, 2)
    assert (1, resumed(again)) == expected
    assert same(again, calm(plan, ranks))
    assert agents.store_reads == [0]
    assert restored(again)["source"] in ("memory", "peer")


def test_what_a_worker_without_an_agent_cannot_read_stays_in_the_memory_of_the_others(agents: Agents):
    plan = Training("mlp", "adamw")
    agents.train(killed(plan, 9), 2)
    agents.lose(1)  # and the agent that takes its place opens no socket
    kept = agents.newest(2).at
    assert kept > (1, 0)
    again = worlds.world(killed(plan, 3), agents.output, 2, generation=2, **SELDOM)
    assert agents.newest(3).at == kept
    assert any("what is in memory is not used, and kept" in error for error in again.errors)


def test_a_worker_without_memory_ends_the_snapshots_with_a_sentence_and_not_the_training(agents: Agents):
    agents.start(1, budget=1 << 16)
    end = agents.train(dataclasses.replace(Training("mlp", "sgd"), eager=True), 2)
    assert resumed(end) == 0
    assert "no snapshots are taken for 10 minutes: " in end.errors[1]
    assert "raise checkpoint.memory" in end.errors[1]
    assert "snapshots" not in end.errors[0]
