"""Jobs that are each struck three times by chance: the launcher, agents, processes, or all at once. Their state is in memory.

The weights are those of the undisturbed run, no start is from an older state than could be reached, the store is not asked while
there is a snapshot, and each failure counts once. Two of 20: OUTLAST_TEST_SCHEDULES=20 for all. What each did is in its output
(-rP).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from outlast import checkpoints, contract
from outlast.local.state_dir import StateDir
from outlast.status import JobStatus, State
from outlast.workerfiles import progress
from outlast.workerfiles.progress import Progress
from seeds import seeds

ARGS = ("--steps=150", "--pause=0.04", "--gate")
KINDS = ("process", "process", "stop", "any", "worker", "worker", "workers", "all workers", "launcher", "everything")
NONE = "launcher"
"""Of them this is no failure of the training."""


@dataclasses.dataclass
class Strike:
    """What was done, when, and from where training had to go on at least."""

    kind: str
    settled: bool
    """Whether all trained before it."""
    time: float
    committed: int
    snapshot: int
    """The newest complete one, if it outlives this; else 0."""

    @property
    def sure(self) -> bool:
        """Whether it is certain to end an attempt that no other strike has ended."""
        return self.settled and self.kind not in (NONE, "any", "everything")


class Struck:
    """A job, and what is done to it."""

    def __init__(self, machine, path: Path, rng: random.Random, replicas: int) -> None:
        self.machine, self.path, self.rng, self.replicas = machine, path, rng, replicas
        self.name = machine.submit(path)
        self.home = StateDir(machine.directory / "state" / "jobs" / self.name)
        self.strikes: list[Strike] = []
        self.lost: set[int] = set()
        """The workers that were lost since the snapshot `held` was complete."""
        self.held = 0, 0, 0

    def records(self, status: JobStatus) -> list[Progress]:
        """Of the newest attempt."""
        found = [progress.read(self.home.worker(each.index), n) for each in status.workers for n in range(status.processes)]
        there = [each for each in found if each]
        newest = max(((each.generation, each.attempt) for each in there), default=(0, 0))
        return [each for each in there if (each.generation, each.attempt) == newest]

    def trains(self, status: JobStatus) -> bool:
        """Whether all processes of a world make steps."""
        records = self.records(status)
        return len(records) == len(status.world) * status.processes > 0 and all(
            each.phase in ("train", "save") and psutil.pid_exists(each.pid) for each in records
        )

    def settle(self) -> JobStatus:
        """Wait until all train and have trained a few steps; run the job again where everything was killed."""
        steps = self.rng.randrange(1, 25)
        first: list[int] = []

        def further(status: JobStatus) -> bool:
            if self.trains(status) and not first:
                first.append(status.step)
            return status.state is State.INTERRUPTED or (self.trains(status) and status.step >= min(first[0] + steps, 149))

        status = self.machine.wait(self.name, further)
        if status.state is State.INTERRUPTED:
            self.machine.submit(self.path)
            return self.settle()
        return status

    def strike(self) -> None:
        """Kill or stop something, sometimes in the middle of what follows the last time."""
        settled = not self.strikes or self.rng.random() < 0.7
        if settled:
            status = self.settle()
        else:
            time.sleep(self.rng.uniform(0, 2))  # the moment that is drawn
            status = self.machine.backend.status(self.name)
            if status.state is State.INTERRUPTED:
                self.machine.submit(self.path)
                status = self.machine.wait(self.name, lambda s: any(w.pid for w in s.workers))
        kind = self.rng.choice(KINDS)
        agents, pids = self.victims(kind, status)
        records = self.records(status)
        held = max(((each.generation, each.attempt, each.snapshot) for each in records if each.snapshot), default=self.held)
        if held > self.held:
            self.held, self.lost = held, set()
        self.lost |= agents
        survives = min(self.replicas, len(status.workers) - 1)
        snapshot = self.held[2] if len(self.lost) <= survives else 0
        saved = [each.step for each in checkpoints.list_(self.machine.backend.output(self.name) / contract.CHECKPOINTS)]
        self.strikes.append(Strike(kind, settled and self.trains(status), time.time(), max(saved, default=0), snapshot))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def victims(self, kind: str, status: JobStatus) -> tuple[set[int], list[int]]:
        """Whose agents are killed, and all processes that are."""
        workers = [each for each in status.workers if each.pid]
        ranks = [rank.pid for each in workers for rank in each.ranks if rank.pid]
        agents = {each.index: each.pid for each in workers if each.pid}
        launcher = [pid for pid in [status.launcher] if pid]
        few = self.rng.sample(workers, min(len(workers), max(1, min(self.replicas, len(workers) - 1))))
        match kind:
            case "process" | "stop":
                return set(), self.rng.sample(ranks, min(1, len(ranks)))
            case "any":  # agent, warm process, elastic agent, stand-in, training process, uploader
                agent = self.rng.choice(list(agents.values()))
                with contextlib.suppress(psutil.NoSuchProcess):
                    pid = self.rng.choice([agent, *(each.pid for each in psutil.Process(agent).children(recursive=True))])
                    return {index for index, own in agents.items() if own == pid}, [pid]
                return set(), []
            case "worker" | "workers":
                these = few[:1] if kind == "worker" else few
                return {each.index for each in these}, [each.pid for each in these]
            case "all workers":
                return set(agents), list(agents.values())
            case "launcher":
                return set(), launcher
            case _:
                return set(agents), [*launcher, *agents.values()]

    def end(self) -> JobStatus:
        """Train to the end."""
        self.settle()
        status = self.machine.end(self.name, hurry=True)
        assert status.state is State.SUCCEEDED, self.home.log.read_text()
        return status

    def check(self, status: JobStatus) -> None:
        """Whether every start was from the newest there was, and every failure counts once."""
        events = self.machine.backend.events(self.name)
        restored = [event for event in events if event["kind"] == "restored"]
        ends = [each.time for each in self.strikes[1:]] + [float("inf")]
        for strike, until in zip(self.strikes, ends, strict=True):
            began = [event for event in restored if strike.time <= event["t"] < until]
            for event in began:
                assert event["step"] >= max(strike.committed, strike.snapshot), "never older than could be reached"
                if strike.snapshot > strike.committed:
                    assert event["source"] in ("memory", "peer"), "no store, nor a disk, while memory suffices"
        assert not [event for event in restored if event["source"] == "store"]
        failures = [event for event in events if event["kind"] == "failure"]
        sure, most = (sum(each.sure for each in self.strikes), sum(each.kind != NONE for each in self.strikes))
        counted = sum(bool(event["counted"]) for event in failures)
        assert sure <= status.restarts == counted <= most, f"each failure counts once: {failures}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2))
def test_a_job_that_is_struck_by_chance_ends_with_the_same_bits(machine, undisturbed, seed: int):
    rng = random.Random(seed)
    workers, processes, replicas = rng.choice([(2, 1, 1), (3, 1, 1), (3, 1, 2), (2, 2, 1)])
    args = (*ARGS, *(["--sharded"] if rng.random() < 0.5 else []))
    path = machine.job(
        args=args, workers={"replicas": workers}, processesPerWorker=processes, restarts={"limit": 20},
        checkpoint={"every": "40 steps", "replicas": replicas}, output=f"file://{machine.directory}/store/",
    )  # fmt: skip
    struck = Struck(machine, path, rng, replicas)
    for _ in range(3):
        struck.strike()
    status = struck.end()
    print(json.dumps([workers, processes, replicas, args[3:], [dataclasses.asdict(each) for each in struck.strikes]]))
    struck.check(status)
    assert machine.final(struck.name) == undisturbed(args, workers * processes)
