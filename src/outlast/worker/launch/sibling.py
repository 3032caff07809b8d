"""A new worker of this machine as a fork of another worker's warm process: torch is imported already, and its memory is shared.

    launcher      asks the warm process of a worker that trains (`ask`); without an answer it starts the worker the usual way
    warm process  forks a process that is not its child (`orphan`), which becomes the agent of the new worker
    agent         forks a warm process of its own before it has threads, and goes on as `python -m outlast agent`

So no process of a worker depends on another worker. The worker that a process belongs to is read from its environment in /proc,
where a fork shows that of the process that was executed: it is overwritten in place (`show`), so only values of equal length may
differ. Linux only. Docs: docs/decisions/0042-starting.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from outlast.job import accelerators, contract
from outlast.worker.launch import shim, system

KIND = "agent"
"""Kind of the request, and role (`outlast.__main__`) of the process that is forked."""
ANSWER_S = 1.0
"""How long a warm process may take to answer. Arbitrary: it takes 10 ms, more while it imports something."""
_GO = b"go\n"


class Forked:
    """A child that was forked, with what its parent uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """The same, once it has ended."""
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


warm: Forked | None = None
"""The warm process that this agent was born with, if it was."""


def start_warm(python: str, environ: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
    """Start the warm process in the Python that is to train, unless this agent was born with one."""
    if warm and warm.poll() is None:
        return warm
    command = [python, "-m", "outlast", "warm", os.path.join(environ[contract.Env.STATE], shim.SOCKET), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)


def ask(path: str, environ: Mapping[str, str], cwd: str, log: int) -> int | None:
    """Have the warm process that listens at `path` fork an agent with this environment, directory and log. Returns its process
    id; None if there is none, and will be none."""
    if sys.platform != "linux":
        return None
    environ = {**environ, **system.streaming(environ)}  # as an agent does for its warm process
    with contextlib.suppress(OSError), shim.connect(path) as sock, open(os.devnull, "rb") as null:
        sock.settimeout(ANSWER_S)
        shim.request(sock, KIND, [], environ, cwd, (null.fileno(), log, log))
        answer = sock.recv(64).strip()
        if answer.isdigit():  # a warm process of an earlier version says how a child has ended
            sock.sendall(_GO)
            return int(answer)
    return None


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str] | None:
    """The variables that differ between an environment and that of a new worker, which is returned; None if it must be started
    the usual way: libraries have read other variables, and a longer value does not fit."""
    own = {row.visible for row in accelerators.TABLE}
    changed = {name: value for name, value in theirs.items() if ours.get(name) != value}
    if ours.keys() != theirs.keys() or not all(name.startswith("OUTLAST_") or name in own for name in changed):
        return None
    same_length = all(len(os.fsencode(value)) == len(os.fsencode(ours[name])) for name, value in changed.items())
    return changed if same_length else None


def orphan(connection: socket.socket, changed: Mapping[str, str]) -> bool:
    """Fork a process of its own, which is not our child, and return in it whether it is still wanted. In this process, which is a
    fork made for that, it does not return."""
    if os.fork():
        os._exit(0)
    os.setsid()
    show(changed)  # before we say who we are: the launcher takes a process for lost that shows another worker's environment
    connection.settimeout(10.0)  # long enough for any launcher to give up
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.getpid())
        return connection.recv(64) == _GO
    return False


def show(changed: Mapping[str, str]) -> None:
    """Have /proc/<pid>/environ of this process show these values. What C code reads of that environment changes with it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5)
    block = b"\0" + ctypes.string_at(start, end - start)
    for name, value in changed.items():
        entry, text = b"\0" + os.fsencode(name) + b"=", os.fsencode(value)
        if (at := block.find(entry)) >= 0:
            ctypes.memmove(start + at + len(entry) - 1, text, len(text))
