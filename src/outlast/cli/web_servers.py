"""Runs a web server (TensorBoard, JupyterLab) as a command's child process until Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outlast.base.errors import NotFound, OutlastError
from outlast.cli import terminal

_START_S = 60.0
"""Timeout for a server's first response, in seconds. The value is arbitrary."""


def port(requested: int | None, bind: str, default: int) -> int:
    """Return the `requested` port or, without a request, the `default` port, or a free port if the default is taken. Raises
    OutlastError if the port cannot be used."""
    if not bind:
        raise OutlastError("--bind is empty; name an address, or 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for number in (requested,) if requested else (default, 0):
        try:
            with socket.create_server((bind, number), family=family) as server:
                return int(server.getsockname()[1])
        except OSError as error:
            reason = f"port {number} at {bind} cannot be used: {str(error.strerror).partition(' (while ')[0]}"
    raise OutlastError(f"{reason}; choose another --port or --bind")


def shown(bind: str) -> str:
    """Return the host in the URL by which a browser on this machine reaches a server that listens at `bind`."""
    return "localhost" if bind in ("127.0.0.1", "0.0.0.0", "::1", "::") else f"[{bind}]" if ":" in bind else bind


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """Treat SIGTERM, and SIGHUP from a closed terminal, like Ctrl-C. Each of them ends the block without an error."""

    def stopped(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]  # not with nohup
    with contextlib.suppress(KeyboardInterrupt), terminal.handled(stopped, *numbers):
        yield


@contextlib.contextmanager
def child(
    name: str,
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    *,
    environ: Mapping[str, str] | None = None,
    start_s: float = _START_S,
    grace_s: float = 5.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, and yield its process once `ready` returns True. The server ends with the block, or when this process is
    killed. Ctrl-C does not reach the server; this process stops the server. Raises NotFound, with the end of the log, if the
    server does not start."""
    from outlast.worker.launch import os_calls

    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=functools.partial(os_calls.die_with, os.getpid(), signal.SIGTERM),
        )
    until = time.monotonic() + start_s
    try:
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise NotFound(f"{name} does not start: {lines[-1] if lines else 'it says nothing'}")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(bind: str, number: int) -> bool:
    """Return whether a server accepts connections at this port."""
    with contextlib.suppress(OSError), socket.create_connection((bind, number), 1):
        return True
    return False
