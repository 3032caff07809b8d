"""Requests for a fork from the warm process. Agents import this module first, so it imports only the standard library."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence

SOCKET = "warm.sock"
AGAIN_S = 1.0
"""Pause in seconds after reaching the limit on processes or descriptors."""


def request(
    sock: socket.socket, kind: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: tuple[int, int, int]
) -> None:
    """Request a fork that runs `kind` ("rank", "store" or "agent") with these arguments, environment, directory and streams."""
    message = json.dumps({"kind": kind, "argv": list(argv), "env": dict(env), "cwd": cwd}).encode()
    socket.send_fds(sock, [len(message).to_bytes(4, "big")], fds)
    sock.sendall(message)
