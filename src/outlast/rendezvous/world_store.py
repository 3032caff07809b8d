"""The TCPStore of a world's process group, hosted by the worker with rank 0: in torchrun's process (`connect`), or in a separate
process that outlives rank 0 (`main`).
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # its type stubs forget it

from outlast.base import tcp
from outlast.rendezvous.who_trains import World

TIMEOUT_S = 30.0
"""Timeout for requests to a world's store, once connected."""


def connect(world: World, rank: int, listener: socket.socket) -> TCPStore:
    """Connect to a world's store; on rank 0, host it on the listening socket. Raises OSError and RuntimeError."""
    if rank == 0:
        return _hosted(world.address, listener.detach())
    tcp.reach(world.address)  # TCPStore itself would retry even if the host refuses connections
    return client(world.address)


def client(address: str) -> TCPStore:
    """Connect to the store at an address. Raises RuntimeError."""
    host, port = tcp.host_port(address)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=tcp.REACH_S))
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    return store


def main(argv: list[str]) -> None:
    """Host the store at an address, on the socket in descriptor 0, until this process is killed."""
    store = _hosted(argv[0], os.dup(0))
    while store:
        signal.pause()


def _hosted(address: str, fd: int) -> TCPStore:
    host, port = tcp.host_port(address)
    timeout = timedelta(seconds=TIMEOUT_S)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
