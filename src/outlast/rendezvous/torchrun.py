"""The etcd rendezvous for plain torchrun: its options, and a client that may be elected coordinator.

    torchrun --rdzv-backend=outlast --rdzv-endpoint=etcd://host:2379 --rdzv-id=train --nnodes=2:8 train.py

Called by `rendezvous.handler`. See docs/guide/torchrun.md for the options.
"""

from __future__ import annotations

import atexit
import ipaddress
import math
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from outlast.base.backoff import pause
from outlast.base.errors import EtcdAway, OutlastError
from outlast.job.status import State
from outlast.rendezvous import coordinator, member_client, restart_budget, who_trains
from outlast.rendezvous.etcd import client as etcd
from outlast.rendezvous.etcd import gateway as servers
from outlast.rendezvous.etcd.member import TTL_S, Identity

DEFAULTS = {
    "ttl": float(TTL_S),
    "join_timeout": 600.0,
    "last_call_timeout": 30.0,
    "recovery_timeout": who_trains.Timeouts().recovery,
    "growth_timeout": who_trains.Timeouts().growth,
    "connect_timeout": 60.0,
}
"""Options in seconds, with their defaults."""
FOREIGN = (
    *("timeout", "read_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    *("is_host", "store_type", "protocol", "etcd_prefix", "use_libuv", "state", "processes"),
)
"""Options for torch's own backends, which are accepted but have no effect."""
UNNAMED = "none"
"""torchrun's run id if --rdzv-id is not given."""
_FOREVER = restart_budget.Policy(limit=sys.maxsize, window=timedelta(days=1))
"""A policy without a limit, because torchrun itself counts --max-restarts."""


class Client(member_client.Client):
    """A torchrun node's client, which may be elected coordinator."""

    def __init__(
        self, where: servers.Address, sizes: tuple[int, int], seconds: Mapping[str, float], *, run: str, id: int | None = None
    ) -> None:
        from outlast.rendezvous.etcd.election import ElectionConfig

        least, most = sizes
        who = Identity(run, id, ttl=int(seconds["ttl"]), nnodes=f"{least}:{most}", most=most)
        self.board = etcd.Board(where, who)
        super().__init__(self.board)
        self.token = who.token
        timeouts = who_trains.Timeouts(
            start=seconds["last_call_timeout"], recovery=seconds["recovery_timeout"], growth=seconds["growth_timeout"]
        )
        settings = coordinator.Settings(tuple(range(least, most + 1)), _FOREVER, timeouts)
        config = ElectionConfig(settings, Printer(), token=who.token, nnodes=who.nnodes, ttl=who.ttl)
        self._running = etcd.Running(where, run, config, id=lambda: self.id if self.id >= 0 else None)
        self._candidate_started = False
        self._standing = ""
        self.host = ""
        """Address at which other nodes reach this machine."""

    def connect(self, within_s: float) -> None:
        """Connect to etcd for the first time. Raises EtcdError after `within_s`, or at once if a retry cannot help."""
        begun, failures = time.monotonic(), 0
        while True:
            try:
                self.board.etcd.range(self.board.keys.published)
                break
            except EtcdAway as problem:
                if time.monotonic() - begun > within_s:
                    raise EtcdAway(f"{problem} (for connect_timeout, {within_s:g} s)") from problem
                if not failures:
                    print(f"outlast | {problem}; trying again for {within_s:g} s", flush=True)
                failures += 1
                time.sleep(pause(failures, etcd.LONGEST_PAUSE_S))
        client = self.board.etcd
        self.host = own_address(client.local, [host for host, _ in client.address.hosts], primary())

    def report(self, standing: str, **fields: Any) -> None:
        self._standing = standing
        super().report(standing, **fields)
        if not self._candidate_started:
            self._candidate_started = True
            self._running.start()
            atexit.register(self.close)  # after a signal, torchrun does not shut down its handler

    def close(self) -> None:
        atexit.unregister(self.close)
        super().close()
        if self._candidate_started:
            self._running.close(done=self._standing == who_trains.MemberState.DONE)


class Printer:
    """An event sink for a torchrun node that coordinates. It prints, but has neither a ledger nor a store."""

    def say(self, text: str) -> None:
        print(f"outlast | {text}", flush=True)

    def event(self, kind: str, **facts: Any) -> None:
        """Do nothing: there is no ledger."""

    def finished(self, state: State, reason: str, code: int) -> None:
        """Do nothing: there is no store to record the end in."""


def client(endpoint: str, *, run: str, sizes: tuple[int, int], conf: Mapping[str, Any]) -> tuple[Client, float]:
    """Connect a client, and return it with the timeout in seconds for joining a world. Raises OutlastError."""
    seconds = options(conf)
    where = servers.address(endpoint, {name: str(value) for name, value in conf.items() if name in servers.OPTIONS})
    if run == UNNAMED:
        print("outlast | no --rdzv-id: all nodes without one at this etcd form one job; give every job its own", flush=True)
    connected = Client(where, sizes, seconds, run=run, id=int(conf["id"]) if "id" in conf else None)
    connected.connect(seconds["connect_timeout"])
    return connected, seconds["join_timeout"]


def options(conf: Mapping[str, Any]) -> dict[str, float]:
    """Return the --rdzv-conf options in seconds, with defaults. Raises OutlastError for an invalid option."""
    seconds = dict(DEFAULTS)
    for name, value in conf.items():
        if name in DEFAULTS:
            try:
                seconds[name] = float(value)
            except ValueError:
                seconds[name] = math.nan
            if not 0 <= seconds[name] < math.inf:
                raise OutlastError(f"--rdzv-conf {name}={value} must be a number of seconds, e.g. {name}={DEFAULTS[name]:g}")
        elif name not in (*servers.OPTIONS, *FOREIGN, "id"):
            expected = ", ".join([*DEFAULTS, *servers.OPTIONS, "id"])
            raise OutlastError(f"--rdzv-conf {name}={value} is unknown; expected one of {expected}")
    if not str(conf.get("id", 0)).isdecimal():
        raise OutlastError(f"--rdzv-conf id={conf['id']} must be the index of this node: 0, 1, 2, ...")
    if seconds["ttl"] < etcd.LEAST_TTL_S or seconds["ttl"] % 1:
        least = f"whole seconds, at least {etcd.LEAST_TTL_S}, the shortest TTL that etcd grants"
        raise OutlastError(f"--rdzv-conf ttl={conf['ttl']} must be {least}")
    return seconds


def own_address(seen: str, hosts: Sequence[str], main: str) -> str:
    """Return the address at which other nodes reach us: `seen`, our end of the connection to etcd, or `main`, the main address of
    this machine.

    `main` is returned if `seen` is a loopback address although no etcd endpoint in `hosts` is. If an endpoint is a loopback
    address, all nodes are on this machine.
    """
    if not _loopback(seen) or any(host == "localhost" or _loopback(host) for host in hosts):
        return seen
    return main or seen


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # the address is a host name
        return False


def primary() -> str:
    """Return this machine's address on its default route, without sending anything; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737
            return str(sock.getsockname()[0])
        except OSError:
            return ""
