"""Starts a new worker on this machine as a fork of another worker's warm process, which has imported torch and shares its memory.

    launcher      requests a fork from a training worker's warm process (`ask`), or starts the worker in the usual way
    warm process  forks a process that is not its child (`orphan`), which becomes the new worker's agent
    agent         forks its own warm process before it has threads, and continues as `python -m outlast agent`

The environment in /proc identifies a process's worker. A fork inherits it and overwrites it in place (`show`), so only values of
equal length may differ. Linux only. See docs/decisions/0042-starting.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from outlast.base import unix_sockets
from outlast.job import accelerators, contract
from outlast.worker.launch import os_calls, warm_request

KIND = "agent"
"""The request's kind, and the forked process's role (`outlast.__main__`)."""
ANSWER_S = 1.0
"""Timeout for the response, in seconds. While the warm process imports a module, the response may take longer. Arbitrary."""
_GO = b"go\n"
ROOM = "_LOCAL_RANK"
"""A placeholder in the warm process's environment, to be overwritten with `LOCAL_RANK` and its value."""
_ROOM_VALUE = "0000"


class Forked:
    """A forked child, with the methods of `subprocess.Popen` that its parent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or the negative signal number; None while the child runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


warm: Forked | None = None
"""The warm process that was forked along with this agent, if any."""


def start_warm(python: str, environ: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
    """Start the warm process in the interpreter for training, unless it was forked along with this agent."""
    if warm and warm.poll() is None:
        return warm
    command = [python, "-m", "outlast", "warm", os.path.join(environ[contract.Env.STATE], warm_request.SOCKET), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**environ, ROOM: _ROOM_VALUE})


def ask(path: str, environ: Mapping[str, str], cwd: str, log: int) -> int | None:
    """Have the warm process at `path` fork an agent with this environment, directory and log. Returns the agent's pid, if any."""
    if sys.platform != "linux":
        return None
    environ = {**environ, **os_calls.streaming(environ)}  # just as an agent does for its warm process
    with contextlib.suppress(OSError), unix_sockets.connect(path) as sock, open(os.devnull, "rb") as null:
        sock.settimeout(ANSWER_S)
        warm_request.request(sock, KIND, [], environ, cwd, (null.fileno(), log, log))
        answer = sock.recv(64).strip()
        if answer.isdigit():  # a warm process from an earlier version answers with JSON
            sock.sendall(_GO)
            return int(answer)
    return None


def differing(own: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables in the `new` worker's environment that differ from our `own`. Returns None if that environment does
    not fit: libraries have already read other variables, and values must have equal lengths."""
    devices = {row.visible for row in accelerators.TABLE}
    changed = {name: value for name, value in new.items() if own.get(name) != value}
    if own.keys() != new.keys() or not all(name.startswith("OUTLAST_") or name in devices for name in changed):
        return None
    same_length = all(len(os.fsencode(value)) == len(os.fsencode(own[name])) for name, value in changed.items())
    return changed if same_length else None


def orphan(connection: socket.socket, changed: Mapping[str, str]) -> bool:
    """Fork again, so that the new process is not our child. Returns only in the new process: True if the caller still waits."""
    if os.fork():
        os._exit(0)
    os.setsid()
    show(changed)  # first, since a process with another worker's environment counts as lost
    connection.settimeout(10.0)  # longer than any launcher's timeout
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.getpid())
        return connection.recv(64) == _GO
    return False


def show(changed: Mapping[str, str]) -> None:
    """Overwrite these variables in this process's /proc/<pid>/environ, which is also the environment that C code sees."""
    _overwrite({f"{name}=": f"{name}={value}" for name, value in changed.items()})


def show_local_rank(local_rank: str) -> None:
    """Show LOCAL_RANK in this training process's /proc/<pid>/environ, as torchrun's processes do, since people search for it."""
    room = f"{ROOM}={_ROOM_VALUE}"
    _overwrite({room: f"LOCAL_RANK={local_rank}".ljust(len(room), "\0")})


def _overwrite(entries: Mapping[str, str]) -> None:
    """Write each text over the environment entry that begins with its key. No text may be longer than its entry."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5)
    block = b"\0" + ctypes.string_at(start, end - start)
    for old, new in entries.items():
        if (at := block.find(b"\0" + os.fsencode(old))) >= 0:
            ctypes.memmove(start + at, os.fsencode(new), len(os.fsencode(new)))
