"""The rendezvous transport by which workers connect straight to who decides: the launcher's Unix socket on one machine
(`unix:///path`), a port of worker 0 in pods that have neither an operator nor an etcd (`c10d://host:port`).

One decides (`rendezvous.decider`), workers report. Both sides say everything they know every time: a report holds the whole
standing of a member, so a message that is late, doubled or sent to a decider that has just been restarted does no harm. A
closed connection is a death at once; a silent one is a death after `SILENCE_S`.

    member -> decider   {"report": Report}                        on every change, and every HEARTBEAT_S
    decider -> member   {"called": Called} {"world": World} {"closed": Closed}

Used by `rendezvous.handler` (the client, threads: torch's agent is synchronous); `backends.launcher` and `rendezvous.host` (the
server, asyncio).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast import contract
from outlast.rendezvous.world import World
from outlast.runtime import shim

HEARTBEAT_S = 1.0
SILENCE_S = 5.0
"""Arbitrary: long enough for a machine that swaps, short enough that nobody waits."""
_RETRY_S = 0.2
_LINE_BYTES = 1 << 20
"""Longest line that the server reads; reports are far shorter."""
SCHEME = "unix://"
TCP = "c10d://"


@dataclasses.dataclass(frozen=True)
class Report:
    """All that a member says of itself."""

    run: str
    id: int
    standing: str
    """A `world.Standing`."""
    generation: int = 0
    """The world it trains in, or trained in last."""
    since: float = 0.0
    address: str = ""
    """host:port where it would host the world's store."""
    failed: bool = False
    failure: Mapping[str, Any] | None = None
    """What failed in `generation`: `{rank, code, reason, traceback, log_tail, time, echo, step, committed}`. `log_tail`: the last
    lines that it wrote; may be lacking. `echo` marks an error that only echoes another's death. `step` and `committed`: how far
    the training was, and what is saved; None for a plain script."""


@dataclasses.dataclass(frozen=True)
class Called:
    """The decider calls the members together for `generation`."""

    generation: int
    reason: str
    planned: bool
    deadline: float
    """A planned call turns into an unplanned one at this time, seconds since the epoch."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """There will be no further world."""

    reason: str
    code: int
    """What the worker is to exit with."""


class Client:
    """A member's side: keeps the connection, repeats the report, remembers the decider's newest words.

    A lost connection is tried again for ever: a running world does not need the decider, and it may come back.
    """

    def __init__(self, endpoint: str, *, run: str, id: int) -> None:
        self._endpoint = endpoint
        self.id = id
        self._report = Report(run=run, id=id, standing="waiting", since=time.time())
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._over = False
        self.called: Called | None = None
        self.world: World | None = None
        self.closed: Closed | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-rendezvous", daemon=True)

    def report(self, standing: str, **fields: Any) -> None:
        """Say what this member is now; fields as in `Report`, the others stay."""
        with self._changed:
            self._report = dataclasses.replace(self._report, standing=standing, since=time.time(), **fields)
        if not self._thread.ident:
            self._thread.start()
        self._send()

    def wait(self, timeout_s: float) -> None:
        """Return when the launcher has said something, or after the timeout."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Hang up; the launcher takes it as this member's end."""
        self._over = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        with self._changed:
            sock, line = self._sock, json.dumps({"report": dataclasses.asdict(self._report)}).encode() + b"\n"
            if sock is not None:
                with contextlib.suppress(OSError):  # the reader notices, reconnects and reports again
                    sock.sendall(line)

    def _run(self) -> None:
        while not self._over:
            try:
                sock = connect(self._endpoint)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            sock.settimeout(HEARTBEAT_S)
            self._sock = sock
            self._send()
            self._read(sock)
            with self._changed:
                self._sock = None
            sock.close()
            time.sleep(_RETRY_S)

    def _read(self, sock: socket.socket) -> None:
        buffer = b""
        beat = time.monotonic()
        while not self._over:
            if time.monotonic() - beat >= HEARTBEAT_S:
                self._send()
                beat = time.monotonic()
            try:
                data = sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            if "called" in message:
                self.called = Called(**message["called"])
            if "world" in message:
                self.world = world_from(message["world"])
            if "closed" in message:
                self.closed = Closed(**message["closed"])
            self._changed.notify_all()


def world_from(fields: Mapping[str, Any]) -> World:
    """A world from its JSON form."""
    return World(fields["generation"], tuple(fields["members"]), fields["address"], fields["reason"], fields.get("at", 0.0))


def connect(endpoint: str) -> socket.socket:
    """A connection to who decides; raises OSError."""
    if not endpoint.startswith(TCP):
        return shim.connect(endpoint.removeprefix(SCHEME))
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=shim.CONNECT_S)
    # Whoever is on a node that is lost never answers: what is not acknowledged in this time ends the connection (tcp(7)).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENCE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Server:
    """The decider's side: who reports what, who is gone, and a way to speak to each."""

    def __init__(
        self,
        *,
        run: str,
        heard: Callable[[Report], None],
        gone: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is what silence is measured by: one that stands still when nobody listens here, see `clock.Awake`."""
        self._run = run
        self._clock = clock
        self._heard = heard
        self._gone = gone
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._beats: dict[int, float] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self, where: Path | socket.socket) -> None:
        """Listen on a path, replacing what a dead launcher left there, or on a TCP socket that is listening already."""
        if isinstance(where, socket.socket):
            self._server = await asyncio.start_server(self._serve, sock=where, limit=_LINE_BYTES)
            return
        sock = listening(where)
        sock.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_LINE_BYTES)

    async def stop(self) -> None:
        """Close the door and all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    def send(self, id: int, kind: str, content: object) -> None:
        """Say something to a member that is connected; one that is not hears it when it reports again."""
        writer = self._writers.get(id)
        if writer is not None and dataclasses.is_dataclass(content) and not isinstance(content, type):
            writer.write(json.dumps({kind: dataclasses.asdict(content)}).encode() + b"\n")

    def drop_silent(self) -> list[int]:
        """Hang up on members that have been silent for too long (a stopped process keeps its connection); who they were."""
        now = self._clock()
        silent = [id for id, beat in self._beats.items() if now - beat > SILENCE_S and id in self._writers]
        for id in silent:
            del self._beats[id]
            self._writers[id].transport.abort()
        return silent

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        id: int | None = None
        try:
            while line := await reader.readline():
                try:
                    report = Report(**json.loads(line)["report"])
                except (ValueError, KeyError, TypeError) as problem:
                    print(f"rendezvous: a report that makes no sense: {problem!r}", file=sys.stderr, flush=True)
                    return
                if report.run != self._run:  # left over from an earlier run of the same name
                    closed = Closed(f"run {report.run} is over", contract.Exit.FAILED)
                    writer.write(json.dumps({"closed": dataclasses.asdict(closed)}).encode() + b"\n")
                    await writer.drain()
                    return
                if id is None:
                    id = report.id
                    self._writers[id] = writer
                self._beats[id] = self._clock()
                self._heard(report)
        except OSError:  # it died in the middle of a word
            pass
        finally:
            if id is not None and self._writers.get(id) is writer:
                del self._writers[id]
                self._beats.pop(id, None)
                self._gone(id)
            writer.close()


def listening(path: Path) -> socket.socket:
    """A socket listening at `path`, whatever was there before; only this user may connect.

    Addresses of Unix sockets are limited to 107 bytes, hence the way round by the directory.
    """
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
