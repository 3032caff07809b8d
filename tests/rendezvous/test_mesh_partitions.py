"""The mesh on a network that loses packets: found in time, and no false alarm. Run with -s to see the times."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import netns
from outlast.rendezvous.mesh.mesh import Mesh
from waits import until

pytestmark = [pytest.mark.slow, netns.NEEDED]

KEY = b"key of the run"
FOUND_S = 4.0
"""Within this time silence is known: 2 s until the kernel gives the connection up, 1 s for a new one, and a margin for load."""


class Watched(Mesh):
    """Keeps when it changed its mind."""

    def __init__(self, id: int, host: netns.Host) -> None:
        with host.inside():
            super().__init__(id, host.address, KEY)
        self.history: list[tuple[float, tuple[int, ...]]] = []
        self.changed = lambda: self.history.append((time.monotonic(), self.unheard))

    def since(self, begun: float) -> list[tuple[int, ...]]:
        """Whom it did not hear, since then, change by change."""
        return [unheard for at, unheard in self.history if at >= begun]


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[netns.Network]:
    with netns.Network(request.param) as network:
        yield network


@pytest.fixture
def meshes(network: netns.Network) -> Iterator[list[Watched]]:
    """A member on each host, who have all heard each other."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(contextlib.closing(Watched(id, host))) for id, host in enumerate(network.hosts)]
        for mesh in made:
            mesh.enter(1, range(len(made)))
            mesh.learn(1, {each.id: each.address for each in made})
        until(lambda: all(mesh.complete for mesh in made))
        yield made


def found(meshes: list[Watched], expected: dict[int, tuple[int, ...]]) -> None:
    """Wait until each hears those, and only those, that it should; print how long it took."""
    begun = time.monotonic()
    until(lambda: all(meshes[id].unheard == unheard for id, unheard in expected.items()), FOUND_S)
    print(f"\n{os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split()[0]}: {time.monotonic() - begun:.2f} s", end=" ")


@pytest.mark.parametrize("network", [4], indirect=True)
@pytest.mark.parametrize("phase_s", [0.0, 0.3, 0.6, 0.9])
def test_a_silent_member_is_found_by_all_and_finds_all(network: netns.Network, meshes: list[Watched], phase_s: float) -> None:
    time.sleep(phase_s)  # the kernel's probes come once a second
    network.hosts[3].cut()
    found(meshes, {0: (3,), 1: (3,), 2: (3,), 3: (0, 1, 2)})
    assert all(mesh.refused == () for mesh in meshes)
    network.heal()
    begun = time.monotonic()
    until(lambda: all(mesh.unheard == () for mesh in meshes))
    print(f"heard again after {time.monotonic() - begun:.2f} s", end="")


@pytest.mark.parametrize("network", [3], indirect=True)
def test_loss_in_one_direction_is_found_by_both(network: netns.Network, meshes: list[Watched]) -> None:
    network.hosts[0].deaf_to(network.hosts[1])
    found(meshes, {0: (1,), 1: (0,), 2: ()})
    assert meshes[2].history == [meshes[2].history[0]]  # that it is complete


@pytest.mark.parametrize("network", [5], indirect=True)
def test_two_halves_each_miss_the_other(network: netns.Network, meshes: list[Watched]) -> None:
    hosts = network.hosts
    network.split(hosts[:2], hosts[2:])
    found(meshes, {0: (2, 3, 4), 1: (2, 3, 4), 2: (0, 1), 3: (0, 1), 4: (0, 1)})
    network.heal()
    until(lambda: all(mesh.unheard == () for mesh in meshes))


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_network_that_flaps_for_a_minute_ends_with_the_truth(network: netns.Network, meshes: list[Watched]) -> None:
    begun, turns = time.monotonic(), 0
    while time.monotonic() - begun < 60.0:
        for away_s in (1.7, 3.2, 5.0):
            network.hosts[2].cut()
            time.sleep(away_s)
            network.heal()
            time.sleep(0.9)
        turns += 1
    until(lambda: all(mesh.unheard == () for mesh in meshes))
    alarms = [len([each for each in mesh.since(begun) if each]) for mesh in meshes]
    print(f"\n{turns} times away for 1.7, 3.2 and 5 s: alarms {alarms}", end="")
    assert all(set(mesh.since(begun)) <= {(), (2,)} for mesh in meshes[:2])
    network.hosts[2].cut()
    found(meshes, {0: (2,), 1: (2,), 2: (0, 1)})


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_network_that_stands_still_for_a_second_is_no_alarm(network: netns.Network, meshes: list[Watched]) -> None:
    begun = time.monotonic()
    for _ in range(8):
        network.hosts[2].cut()
        time.sleep(1.0)
        network.heal()
        time.sleep(1.1)  # so that each pause meets the probes at another place
    time.sleep(3.0)
    assert [mesh.since(begun) for mesh in meshes] == [[], [], []]


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_tenth_of_all_packets_lost_is_no_alarm(network: netns.Network, meshes: list[Watched]) -> None:
    begun = time.monotonic()
    for host in network.hosts:
        host.lossy(0.1)
    time.sleep(20.0)
    assert [mesh.since(begun) for mesh in meshes] == [[], [], []]


MEMBER = """
import sys, time
from outlast.rendezvous.mesh.mesh import Mesh
mesh = Mesh(2, sys.argv[1], b"key of the run")
print(mesh.address, flush=True)
mesh.enter(1, range(3))
mesh.learn(1, dict(enumerate(sys.argv[2:])))
time.sleep(600)
"""


@contextlib.contextmanager
def process_of_member_2(network: netns.Network, meshes: list[Watched]) -> Iterator[subprocess.Popen[str]]:
    """Members 0 and 1 in this process, member 2 in one of its own."""
    addresses = [mesh.address for mesh in meshes]
    host = network.hosts[2]
    process = host.popen([sys.executable, "-c", MEMBER, host.address, *addresses], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        addresses.append(process.stdout.readline().strip())
        for mesh in meshes:
            mesh.enter(1, range(3))
            mesh.learn(1, dict(enumerate(addresses)))
        until(lambda: all(mesh.complete for mesh in meshes))
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def two(network: netns.Network) -> Iterator[list[Watched]]:
    with contextlib.closing(Watched(0, network.hosts[0])) as one, contextlib.closing(Watched(1, network.hosts[1])) as two:
        yield [one, two]


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_process_that_is_stopped_for_five_seconds_is_no_alarm_and_makes_none(
    network: netns.Network, two: list[Watched]
) -> None:
    with process_of_member_2(network, two) as process:
        begun = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        for mesh in two:  # nor is one to which a new connection must be made
            mesh._do(lambda now, mesh=mesh: mesh._peers[2]._broken(OSError("a test"), now))
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(2.0)
        assert [mesh.since(begun) for mesh in two] == [[], []]
        process.send_signal(signal.SIGSTOP)
        network.hosts[2].cut()  # a machine that falls silent is found although its process had been stopped
        found(two, {0: (2,), 1: (2,)})


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_machine_whose_cores_are_all_busy_is_no_alarm(network: netns.Network, two: list[Watched]) -> None:
    with process_of_member_2(network, two):
        begun = time.monotonic()
        spinning = [
            multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(4 * (os.cpu_count() or 2))
        ]
        for each in spinning:
            each.start()
        time.sleep(12.0)
        for each in spinning:
            each.kill()
            each.join()
        assert [mesh.since(begun) for mesh in two] == [[], []]


@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_process_that_is_killed_is_found_at_once(network: netns.Network, two: list[Watched]) -> None:
    with process_of_member_2(network, two) as process:
        process.kill()
        found(two, {0: (2,), 1: (2,)})
        assert [mesh.refused for mesh in two] == [(2,), (2,)]


def _spin() -> None:
    while True:
        pass
