"""Nodes of a made-up cluster on this machine: network namespaces on one bridge, whose packets can be made to vanish. Needs root.

with netns.nodes(3) as nodes:
    subprocess.Popen([*nodes.within(0), "command"])
    nodes.silence(0)     # no packet in or out, nothing is refused or reset
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def missing() -> str:
    """Why there can be no namespaces here, or an empty text."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [name for name in ("ip", "iptables") if shutil.which(name) is None]
    return f"{' and '.join(absent)} cannot be found; install iproute2 and iptables" if absent else ""


class Nodes:
    """Namespaces with an address each; the machine itself has `gateway`."""

    def __init__(self, count: int) -> None:
        self._tag = f"{os.getpid() % 100000:x}{time.monotonic_ns() % 4096:x}"
        self._bridge = f"olb{self._tag}"
        subnet = f"10.{200 + os.getpid() % 50}.{time.monotonic_ns() % 250}"
        self.gateway = f"{subnet}.254"
        self.addresses = [f"{subnet}.{i + 1}" for i in range(count)]
        self._names = [f"ol{self._tag}-{i}" for i in range(count)]
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for i, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            outer = f"olv{self._tag}{i}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outer, "master", self._bridge, "up")
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *words)

    def within(self, node: int) -> list[str]:
        """What a command begins with that is to run on a node."""
        return ["ip", "netns", "exec", self._names[node]]

    def silence(self, node: int) -> None:
        """Drop whatever is sent to a node or comes from it, on the side of who receives it: senders see no error."""
        _run(*self.within(node), "iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
        for other, name in enumerate(self._names):
            if other != node:
                _run("ip", "netns", "exec", name, "iptables", "-I", "INPUT", "-s", self.addresses[node], "-j", "DROP")
        _run("iptables", "-I", "INPUT", "-i", self._bridge, "-s", self.addresses[node], "-j", "DROP")

    def processes(self, node: int) -> list[int]:
        """Process ids on a node."""
        said = subprocess.run(["ip", "netns", "pids", self._names[node]], capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in said.split()]

    def close(self) -> None:
        """Remove everything, what runs there included."""
        for node, name in enumerate(self._names):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in self.processes(node):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            address = self.addresses[node]
            subprocess.run(
                ["iptables", "-D", "INPUT", "-i", self._bridge, "-s", address, "-j", "DROP"], capture_output=True, check=False
            )
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {done.returncode}: {done.stderr.strip()}")


@contextlib.contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Namespaces that are gone afterwards."""
    made = Nodes(count)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    print(missing() or f"namespaces can be made; {Path('/proc/sys/net/ipv4/tcp_syn_retries').read_text().strip()} SYN retries")
