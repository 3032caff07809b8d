"""A worker's training processes in one world, and the process that hosts the world's store. They are forks of the warm process,
each with a connection that reports its end. With several training processes, output lines have the rank as a prefix."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.base import unix_sockets
from outlast.job.contract import Env
from outlast.job.workerfiles import next_world
from outlast.rendezvous.who_trains import World
from outlast.worker.launch import warm_request
from outlast.worker.launch.rank_failures import Ended

PIECE = 65536
"""Maximum number of bytes in one read (a pipe's capacity) and in a line."""
PREFIX = "[rank {}] "
KILL_DELAY_S = 5.0
"""Seconds from SIGTERM to SIGKILL for training without a grace period."""
CAUSE_S = 0.5
"""Maximum seconds to wait for the process that failed first, which may end after those whose failures it caused."""
LOST = "was lost with its warm process"
"""The reason given for a process whose warm process was killed. The kernel then kills it, too, and nothing reports its end."""
END_S = 60.0
"""Longest wait in seconds for a killed process, which a driver or a disk may delay."""


class Lines:
    """Copies a process's output from the pipe `write` to our stdout, each line with the rank as a prefix."""

    def __init__(self, rank: int) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.prefix = PREFIX.format(rank).encode()
        self._rest = b""

    def copy(self, *, last: bool = False) -> bool:
        """Copy the lines in the next piece and, if `last` is set, also an unfinished line. Returns whether more may follow."""
        more, data = True, b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.read, PIECE)
            more = bool(data)
        lines = (self._rest + data).splitlines(keepends=True)  # splits at \r, too, for progress bars
        self._rest = b"" if last or not lines or lines[-1].endswith((b"\r", b"\n")) else lines.pop()
        if len(self._rest) >= PIECE:
            lines.append(self._rest[:PIECE] + b"\n")
            self._rest = self._rest[PIECE:]
        for line in lines:
            os.write(1, self.prefix + line)
        return more


class Fork(threading.Thread):
    """A fork of the warm process at `path`. The thread copies the fork's output, and ends with the fork."""

    def __init__(
        self,
        path: str,
        kind: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        cwd: str,
        changed: threading.Condition,
        *,
        stdin: int = 0,
    ) -> None:
        self._rank = int(environ["RANK"]) if kind == "rank" else None
        self._local_rank = int(environ["LOCAL_RANK"]) if kind == "rank" else -1
        self._environ = environ
        super().__init__(name=kind if self._rank is None else f"rank-{self._rank}", daemon=True)
        self._changed = changed
        self.ended: Ended | None = None
        self._asked_at = math.inf
        """When we first asked the process to end, in seconds since the epoch."""
        self._lines: Lines | None = None
        try:
            with contextlib.ExitStack() as unless_started:
                if self._rank is not None and environ["LOCAL_WORLD_SIZE"] != "1":
                    self._lines = Lines(self._rank)
                    unless_started.callback(os.close, self._lines.read)
                self._sock = unless_started.enter_context(unix_sockets.connect(path))
                streams = (stdin, self._lines.write, self._lines.write) if self._lines else (stdin, 1, 2)
                warm_request.request(self._sock, kind, argv, environ, cwd, streams)
                self.start()
                unless_started.pop_all()
        except (OSError, RuntimeError) as problem:  # the limit on descriptors or threads; or no warm process
            time.sleep(warm_request.AGAIN_S)  # another attempt follows at once
            self._end(-signal.SIGKILL, time.time(), f"could not be started: {problem}")
        if self._lines:
            os.close(self._lines.write)

    def run(self) -> None:
        status, when, why = -signal.SIGKILL, 0.0, LOST
        try:
            with self._sock, self._sock.makefile("rb") as answer:
                if self._lines:
                    self._copy(self._lines)
                if (reply := answer.readline()).endswith(b"\n"):
                    end = json.loads(reply)
                    status, when, why = int(end["status"]), end["time"], str(end.get("why", ""))
                    if why:
                        time.sleep(warm_request.AGAIN_S)  # another attempt follows at once
            if self._lines:
                self._lines.copy(last=True)
        except OSError as problem:  # from our own output; closing the connection ends the process
            why = f"was killed, since its output could not be copied: {problem}"
        if self._lines:
            os.close(self._lines.read)
        self._end(status, when or time.time(), why)

    def _copy(self, lines: Lines) -> None:
        ready, sock = select.poll(), self._sock.fileno()
        for fd in (sock, lines.read):
            ready.register(fd, select.POLLIN)
        while sock not in dict(ready.poll()) and lines.copy():
            pass

    def _end(self, status: int, when: float, why: str) -> None:
        with self._changed:
            self.ended = Ended(self._rank, self._local_rank, status, when, why, asked=self._asked_at <= when)
            self._changed.notify_all()

    def go_on(self, environ: Mapping[str, str]) -> None:
        """Give the waiting process its rank in the next world. Raises OSError."""
        always = Env.GENERATION, Env.ATTEMPT  # `next_world.read` compares them
        place = {name: value for name, value in environ.items() if name in always or self._environ.get(name) != value}
        next_world.write(Path(environ[Env.STATE]), self._local_rank, place)
        self._environ, self._rank = environ, int(environ["RANK"])
        self.name = f"rank-{self._rank}"
        if self._lines:
            self._lines.prefix = PREFIX.format(self._rank).encode()

    def signal(self, number: int) -> None:
        self._asked_at = min(self._asked_at, time.time())
        with contextlib.suppress(OSError):
            self._sock.sendall(b"%d\n" % number)

    def give_up(self) -> None:
        """Stop waiting for a process that the kernel cannot end."""
        print(
            f"outlast | rank {self._rank} was killed {END_S:.0f} s ago and has not ended: a disk or a driver blocks it",
            flush=True,
        )
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.join(2 * warm_request.AGAIN_S)


class RankProcesses:
    """This worker's training processes in one world, and the process of the world's store if this worker hosts it."""

    def __init__(self, path: str, cwd: str) -> None:
        """`path` is the warm process's socket."""
        self._path, self._cwd = path, cwd
        self._changed = threading.Condition()
        self._ranks: list[Fork] = []
        self._store: Fork | None = None

    def host(self, address: str, listener: socket.socket, environ: Mapping[str, str]) -> None:
        """Start the process that hosts the world's store and accepts connections on the `listener`."""
        self._store = Fork(self._path, "store", [address], environ, self._cwd, self._changed, stdin=listener.fileno())

    def start(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        """Start a training process for each of `environs`, or continue the kept processes if all of them can."""
        if self._ranks and not self.over():
            with contextlib.suppress(OSError):  # a full disk
                for rank, environ in zip(self._ranks, environs, strict=True):
                    rank.go_on(environ)
                return
        self._stop_ranks(0.0)
        self._ranks = [Fork(self._path, "rank", command, environ, self._cwd, self._changed) for environ in environs]

    def keep(self) -> None:
        """End the process of the world's store, but not the processes that wait for the next world."""
        if self._store and not self._store.ended:
            self._store.signal(signal.SIGKILL)

    def over(self) -> bool:
        """Return whether all training processes have ended, or any process has failed."""
        return self._ended() or bool(self.failures())

    def wait(self, timeout_s: float, *, all_: bool = False) -> None:
        """Wait until `over` or, if `all_` is set, until all training processes have ended, but at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(self._ended if all_ else self.over, timeout_s)

    def _ended(self) -> bool:
        return all(rank.ended for rank in self._ranks)

    def stop(self, delay_s: float) -> None:
        """End all processes with SIGTERM, and after `delay_s` seconds with SIGKILL."""
        self._stop_ranks(delay_s)
        self.keep()

    def _stop_ranks(self, delay_s: float) -> None:
        for number, patience_s in ((signal.SIGTERM, delay_s), (signal.SIGKILL, END_S)):
            for rank in self._ranks:
                if not rank.ended:
                    rank.signal(number)
            self.wait(patience_s, all_=True)
        for rank in self._ranks:
            if not rank.ended:
                rank.give_up()

    def failures(self) -> list[Ended]:
        """Return the `Ended` of each training process that failed, and that of the store's process unless we ended it."""
        failed = [rank.ended for rank in self._ranks if rank.ended and rank.ended.code]
        return [*failed, *([self._store.ended] if self._store and self._store.ended and not self._store.ended.asked else [])]

    def left(self) -> Ended | None:
        """Return the `Ended` of the first process that exited with 0 without being asked to end."""
        return next((rank.ended for rank in self._ranks if rank.ended and not rank.ended.code and not rank.ended.asked), None)


def environs(world: World, run_id: str, processes: int, group_rank: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environments for a worker's training processes: the worker's own, plus what torchrun adds."""
    host, port = world.address.rsplit(":", 1)
    workers = len(world.members)
    size = {"WORLD_SIZE": workers * processes, "ROLE_WORLD_SIZE": workers * processes, "LOCAL_WORLD_SIZE": processes}
    shared = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **environ,
        **{name: str(value) for name, value in size.items()},
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(workers),
        "ROLE_NAME": "outlast",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [(local_rank, str(group_rank * processes + local_rank)) for local_rank in range(processes)]
    return [{**shared, "LOCAL_RANK": str(local_rank), "RANK": rank, "ROLE_RANK": rank} for local_rank, rank in ranks]
