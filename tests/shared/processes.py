"""Processes that tests start."""

from __future__ import annotations

import contextlib
import subprocess

import psutil


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants with SIGKILL, as if their machine were lost, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        for each in [found, *found.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
