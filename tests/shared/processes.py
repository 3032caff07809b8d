"""Processes that tests start."""

from __future__ import annotations

import contextlib
import subprocess

import psutil

from outlast.base import unix_sockets


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants with SIGKILL, as if their machine were lost, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        for each in [found, *found.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def listens(path: str) -> bool:
    """Return whether a process accepts connections at this Unix socket."""
    with contextlib.suppress(OSError):
        unix_sockets.connect(path).close()
        return True
    return False
