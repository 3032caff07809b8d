"""Requests to the warm process for a fork. Agents import this module first, so it imports only the standard library."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence

SOCKET = "warm.sock"
"""Name of the warm process's socket, in the directory of its worker."""
CONNECT_TIMEOUT_S = 5.0
"""Timeout of a connection in seconds, for a stopped listener with a full queue."""


def connect(path: str) -> socket.socket:
    """Connect to the warm process at `path`, which may be longer than a socket address (107 bytes on Linux)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        if len(os.fsencode(path)) < 100:
            sock.connect(path)
        else:
            directory = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
            finally:
                os.close(directory)
    except OSError:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def request(
    sock: socket.socket, kind: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: tuple[int, int, int]
) -> None:
    """Request a fork that runs `kind` ("rank" or "elastic") with these arguments, environment, directory and streams."""
    message = json.dumps({"kind": kind, "argv": list(argv), "env": dict(env), "cwd": cwd}).encode()
    socket.send_fds(sock, [len(message).to_bytes(4, "big")], fds)
    sock.sendall(message)
