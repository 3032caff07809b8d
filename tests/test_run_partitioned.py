"""A whole job on three hosts whose network breaks: workers as pods run them, each in a network namespace of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import netns
from outlast import contract, ledger
from outlast.workerfiles import progress
from test_run_pods import Pods

pytestmark = [pytest.mark.jobs, pytest.mark.slow, netns.NEEDED]

ARGS = ("--steps=1000", "--pause=0.05", "--gate")
FIELDS = {"workers": {"replicas": 3, "min": 1, "max": 3}, "hang": {"limit": "60s"}, "checkpoint": {"every": "10 steps"}}


class Hosts(Pods):
    """Pods on hosts of their own; worker 0 decides."""

    def __init__(self, directory: Path, file: Path, network: netns.Network) -> None:
        super().__init__(directory, file)
        self.network = network

    def start(self, *indices: int, **more: str) -> None:
        for index in indices:
            host = self.network.hosts[index]
            where = {contract.Env.ADDRESS: host.address, "GLOO_SOCKET_IFNAME": "eth0"}
            where[contract.Env.RENDEZVOUS] = f"c10d://{self.network.hosts[0].address}:29400"
            with host.inside():
                super().start(index, **where, **more)

    def generation(self, index: int) -> int:
        """The world in which a worker makes steps."""
        record = progress.read(self.directory / f"state-{index}", 0)
        return record.generation if record and record.phase == "train" and record.step else 0

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in ledger.read(self.output / contract.LEDGER) if event["kind"] == kind]


@pytest.fixture
def hosts(machine) -> Iterator[Hosts]:
    with netns.Network(3) as network:
        made = Hosts(machine.directory, machine.job(args=ARGS, **FIELDS), network)
        try:
            yield made
        finally:
            for index in list(made.running):
                if made.running[index].poll() is None:
                    made.kill(index)


def test_survivors_of_a_silent_host_train_within_seconds_and_it_comes_back(hosts: Hosts) -> None:
    hosts.start(0, 1, 2)
    hosts.wait(lambda: min(map(hosts.generation, range(3))) > 0 and hosts.step() > 15, "all train")
    first = hosts.generation(0)
    began = time.monotonic()
    hosts.network.hosts[2].cut()
    hosts.wait(lambda: min(map(hosts.generation, (0, 1))) == first + 1, "the survivors train")
    took = time.monotonic() - began
    print(f"silent host: {took:.1f} s until the survivors made a step")
    assert [event["workers"] for event in hosts.events("unheard")] == [[2]]
    worlds = [(event["generation"], event["workers"]) for event in hosts.events("world")]
    assert worlds == [(first, [0, 1, 2]), (first + 1, [0, 1])]
    hosts.network.heal()
    assert hosts.running.pop(2).wait(60) == contract.Exit.INTERRUPTED, hosts.log(2)
    hosts.start(2)
    hosts.wait(lambda: min(map(hosts.generation, range(3))) == first + 2, "all train again")
    assert set(hosts.codes().values()) == {0}
    assert took < 30, "as long as a machine with a lot to do may take; 5 s on a quiet one"
