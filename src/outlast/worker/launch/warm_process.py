"""The warm process, which imports torch once, then forks training processes that start in milliseconds, instead of 1-3 s.

    python -m outlast warm SOCKET PARENT

Each worker has one such process, without threads, CUDA context or process group. On request it forks a child, which adopts the
caller's streams, environment and directory, and becomes a training process (`launch.training_process`) or hosts a world's store
(`rendezvous.world_store`).

On each connection, the caller sends a request (`warm_request.request`), then lines with signal numbers for the child. Once the
child has ended, the response is one JSON line: `{"status": exit code or -signal, "time": seconds since the epoch}`, with `why` if
the fork failed. If the caller disconnects, its child is killed.

The socket exists once the warm process can fork. Children die with the warm process, which dies with its agent. An agent that
is forked for another worker is not a child (`launch.sibling`).
"""

from __future__ import annotations

import atexit
import contextlib
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
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from outlast import __main__ as roles
from outlast.base import unix_sockets
from outlast.job import contract
from outlast.worker.launch import os_calls, preloaded_imports, relocatable, sibling, warm_request


@dataclasses.dataclass
class Request:
    """A request for a fork: a training process, a store's process, or another worker's agent."""

    kind: str
    argv: list[str]
    env: Mapping[str, str]
    cwd: str
    fds: list[int]
    imports_fd: int | None = None
    """Descriptor for a rank's report of its imports (`preloaded_imports.report`)."""


@dataclasses.dataclass
class _Child:
    kind: str
    pid: int
    connection: socket.socket
    killed: bool = False


def _receive(connection: socket.socket) -> Request:
    connection.settimeout(5)  # a caller that stops in the middle of a request must not block others
    head, fds, _flags, _address = socket.recv_fds(connection, 4, 3)
    length = int.from_bytes(head, "big")
    data = b""
    try:
        while len(data) < length:
            chunk = connection.recv(min(1 << 16, length - len(data)))
            if not chunk:
                raise ConnectionError("the caller disconnected")
            data += chunk
        fields = json.loads(data)
    except (OSError, ValueError):
        _close(*fds)
        raise
    connection.settimeout(None)
    return Request(fields["kind"], fields["argv"], fields["env"], fields["cwd"], list(fds))


class Server:
    """The warm process's server, which forks on request until it is killed."""

    def __init__(self, listener: socket.socket, environ: Mapping[str, str]) -> None:
        """`environ` is this process's environment in /proc."""
        self._listener, self._environ = listener, environ
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        signal.signal(signal.SIGCHLD, lambda _n, _f: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}
        self._preloader = preloaded_imports.Preloader(self._selector, self._detach)

    def run(self) -> Request:
        """Serve requests. Returns only in a forked child, with the child's request."""
        while True:
            if request := self._turn(0.0 if self._preloader.modules else None):
                return request
            if self._preloader.modules:
                self._preloader.import_next()

    def _turn(self, timeout_s: float | None) -> Request | None:
        """Handle all pending events. Returns a request only in a child forked for it."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is not key:
                continue  # closed by an earlier event of this turn; another connection may have the descriptor by now
            if key.fileobj is self._listener:
                if request := self._accept():
                    return request
            elif key.fd == self._wake_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
                self._reap()
            elif (child := self._children.get(key.fd)) is not None:
                if not _signal(child):
                    child.killed = True
                    self._selector.unregister(key.fd)
            else:
                with contextlib.suppress(OSError):  # the limit on descriptors
                    self._preloader.read(key.fd)
        return None

    def _accept(self) -> Request | None:
        """Fork a child for a caller. Returns the request in the child, None in this process."""
        try:
            connection, _address = self._listener.accept()
        except OSError:  # the limit on descriptors: the caller waits
            time.sleep(warm_request.AGAIN_S)
            return None
        try:
            request = _receive(connection)
        except (OSError, ValueError):  # the caller was killed in the middle of its request
            connection.close()
            return None
        if request.kind == sibling.KIND:
            return self._fork_sibling(request, connection)
        parent = os.getpid()
        try:
            if request.kind == "rank" and request.env.get("LOCAL_RANK", "0") == "0":
                request.imports_fd = self._preloader.pipe(request.env)
            gc.freeze()
            pid = os.fork()
        except OSError as problem:  # the limit on processes, or no memory
            with connection, contextlib.suppress(OSError):
                end = {"status": -signal.SIGKILL, "time": time.time(), "why": f"could not be started: {problem.strerror}"}
                connection.sendall(json.dumps(end).encode() + b"\n")
            _close(*request.fds, request.imports_fd)
            return None
        if pid == 0:
            connection.close()
            self._detach(parent)
            return request
        _close(*request.fds, request.imports_fd)
        self._children[connection.fileno()] = _Child(request.kind, pid, connection)
        self._selector.register(connection.fileno(), selectors.EVENT_READ)
        return None

    def _fork_sibling(self, request: Request, connection: socket.socket) -> Request | None:
        """Fork another worker's agent, if its environment fits. Returns the request in the forked process."""
        changed, pid = sibling.differing(self._environ, request.env), -1
        if changed is not None:
            gc.freeze()
            with contextlib.suppress(OSError):  # the limit on processes
                pid = os.fork()
        if changed is not None and pid == 0:
            self._close()
            if not sibling.orphan(connection, changed):
                os._exit(0)
            enter(request)
            return request
        _close(*request.fds)
        connection.close()
        return None

    def _detach(self, parent: int) -> None:
        """Close the warm process's descriptors in this fork, which will die with its `parent`."""
        self._close()
        os_calls.die_with(parent)

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for sock in (self._listener, *(child.connection for child in self._children.values())):
            sock.close()
        self._preloader.close()
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)

    def _reap(self) -> None:
        """Report ended children to their callers, and continue a stopped process of a store, since all ranks may wait for it."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG | os.WUNTRACED))[0]:
                if os.WIFSTOPPED(ended[1]):
                    if any(child.pid == ended[0] and child.kind == "store" for child in self._children.values()):
                        os.kill(ended[0], signal.SIGCONT)
                    continue
                for fd in [fd for fd, child in self._children.items() if child.pid == ended[0]]:
                    child = self._children.pop(fd)
                    end = {"status": os.waitstatus_to_exitcode(ended[1]), "time": time.time()}
                    with contextlib.suppress(OSError):
                        child.connection.sendall(json.dumps(end).encode() + b"\n")
                    if not child.killed:
                        self._selector.unregister(fd)
                    child.connection.close()


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


def _signal(child: _Child) -> bool:
    """Forward a caller's signals to its child. If the caller has disconnected, kill the child and return False."""
    try:
        lines = child.connection.recv(4096)
    except OSError:
        lines = b""
    for number in [int(line) for line in lines.split()] or [int(signal.SIGKILL)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
            os.kill(child.pid, signal.SIGCONT)  # a stopped process would sleep through the signal
    return bool(lines)


def enter(request: Request) -> None:
    for target, fd in enumerate(request.fds):
        os.dup2(fd, target)
    for fd in request.fds:
        if fd > 2:
            os.close(fd)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)


def become(request: Request) -> None:
    """Carry out a request in this fork. Returns once that is done, or raises SystemExit."""
    os.setsid()
    enter(request)
    os_calls.be_traced()  # py-spy, a sibling, may read the stacks of a hung process
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # otherwise all forks would draw the same numbers
    sys.argv = [request.kind, *request.argv]
    os_calls.entitle(title(request))
    if request.kind == "store":
        from outlast.rendezvous import world_store

        world_store.main(request.argv)
    else:
        if sys.platform == "linux":
            sibling.show_local_rank(request.env["LOCAL_RANK"])
        from outlast.worker.launch import training_process

        if request.imports_fd is not None:
            preloaded_imports.report(request.imports_fd, set(sys.modules))
        training_process.main(request.argv)


def title(request: Request) -> str:
    if request.kind == "store":
        return f"store of worker {request.env.get(contract.Env.WORKER, '')}"
    from outlast.worker.launch import training_process

    return training_process.title(request.argv, request.env)


def leave(code: int) -> NoReturn:
    """End an interrupted training process without finalizing the interpreter, since torch's threads could then end it with
    SIGABRT. multiprocessing ends its forks in the same way."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase) and not each.closed:
            with contextlib.suppress(OSError, ValueError):  # its reader may have ended
                each.flush()
    os._exit(code)


PRELOADED = (
    "outlast.rendezvous.world_store",
    "torch.nn.parallel",
    "outlast.worker.launch.training_process",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # torch's first optimizer or DDP imports it: 0.5 s
    "outlast.training.session",
)
"""Modules that the store's process or nearly all training processes import."""


def preload() -> None:
    for module in PRELOADED:
        with contextlib.suppress(ImportError) if module == "torch._dynamo" else contextlib.nullcontext():
            importlib.import_module(module)


def begin(child: sibling.Forked) -> NoReturn:
    """Become a worker's agent, with this child as its warm process."""
    sibling.warm = child
    try:
        roles.main([sibling.KIND])
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(argv: list[str]) -> None:
    """Import the modules, listen for requests, and fork. The garbage collector is off: imports then take a quarter less time and
    produce hardly any garbage, and forks do not copy shared pages."""
    os_calls.die_with(int(argv[1]))
    gc.disable()
    os.environ.pop(sibling.ROOM, None)
    environ = dict(os.environ)
    os_calls.entitle("warm process")
    relocatable.offer()
    preload()
    request = Server(unix_sockets.listening(Path(argv[0])), environ).run()
    while request.kind == sibling.KIND:
        agent, pid = os.getpid(), os.fork()
        if pid:
            gc.enable()
            begin(sibling.Forked(pid))
        os_calls.die_with(agent)
        os_calls.entitle("warm process")
        listener = unix_sockets.listening(Path(request.env[contract.Env.STATE]) / warm_request.SOCKET)
        request = Server(listener, request.env).run()
    gc.enable()
    try:
        become(request)
    except SystemExit as end:
        if request.kind == "rank" and end.code == contract.Exit.INTERRUPTED:
            leave(contract.Exit.INTERRUPTED)
        raise
