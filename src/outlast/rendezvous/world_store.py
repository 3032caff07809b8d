"""The TCPStore of a world's process group, which the worker of rank 0 hosts."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # its type stubs forget it

from outlast.rendezvous.world import World

TIMEOUT_S = 30.0
"""Timeout of requests to a world's store, once connected."""
REACH_S = 5.0
"""Timeout for connecting to the store. TCPStore itself would retry even if the host refuses connections."""


def connect(world: World, rank: int, listener: socket.socket) -> TCPStore:
    """Connect to the store of a world; on rank 0, host it on the listening socket. Raises OSError and RuntimeError."""
    host, port = world.address.rsplit(":", 1)
    timeout, reach = timedelta(seconds=TIMEOUT_S), timedelta(seconds=REACH_S)
    if rank == 0:
        fd = listener.detach()
        return TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
    socket.create_connection((host, int(port)), timeout=REACH_S).close()
    store = TCPStore(host, int(port), is_master=False, timeout=reach)
    store.set_timeout(timeout)
    return store
