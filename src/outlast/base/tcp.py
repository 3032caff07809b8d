"""TCP connections to machines that may be lost: address parsing, and socket options that soon break a dead connection.

Called by the transports, the mesh and the data port of snapshots.
"""

from __future__ import annotations

import socket


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[2001:db8::1]:port` into host and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def ends_when_lost(sock: socket.socket, lost_s: float, *, idle_s: int = 0, probe_s: int = 1) -> None:
    """Disable Nagle's delay, and break the connection once data is unacknowledged for `lost_s` seconds. With `idle_s`, the kernel
    probes a connection that has been idle for that long, every `probe_s` seconds. The first probe after `lost_s` without an
    acknowledgement breaks it (tcp(7): TCP_USER_TIMEOUT overrides the number of probes)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * lost_s))
    if idle_s:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
