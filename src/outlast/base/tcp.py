"""Parses TCP addresses, and makes connections break soon after the other machine is lost."""

from __future__ import annotations

import socket

REACH_S = 5.0


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[2001:db8::1]:port` into host and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reach(address: str) -> None:
    """Check that connections are accepted at `host:port`. Raises OSError."""
    socket.create_connection(host_port(address), timeout=REACH_S).close()


def ends_when_lost(sock: socket.socket, lost_s: float, *, idle_s: int = 0, probe_s: int = 1) -> None:
    """Disable Nagle's delay, and break the connection once data is unacknowledged for `lost_s` seconds.

    With `idle_s`, the kernel probes a connection that has been idle for that long every `probe_s` seconds, and breaks it once
    probes are unacknowledged for `lost_s` (tcp(7): TCP_USER_TIMEOUT overrides the number of probes).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * lost_s))
    if idle_s:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
