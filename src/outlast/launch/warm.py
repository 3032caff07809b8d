"""The warm process: imports torch once, then forks training processes that start in milliseconds.

Importing torch costs 1-3 s of a core, and every restart of every rank would pay it again. So each worker keeps one process that
has done it and nothing else: no threads of its own, no CUDA context, no process group. On request it forks a child, which takes
over the caller's streams, environment and directory and becomes a training process (`launch.rank`) or the worker's elastic
agent (`launch.elastic`).

    python -m outlast.launch.warm SOCKET PARENT

Protocol, per connection: a request (`shim.request`), then lines from the caller, each a signal number for the child; one JSON
line back when the child has ended: `{"status": exit code or -signal, "time": seconds since the epoch}`. A caller that hangs up
kills its child. Children die with the warm process, and the warm process with its agent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from outlast import contract
from outlast.launch import titles
from outlast.rendezvous import transport
from outlast.rendezvous.transports import sockets

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61


def prctl(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` (its parent) dies."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(contract.exit_code(-signal.SIGKILL))


@dataclasses.dataclass
class Request:
    """What a fork is to become."""

    kind: str
    argv: list[str]
    env: Mapping[str, str]
    cwd: str
    fds: list[int]


@dataclasses.dataclass
class _Child:
    pid: int
    connection: socket.socket


def _receive(connection: socket.socket) -> Request:
    connection.settimeout(5)  # a caller that is stopped half-way must not stop the others
    head, fds, _flags, _address = socket.recv_fds(connection, 4, 3)
    length = int.from_bytes(head, "big")
    data = b""
    try:
        while len(data) < length:
            chunk = connection.recv(min(1 << 16, length - len(data)))
            if not chunk:
                raise ConnectionError("the caller hung up")
            data += chunk
        fields = json.loads(data)
    except (OSError, ValueError):
        for fd in fds:
            os.close(fd)
        raise
    connection.settimeout(None)
    return Request(fields["kind"], fields["argv"], fields["env"], fields["cwd"], list(fds))


def serve(listener: socket.socket) -> Request:
    """Fork on request, for ever; returns only in the forked children, with what they are to become."""
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda _n, _f: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    children: dict[int, _Child] = {}  # by connection's descriptor

    def reap() -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = {"status": os.waitstatus_to_exitcode(status), "time": time.time()}
            for fd, child in list(children.items()):
                if child.pid == pid:
                    with contextlib.suppress(OSError):
                        child.connection.sendall(json.dumps(ended).encode() + b"\n")
                    forget(fd)

    def forget(fd: int) -> None:
        selector.unregister(fd)
        children.pop(fd).connection.close()

    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _address = listener.accept()
                try:
                    request = _receive(connection)
                except (OSError, ValueError):  # a caller that was killed half-way
                    connection.close()
                    continue
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    listener.close()
                    connection.close()
                    for child in children.values():
                        child.connection.close()
                    os.close(wake_r)
                    os.close(wake_w)
                    die_with(parent)
                    return request
                for fd in request.fds:
                    os.close(fd)
                children[connection.fileno()] = _Child(pid, connection)
                selector.register(connection.fileno(), selectors.EVENT_READ)
            elif key.fd == wake_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_r, 4096)
                reap()
            elif key.fd in children:
                _obey(children[key.fd])
                reap()


def _obey(child: _Child) -> None:
    """Signal a child as its caller says; a caller that hung up wants it dead."""
    try:
        lines = child.connection.recv(4096)
    except OSError:
        lines = b""
    for number in [int(line) for line in lines.split()] or [int(signal.SIGKILL)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
            os.kill(child.pid, signal.SIGCONT)  # a stopped process would sleep through the signal


def become(request: Request) -> None:
    """Turn this fresh fork into what was asked for; returns when it is done, raises SystemExit as it likes."""
    os.setsid()
    for target, fd in enumerate(request.fds):
        os.dup2(fd, target)
    for fd in request.fds:
        if fd > 2:
            os.close(fd)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    prctl(_PR_SET_PTRACER, 0xFFFFFFFFFFFFFFFF)  # py-spy, a sibling, may read the stacks of a hung process
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # forks of one process would draw the same numbers
    sys.argv = [request.kind, *request.argv]
    titles.entitle(title(request))
    if request.kind == "elastic":
        from outlast.launch import elastic

        elastic.main(request.argv)
    else:
        from outlast.launch import rank

        rank.main(request.argv)


def title(request: Request) -> str:
    """What a fork is called."""
    if request.kind == "elastic":
        return f"elastic agent {request.env.get(contract.Env.WORKER, '')}"
    script = request.argv[1] if request.argv[0] == "-m" else os.path.basename(request.argv[0])
    return f"rank {request.env.get('RANK', '0')} {script}"


def leave(code: int) -> NoReturn:
    """End a training process that leaves in the middle, with all that Python does at its end but the end of the interpreter:
    threads of torch that are still about then end the process with SIGABRT now and then, which looks like a failure.
    multiprocessing ends its forks like this, too."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase) and not each.closed:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                each.flush()
    os._exit(code)


PRELOADED = (
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.nn.parallel",
    "outlast.rendezvous.handler",
    "outlast.launch.elastic",
    "outlast.launch.rank",
    "outlast.training.session",
)


def preload() -> None:
    """Import what the elastic agent and nearly every training process import."""
    for module in PRELOADED:
        importlib.import_module(module)
    transport.preload(os.environ.get(contract.Env.RENDEZVOUS, ""))
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")  # torch's optimizers import it when the first is made: 1 s
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, pages shared with the forks


def main() -> None:
    """Import, listen, fork."""
    listener = sockets.listening(Path(sys.argv[1]))
    preload()
    titles.entitle("warm process")
    request = serve(listener)
    try:
        become(request)
    except SystemExit as end:
        if request.kind == "rank" and end.code == contract.Exit.INTERRUPTED:
            leave(contract.Exit.INTERRUPTED)
        raise


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    main()
