"""Jobs that are each struck three times by chance: the launcher, agents, processes, or all at once. Their state is in memory.

The weights are those of the undisturbed run, no start is from an older state than could be reached, the store is not asked while
there is a snapshot, and each failure counts once. Four of 20: OUTLAST_TEST_SCHEDULES=20 for all. What each did is in its output
(-rP).

Others are harmed in one way, each at a moment of its own (`HARMS`): -k leaves, -k still, -k full ... Whatever it is, no step is
lost that a worker holds which is still there, or leaves because it was asked to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import netns
from outlast.job import contract
from outlast.job.status import JobStatus, State
from outlast.job.workerfiles import progress_file
from outlast.job.workerfiles.progress_file import Progress
from outlast.local.state_dir import StateDir
from outlast.storage import checkpoints
from seeds import seeds

ARGS = ("--steps=150", "--pause=0.04", "--gate")
KINDS = ("process", "process", "stop", "any", "worker", "worker", "workers", "all workers", "launcher", "everything")
NONE = "launcher"
"""Of them this is no failure of the training."""
MOMENTS = ("is due", "is called", "starts", "restores", "trains")
"""Of a replacement, one after the other."""
ACTORS = ("launcher", "agent", "store", "warm process", "rank")
STILL_S = 5.0
AWAY_S = 10.0
HARMS = {
    **{f"another leaves when a replacement {each}": [("worker", "settled"), ("leave", each)] for each in MOMENTS},
    **{f"the holder stands still when a replacement {each}": [("worker", "settled"), ("away", each)] for each in MOMENTS[:4]},
    **{f"the {each} is killed": [(each, "settled")] * 2 for each in ACTORS[1:4]},
    "the warm process is killed while it leaves": [("leave", "settled"), ("warm process", "at once")],
    **{f"the {each} stands still": [(f"still {each}", when) for when in ("settled", "at once")] for each in ACTORS},
    "the output is full": [("fill", "settled"), ("process", "at once"), ("process", "settled"), ("free", "at once")],
    "the state directory is full": [("fill", "settled"), ("process", "at once"), ("free", "at once")],
}
"""What is done to a job, and when. What stands still at once does so when a process was killed."""


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

    def fails(self, event: dict[str, object]) -> bool:
        """Whether a restore after it is from an older state than there was."""
        return int(str(event["step"])) < max(self.committed, self.snapshot)


class Struck:
    """A job, and what is done to it."""

    def __init__(self, machine, path: Path, rng: random.Random, replicas: int) -> None:
        self.machine, self.path, self.rng, self.replicas = machine, path, rng, replicas
        self.full = Path()
        self.name = machine.submit(path)
        self.home = StateDir(machine.directory / "state" / "jobs" / self.name)
        self.strikes: list[Strike] = []
        self.lost: set[int] = set()
        """The workers that were lost since the snapshot `held` was complete."""
        self.held = 0, 0, 0

    def records(self, status: JobStatus) -> list[Progress]:
        """Of the newest attempt."""
        found = [progress_file.read(self.home.worker(each.index), n) for each in status.workers for n in range(status.processes)]
        there = [each for each in found if each]
        newest = max(((each.generation, each.attempt) for each in there), default=(0, 0))
        return [each for each in there if (each.generation, each.attempt) == newest]

    def trains(self, status: JobStatus) -> bool:
        """Whether all processes of a world make steps: none is gone, stopped or dead, which may not have been noticed yet."""
        records = self.records(status)
        return len(records) == len(status.world) * status.processes > 0 and all(
            each.phase in ("train", "save") and progress_file.kernel(each.pid)[0] not in ("", "T", "Z") for each in records
        )

    def settle(self) -> JobStatus:
        """Wait until all train and have trained a few steps; run the job again where everything was killed."""
        steps = self.rng.randrange(1, 25)
        first: list[int] = []

        def further(status: JobStatus) -> bool:
            if trains := self.trains(status):
                first.append(status.step)
            return status.state is State.INTERRUPTED or (trains and status.step >= min(first[0] + steps, 149))

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
        pids = self.noted(kind, status, settled)
        sent(pids, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def harm(self, kind: str, moment: str) -> None:
        """Do one of `HARMS`."""
        status = self.settle() if moment == "settled" else self.reached(moment)
        if kind.startswith("still") and moment == "at once":
            self.harm("process", "settled")
        pids = self.noted(kind, status, moment == "settled")
        match kind:
            case "leave":
                sent(pids, signal.SIGTERM)
            case "fill":
                self.fill()
            case "free":
                time.sleep(STILL_S)
                self.full.unlink()
            case _ if kind == "away" or kind.startswith("still"):
                sent(pids, signal.SIGSTOP)
                time.sleep(AWAY_S if kind == "away" else STILL_S)
                sent(pids, signal.SIGCONT)
            case _:
                sent(pids, signal.SIGKILL)

    def reached(self, moment: str) -> JobStatus:
        """Wait until what the last strike has brought about is so far, or everybody trains."""
        since, end = self.strikes[-1].time, time.monotonic() + 60

        def kinds() -> set[str]:
            return {event["kind"] for event in self.machine.backend.events(self.name) if event["t"] >= since}

        def phases() -> set[str]:
            return {each.phase for each in self.records(self.machine.backend.status(self.name)) if each.time >= since}

        so_far = {
            "at once": lambda: True,
            "is due": lambda: True,
            "is called": lambda: "called" in kinds(),
            "starts": lambda: "worker" in kinds(),
            "restores": lambda: phases() & {"open", "restore", "first step"},
            "trains": lambda: False,
        }[moment]
        while not so_far() and not ("restored" in kinds() and self.trains(self.machine.backend.status(self.name))):
            assert time.monotonic() < end, self.home.log.read_text()
            time.sleep(0.005)
        return self.machine.backend.status(self.name)

    def noted(self, kind: str, status: JobStatus, settled: bool) -> list[int]:
        """The processes that a strike hits; notes from where training has to go on after it."""
        agents, pids = self.victims(kind, status)
        records = self.records(status)
        held = max(((each.generation, each.attempt, each.snapshot) for each in records if each.snapshot), default=self.held)
        events = self.machine.backend.events(self.name)
        restored = max((int(event["step"]) for event in events if event["kind"] == "restored"), default=0)
        # a new world that has restored it has no replicas yet, and a killed process may have written once more after we read
        if held[2] > self.held[2] and (not self.lost or (held[:2] > self.held[:2] and held[2] > restored)):
            self.held, self.lost = held, set()
        self.lost |= agents
        survives = min(self.replicas, len(status.workers) - 1)
        snapshot = self.held[2] if len(self.lost) <= survives else 0
        saved = [each.step for each in checkpoints.list_(self.machine.backend.output(self.name) / contract.CHECKPOINTS)]
        self.strikes.append(Strike(kind, settled and self.trains(status), time.time(), max(saved, default=0), snapshot))
        return pids

    def fill(self) -> None:
        """Leave no room on the disk of the file `full`."""
        with contextlib.suppress(OSError), self.full.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

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
            case "any":  # agent, warm process, store, training process, uploader
                agent = self.rng.choice(list(agents.values()))
                with contextlib.suppress(psutil.NoSuchProcess):
                    pid = self.rng.choice([agent, *(each.pid for each in psutil.Process(agent).children(recursive=True))])
                    return {index for index, own in agents.items() if own == pid}, [pid]
                return set(), []
            case "leave" | "away":  # who is still there
                there = [pid for index, pid in agents.items() if index not in self.lost]
                return set(), self.rng.sample(there, min(1, len(there)))
            case "agent":
                index = self.rng.choice(list(agents))
                return {index}, [agents[index]]
            case "store" | "warm process" | "still store" | "still warm process":
                title = kind.removeprefix("still ")
                children = [each for pid in agents.values() for each in psutil.Process(pid).children(recursive=True)]
                return set(), [self.rng.choice([each.pid for each in children if titled(each, title)])]
            case "still launcher" | "still agent" | "still rank":
                return set(), [self.rng.choice({"launcher": launcher, "agent": [*agents.values()], "rank": ranks}[kind[6:]])]
            case "fill" | "free":
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
                assert not strike.fails(event), f"never older than could be reached: {event} after {strike}"
                if strike.snapshot > strike.committed and strike.kind in KINDS:
                    assert event["source"] in ("memory", "peer"), "no store, nor a disk, while memory suffices"
        assert not [event for event in restored if event["source"] == "store"]
        failures = [event for event in events if event["kind"] == "failure"]
        sure, most = (sum(each.sure for each in self.strikes), sum(each.kind != NONE for each in self.strikes))
        sure = sure if all(each.kind in KINDS for each in self.strikes) else 0
        counted = sum(bool(event["counted"]) for event in failures)
        assert sure <= status.restarts == counted <= most, f"each failure counts once: {failures}"


def titled(process: psutil.Process, title: str) -> bool:
    """Whether a process that is there has this title."""
    with contextlib.suppress(psutil.Error):
        return f"outlast: {title}" in " ".join(process.cmdline())
    return False


def sent(pids: list[int], which: signal.Signals) -> None:
    """Send all of them a signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4))
def test_a_job_that_is_struck_by_chance_ends_with_the_same_bits(machine, undisturbed, seed: int):
    rng = random.Random(seed)
    workers, processes, replicas = rng.choice([(2, 1, 1), (3, 1, 1), (3, 1, 2), (2, 2, 1)])
    args = (*ARGS, *(["--sharded"] if rng.random() < 0.5 else []))
    kept = ["--keep"] if rng.random() < 0.5 else []
    path = machine.job(
        args=(*args, *kept), workers={"replicas": workers}, processesPerWorker=processes, restarts={"limit": 20},
        checkpoint={"every": "40 steps", "replicas": replicas}, output=f"file://{machine.directory}/store/",
    )  # fmt: skip
    struck = Struck(machine, path, rng, replicas)
    for _ in range(3):
        struck.strike()
    status = struck.end()
    print(json.dumps([workers, processes, replicas, [*args[3:], *kept], [dataclasses.asdict(each) for each in struck.strikes]]))
    struck.check(status)
    assert machine.final(struck.name) == undisturbed(args, workers * processes)


@pytest.fixture
def small(request: pytest.FixtureRequest, machine) -> Iterator[Path]:
    """A disk of some megabytes, where what is to be full is kept."""
    where = machine.directory / "state" / ("runs" if "output" in request.node.name else "jobs")
    where.mkdir(parents=True)
    if "full" not in request.node.name:
        yield where
        return
    netns.run("mount", "-t", "tmpfs", "-o", "size=24m", "none", str(where))
    yield where
    machine.kill_everything()
    netns.run("umount", "--lazy", str(where))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("harm", [pytest.param(each, marks=[netns.NEEDED] if "full" in each else []) for each in HARMS])
def test_no_step_is_lost_that_a_worker_holds_when(machine, undisturbed, small: Path, harm: str, seed: int):
    rng = random.Random(seed)
    lost = "replacement" in harm or harm == "the agent is killed"  # else all agents are there, and need no replicas
    workers, replicas = rng.choice([(2, 1), (3, 1)] if lost else [(1, 0), (2, 0)])
    args = (*ARGS, *(["--sharded"] if rng.random() < 0.5 else []))
    kept = ["--keep"] if rng.random() < 0.5 else []
    path = machine.job(
        args=(*args, *kept), workers={"replicas": workers}, restarts={"limit": 20}, hang={"limit": "60s"},
        checkpoint={"every": "1h", "replicas": replicas},
    )  # fmt: skip
    struck = Struck(machine, path, rng, replicas)
    struck.full = small / "filler"
    for kind, moment in HARMS[harm]:
        struck.harm(kind, moment)
    struck.settle()
    status = struck.end()
    print(json.dumps([workers, replicas, [*args[3:], *kept], [dataclasses.asdict(each) for each in struck.strikes]]))
    struck.check(status)
    assert machine.final(struck.name) == undisturbed(args, workers)
