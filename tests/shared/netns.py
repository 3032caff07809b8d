"""A small network of hosts that are network namespaces of this machine, joined by a switch; packets are real, and get lost.

    with Network(3) as network:
        one, two, three = network.hosts
        process = one.popen([sys.executable, "member.py"])     at one.address, 10.77.0.1
        with two.inside():                                      sockets and threads that are made here are the host's
            mesh = Mesh(2, two.address, key)
        three.cut()                                             silent: packets to and from it vanish
        one.deaf_to(two)                                        what two sends to one vanishes, not the reverse
        network.split([one], [two, three])
        network.heal()

Needs root, iproute2 and iptables: mark tests `slow`, and `netns.NEEDED`. The switch is a namespace, too, so nothing of this
machine's own network is touched. Of no use to processes that must reach the outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest

_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def lacking() -> str:
    """Return what is missing for a network of namespaces; empty if nothing is."""
    if os.geteuid():
        return "needs root"
    return next((f"needs {tool}" for tool in ("ip", "iptables") if not shutil.which(tool)), "")


NEEDED = pytest.mark.skipif(bool(lacking()), reason=lacking() or "nothing is lacking")


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@dataclass
class Host:
    network: Network
    index: int
    name: str
    """Name of the namespace, for `ip netns exec`."""
    address: str

    def popen(self, argv: Sequence[str], **how: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *argv], text=True, **how)

    def run(self, *argv: str) -> None:
        run("ip", "netns", "exec", self.name, *argv)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread to the host. Its new sockets and threads stay on the host for good."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(there)
            os.close(own)

    def cut(self) -> None:
        """Disconnect the far side of the switch port: packets vanish both ways, and the host sees no change."""
        run("ip", "-n", self.network.switch, "link", "set", self._port, "nomaster")

    def join(self) -> None:
        run("ip", "-n", self.network.switch, "link", "set", self._port, "master", "switch")

    def deaf_to(self, other: Host) -> None:
        """Drop all packets from `other` to this host."""
        self.run("iptables", "-I", "INPUT", "-s", other.address, "-j", "DROP")

    def lossy(self, share: float) -> None:
        """Drop this fraction of the packets to this host, at random."""
        self.run("iptables", "-I", "INPUT", "-m", "statistic", "--mode", "random", "--probability", f"{share}", "-j", "DROP")

    @property
    def _port(self) -> str:
        return f"port{self.index}"


class Network:
    def __init__(self, size: int) -> None:
        self._name = f"outlast-{os.getpid()}-{secrets.token_hex(2)}"
        self.switch = f"{self._name}-switch"
        self.hosts = [Host(self, i, f"{self._name}-{i}", f"10.77.0.{i}") for i in range(1, size + 1)]

    def __enter__(self) -> Self:
        try:
            run("ip", "netns", "add", self.switch)
            run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "switch", "up")
            for host in self.hosts:
                run("ip", "netns", "add", host.name)
                ends = ("eth0", "netns", host.name, "type", "veth", "peer", "name", host._port, "netns", self.switch)
                run("ip", "link", "add", *ends)
                run("ip", "-n", self.switch, "link", "set", host._port, "master", "switch", "up")
                run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    run("ip", "-n", host.name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the network. The caller must end the processes on its hosts."""
        for name in (self.switch, *(host.name for host in self.hosts)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def split(self, *sides: Sequence[Host]) -> None:
        for side in sides:
            for host in side:
                for other in (each for others in sides if others is not side for each in others):
                    host.deaf_to(other)

    def heal(self) -> None:
        for host in self.hosts:
            host.run("iptables", "-F", "INPUT")
            host.join()


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
