"""One connection of the mesh: a non-blocking socket with sealed lines (`job.sealed_lines`), each a JSON object.

Both sides begin with a nonce in the clear. The connecting side seals as a "member", the accepting side as a "decider", so an
attacker cannot reflect a line, and a port that echoes its input cannot pass as a peer.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Any

from outlast.base import tcp
from outlast.job import sealed_lines

LINE_BYTES = 1 << 20
"""Maximum number of bytes in a line. A failure with its traceback takes some 12 KiB."""
WAITING_BYTES = 8 << 20
"""Maximum number of bytes queued for a peer that does not read."""
IDLE_S, LOST_S = 1, 1.5
"""TCP keepalive on the connecting side: the kernel probes a connection after `IDLE_S` idle seconds, then every second.

An unacknowledged probe breaks the connection after 2 s, unacknowledged data after 1.5 s (tcp(7), TCP_USER_TIMEOUT). A probe
carries no data, so the buffer of a stopped process never fills.
"""
CALLED_IDLE_S, CALLED_LOST_S = 20, 0.7
"""TCP keepalive on the accepting side. Retransmissions end early because they would keep the other side from probing."""


def resolved(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return an address's family, host and port. The host must be numeric because resolving a name takes time. Raises
    ValueError."""
    host, port = tcp.host_port(address)
    return socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6, (host, port)


class Connection:
    """A non-blocking connection. Its methods raise OSError if it breaks, and ValueError (such as `sealed_lines.Forged`) if the
    peer is not a member."""

    def __init__(self, sock: socket.socket, side: sealed_lines.Side, key: bytes) -> None:
        self.sock = sock
        self._side: sealed_lines.Side = side
        self._key = key
        self._nonce = sealed_lines.nonce()
        self._seal: sealed_lines.Seal | None = None
        self._queued: list[bytes] = []
        """Lines to send once the peer's nonce has arrived."""
        self._in, self._out = bytearray(), bytearray(sealed_lines.greeting(self._nonce))
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            lost_s, idle_s = (LOST_S, IDLE_S) if side == "member" else (CALLED_LOST_S, CALLED_IDLE_S)
            tcp.ends_when_lost(sock, lost_s, idle_s=idle_s, probe_s=IDLE_S)

    @property
    def writing(self) -> bool:
        return bool(self._out)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; `flush` sends it."""
        line = json.dumps(message).encode()
        if len(self._out) > WAITING_BYTES:
            raise ConnectionError(f"more than {WAITING_BYTES} bytes wait to be read")
        if self._seal:
            self._out += self._seal.sealed(line)
        else:
            self._queued.append(line)

    def flush(self) -> None:
        """Send as many bytes as the kernel accepts now."""
        while self._out:
            try:
                del self._out[: self.sock.send(self._out)]
            except BlockingIOError:
                return

    def receive(self) -> list[dict[str, Any]]:
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the peer disconnected")
        self._in += data
        messages = []
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            if self._seal is None:
                self._greeted(line)
                continue
            message = json.loads(self._seal.opened(line))
            if not isinstance(message, dict):
                raise ValueError("a line of the mesh is not a JSON object")
            messages.append(message)
        if len(self._in) > (LINE_BYTES if self._seal else sealed_lines.LONGEST_NONCE):
            raise ValueError(f"a line has more than {LINE_BYTES} bytes")
        return messages

    def _greeted(self, line: bytes) -> None:
        self._seal = sealed_lines.Seal(self._key, self._side, own=self._nonce, peer=sealed_lines.greeted(line))
        for queued in self._queued:
            self._out += self._seal.sealed(queued)
        self._queued.clear()

    def close(self) -> None:
        self.sock.close()
