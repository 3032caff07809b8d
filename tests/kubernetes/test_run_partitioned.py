"""Whole jobs on hosts whose network breaks: workers as pods run them, each with a network namespace and a disk of its own.
And what must be no alarm: processes that are stopped for 5 s, busy cores, a network that stalls for 1 s.

The store is a directory that every host reaches all the time, so nothing but the fences keeps two sides from committing there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import etcds
import netns
from bare_pods import Pods
from outlast.job import contract, ledger
from outlast.job.workerfiles import progress_file
from outlast.storage import store
from outlast.storage.checkpoints import register
from outlast.storage.checkpoints.register_rules import Place

pytestmark = [pytest.mark.jobs, pytest.mark.slow, netns.NEEDED]

ARGS = ("--steps=600", "--pause=0.1", "--gate")
FIELDS = {"hang": {"limit": "60s"}, "checkpoint": {"every": "10 steps"}}
RUN = "job-1a2b3c4d"
AWAY = contract.Exit.INTERRUPTED
"""What a lost worker exits with; its pod is started again then."""


class Hosts(Pods):
    """Pods on hosts of their own. Worker 0 decides, or whom they elect at `etcd`."""

    def __init__(self, directory: Path, file: Path, network: netns.Network, size: int, etcd: etcds.Server | None = None) -> None:
        super().__init__(directory, file)
        self.network, self.size, self._etcd = network, size, etcd
        self.hosts = network.hosts[:size]
        self.store = store.open_(f"file://{directory / 'store'}")
        self.commits: list[Place] = []
        """All that ever counted, in the order in which it did."""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        super().close()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(OSError):
                latest = register.read(self.store, RUN)
                self.commits += sorted(set(latest.places if latest else ()) - set(self.commits))

    def disk(self, index: int) -> Path:
        return self.directory / f"disk-{index}"

    def start(self, *indices: int, **more: str) -> None:
        for index in indices:
            host, output = self.hosts[index], self.disk(index)
            where = {contract.Env.ADDRESS: host.address, "GLOO_SOCKET_IFNAME": "eth0"}
            where |= {contract.Env.RENDEZVOUS: f"c10d://{self.hosts[0].address}:29400", contract.Env.STORE: self.store.url}
            where |= {contract.Env.OUTPUT: str(output), contract.Env.LEDGER: str(output / contract.LEDGER)}
            if self._etcd:
                where |= {contract.Env.RENDEZVOUS: self._etcd.endpoint, contract.Env.NAMESPACE: "team-a"}
            with host.inside():
                super().start(index, **where, **more)

    def start_again(self) -> None:
        for index in range(self.size):
            if (code := self.running[index].poll()) is not None:
                assert code == AWAY, f"worker {index} exited with {code}:\n{self.log(index)}"
                self.start(index)

    def generation(self, index: int) -> int:
        """The world in which a worker makes steps."""
        record = progress_file.read(self.directory / f"state-{index}", 0)
        return record.generation if record and record.phase == "train" and record.step else 0

    def train(self, indices: Sequence[int], beyond: int) -> bool:
        """Whether these, and they alone, train together in a generation after that."""
        found = {self.generation(index) for index in indices}
        return len(found) == 1 and min(found) > beyond and self.worlds()[-1] == (min(found), sorted(indices))

    def all_train(self, beyond: int) -> bool:
        self.start_again()
        return self.train(range(self.size), beyond)

    def events(self, kind: str) -> list[dict[str, object]]:
        found = [event for index in range(self.size) for event in ledger.read(self.disk(index) / contract.LEDGER)]
        once = {repr(sorted(event.items())): event for event in found if event["kind"] == kind}  # each disk has what was stored
        return sorted(once.values(), key=lambda event: event["t"])

    def worlds(self) -> list[tuple[int, list[int]]]:
        """All that were formed, by whichever coordinator."""
        return [(event["generation"], sorted(event["workers"])) for event in self.events("world")]

    def end(self) -> None:
        """All train to the end; no world and no commit was ever of two."""
        for index in range(self.size):
            (self.disk(index) / "hurry").touch()

        def over() -> bool:
            for index in range(self.size):
                if self.running[index].poll() == AWAY:
                    self.start(index)
            return all(pod.poll() is not None for pod in self.running.values())

        self.wait(over, "all have ended")
        assert {index: pod.poll() for index, pod in self.running.items()} == dict.fromkeys(range(self.size), 0)
        generations = [generation for generation, _ in self.worlds()]
        assert generations == sorted(set(generations)), "each is after all before it"
        time.sleep(0.2)
        committed = [(place.generation, place.step) for place in self.commits]
        generations = [generation for generation, _ in committed]
        assert generations == sorted(generations), "nobody commits after a later generation"
        steps = [step for _, step in sorted(committed)]
        assert steps == sorted(set(steps)), "each step is committed once, and a later generation goes on behind an earlier one"
        assert steps[-1] == 600


Made = Callable[..., Hosts]


@pytest.fixture
def hosts(machine) -> Iterator[Made]:
    """`hosts(size, etcd=False)`; with it the last host of the network is that of an etcd."""
    with contextlib.ExitStack() as stack:

        def make(size: int, *, etcd: bool = False) -> Hosts:
            network = stack.enter_context(netns.Network(size + etcd))
            server = None
            if etcd:
                host = network.hosts[-1]
                server = etcds.Server(machine.directory / "etcd", host=host.address)
                server.directory.mkdir()
                with host.inside():
                    server.start()
                stack.callback(server.stop)
            workers = {"replicas": size, "min": 1, "max": size}
            made = Hosts(machine.directory, machine.job(args=ARGS, workers=workers, **FIELDS), network, size, server)
            stack.callback(made.close)
            return made

        yield make


def all_started(hosts: Hosts) -> int:
    """Start all, and wait until they have committed something; their generation."""
    hosts.start(*range(hosts.size))
    hosts.wait(lambda: hosts.train(range(hosts.size), 0) and hosts.commits, "all train")
    return hosts.generation(0)


@pytest.mark.parametrize(
    ("size", "stay", "etcd"),
    [
        *((4, (0, 1), ""), (4, (0, 3), ""), (5, (0, 4), ""), (5, (0, 1, 2), "")),  # the side of worker 0, which decides
        *((4, (0, 1), "of both"), (5, (2, 3, 4), "of both")),  # the larger side, or that of rank 0
        *((4, (2, 3), "of one"), (5, (0, 1), "of one")),  # the side that reaches the etcd
    ],
)
def test_of_two_sides_one_trains_and_the_other_neither_makes_a_step_nor_commits_one(
    hosts: Made, size: int, stay: Sequence[int], etcd: str
) -> None:
    made = hosts(size, etcd=bool(etcd))
    away = [index for index in range(size) if index not in stay]
    near = made.network.hosts[-1:] if etcd == "of one" else ()
    first = all_started(made)
    began = time.monotonic()
    made.network.split([*(made.hosts[index] for index in stay), *near], [made.hosts[index] for index in away])
    made.wait(lambda: made.train(stay, first), f"workers {stay} train")
    print(f"\n{len(stay)}|{len(away)}: {time.monotonic() - began:.1f} s until the others made a step", end=" ")
    second, stood = made.generation(stay[0]), {index: made.step(index) for index in away}
    made.wait(lambda: [place.generation for place in made.commits].count(second) >= 3, "checkpoints of one side")
    assert {index: made.step(index) for index in away} == stood
    assert {place.generation for place in made.commits} <= {first, second}
    assert [workers for generation, workers in made.worlds() if generation > first] == [sorted(stay)]
    made.network.heal()
    made.wait(lambda: made.all_train(second), "all train again")
    made.end()


def test_survivors_of_a_silent_host_train_within_seconds_and_it_comes_back(hosts: Made) -> None:
    three = hosts(3)
    first = all_started(three)
    began = time.monotonic()
    three.network.hosts[2].cut()
    three.wait(lambda: three.train((0, 1), first), "the survivors train")
    took = time.monotonic() - began
    print(f"\nsilent host: {took:.1f} s until the survivors made a step", end=" ")
    assert [event["workers"] for event in three.events("unheard")] == [[2]]
    assert three.worlds() == [(first, [0, 1, 2]), (first + 1, [0, 1])]
    three.network.heal()
    assert three.running[2].wait(60) == AWAY, three.log(2)
    assert "outlast | lost worker 2: workers 0 and 1 do not hear it" in three.log(2)
    three.wait(lambda: three.all_train(first + 1), "all train again")
    assert three.worlds()[-1][0] == first + 2
    three.end()
    assert took < 30, "as long as a machine with a lot to do may take; 5 s on a quiet one"


@pytest.mark.parametrize(("deaf", "stay"), [((0, 1), (0, 2)), ((1, 0), (0, 2)), ((2, 1), (0, 1))])
@pytest.mark.parametrize("etcd", [False, True])
def test_loss_in_one_direction_leaves_those_who_hear_each_other(
    hosts: Made, deaf: tuple[int, int], stay: Sequence[int], etcd: bool
) -> None:
    three = hosts(3, etcd=etcd)
    first = all_started(three)
    began = time.monotonic()
    three.hosts[deaf[0]].deaf_to(three.hosts[deaf[1]])
    three.wait(lambda: three.train(stay, first), f"workers {stay} train")
    print(f"\none way: {time.monotonic() - began:.1f} s until the others made a step", end=" ")
    three.network.heal()
    three.wait(lambda: three.all_train(first + 1), "all train again")
    three.end()


@pytest.mark.parametrize("etcd", [False, True])
def test_a_network_that_flaps_for_a_minute_ends_with_all_training(hosts: Made, etcd: bool) -> None:
    three = hosts(3, etcd=etcd)
    all_started(three)
    begun, step = time.monotonic(), three.step()
    while time.monotonic() - begun < 60.0:
        for away_s in (1.7, 3.2, 5.0):
            three.hosts[2].cut()
            time.sleep(away_s)
            three.network.heal()
            time.sleep(0.9)
        three.start_again()
    before = three.worlds()[-1][0]
    print(f"\nflapping for a minute: {len(three.worlds())} worlds, {three.step() - step} steps", end=" ")
    assert three.step() > step + 30, "the others train most of the time"
    three.wait(lambda: three.all_train(before - 1), "all train")
    three.end()


# No alarm

STOPPED_S, BUSY_S, STALLED_S = 5.0, 10.0, 1.0
"""A process that is stopped stands for any that does not run: swapped out, in a garbage collection, with the interpreter's lock
held by native code."""
Disturbance = Callable[[], None]


def stopped(of: psutil.Process, which: str) -> Disturbance:

    def disturb() -> None:
        found = [process for process in (of, *of.children(recursive=True)) if which in " ".join(process.cmdline()[:1])]
        assert found, which
        for process in found:
            process.suspend()
        time.sleep(STOPPED_S)
        for process in reversed(found):
            process.resume()

    return disturb


def busy() -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    time.sleep(BUSY_S)
    for loop in loops:
        loop.send_signal(signal.SIGKILL)
        loop.wait()


def disturbances(agent: int) -> dict[str, Disturbance]:
    process = psutil.Process(agent)
    names = {"agent": "outlast: agent", "warm process": "warm process", "worker": ""}
    return {**{name: stopped(process, title) for name, title in names.items()}, "busy cores": busy}


QUIET = ("world", "called", "unheard", "failure", "attempt", "exited", "hang")
"""Kinds of events that there must be none of."""


@pytest.mark.parametrize("etcd", [False, True])
def test_pods_that_stand_still_for_5_s_are_no_alarm(hosts: Made, etcd: bool) -> None:
    three = hosts(3, etcd=etcd)
    first = all_started(three)

    def stall() -> None:
        three.hosts[1].cut()
        time.sleep(STALLED_S)
        three.hosts[1].join()

    before = {kind: three.events(kind) for kind in QUIET}
    for name, disturb in {**disturbances(three.running[1].pid), "network": stall}.items():
        disturb()
        step = three.step()
        three.wait(lambda step=step: three.step() > step + 5, f"steps after: {name}")
        assert {index: three.generation(index) for index in range(3)} == dict.fromkeys(range(3), first), name
        assert {kind: three.events(kind) for kind in QUIET} == before, name
    three.end()


def test_workers_of_this_machine_that_stand_still_for_5_s_are_no_alarm(machine) -> None:
    workers = {"replicas": 3, "min": 1, "max": 3}
    name = machine.submit(machine.job(args=ARGS, workers=workers, **FIELDS))
    status = machine.wait(name, lambda status: status.step > 12 and len(status.world) == 3)

    def alarms() -> list[dict[str, object]]:
        return [event for event in machine.backend.events(name) if event["kind"] in QUIET]

    before = alarms()
    for what, disturb in disturbances(status.workers[1].pid).items():
        disturb()
        step = machine.backend.status(name).step
        after = machine.wait(name, lambda status, step=step: status.step > step + 5)
        assert (after.generation, after.restarts, after.world) == (status.generation, 0, status.world), what
        assert alarms() == before, what
    machine.end(name, hurry=True)
