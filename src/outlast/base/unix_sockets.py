"""Opens Unix sockets at paths of any length.

Linux limits addresses to 107 bytes, so these functions use addresses relative to the socket's directory.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def connect(path: str | Path, timeout_s: float = 5.0) -> socket.socket:
    """Connect to the socket at `path`; the timeout applies to connecting only. Raises OSError."""
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(directory)
    sock.settimeout(None)
    return sock


def listening(path: Path) -> socket.socket:
    """Return a socket that listens at `path` and accepts connections only from this user. Replaces an existing file."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        sock.bind(path.name)
        os.chmod(path.name, 0o600)
    finally:
        os.chdir(here)
    sock.listen(128)
    return sock
