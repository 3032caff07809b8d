"""The rendezvous transport over sockets, directly from workers to the coordinator.

The socket is the launcher's Unix socket on one machine (`unix:///path`), or a port on worker 0 in pods that have neither an
operator nor an etcd (`c10d://host:port`). A member is lost once its connection is closed, or, in pods, after `SILENCE_S` of
silence.

    member -> coordinator   {"report": Report, "process": word}       on every change, and every HEARTBEAT_S
    coordinator -> member   {"called": Called} {"world": World} {"closed": Closed}

Strangers can reach a port, so its lines are sealed with the run's key (`job.sealed_lines`). If several processes have the same
index, the last one to connect is the member, unless its world is older. The member's side (`rendezvous.member_client`) uses
threads because torch's agent is synchronous; the server (`local.launcher`, `rendezvous.worker0`) uses asyncio.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base import tcp, unix_sockets
from outlast.base.backoff import ConnectionLog
from outlast.base.typed_json import decode
from outlast.job import contract, sealed_lines
from outlast.rendezvous.messages import Closed, Gone, Published, Report

if TYPE_CHECKING:
    from outlast.rendezvous.transport import Member

CONNECT_S = 5.0
HEARTBEAT_S = 1.0
SILENCE_S = 8.0
"""Seconds after which a silent member is lost. Arbitrary, but longer than a 5 s pause plus a heartbeat."""
_RETRY_S = 0.2
_LINE_BYTES = 64 << 10
"""Maximum number of bytes in a report's line. A failure with its traceback takes some 12 KiB."""
_MESSAGE_BYTES = 4 << 20
"""Maximum number of bytes in a line to a member, and in a member's queue. A world of 10,000 workers takes 60 KiB."""
_PROVE_S = 5.0
_STRANGERS, _BACKLOG = 512, 256
"""Maximum number of connections without a report, and the listen backlog."""
_PRINT_S = 1.0
"""Minimum seconds between printed warnings about invalid messages."""
_MOST_REPLACED = 64
SCHEME = "unix://"
TCP = "c10d://"


@dataclasses.dataclass(frozen=True)
class _Line:
    report: Report
    process: str = ""


class MemberSocket:
    """A member's side (see `member_client.Board`). It tries to connect forever, because a running world does not need the
    coordinator."""

    def __init__(self, endpoint: str, *, run: str, id: int, key: bytes = b"") -> None:
        """`key` is the run's key (see `sealed_lines.key`); empty on a Unix socket."""
        self._endpoint, self._key = endpoint, key
        self.run, self.id = run, id
        self.put_log, self.watch_log = ConnectionLog(), ConnectionLog()
        self._process = secrets.token_hex(8)
        self._sending = threading.Lock()
        self._sock: socket.socket | None = None
        self._seal = sealed_lines.Plain()
        self._over = False
        self._last_problem = ""
        self._published = Published()

    def put(self, report: Report) -> float | None:
        with self._sending:
            if self._sock is None:
                return None
            if select.select([], [self._sock], [], 0)[1]:  # otherwise the coordinator is not reading; the next heartbeat is newer
                try:
                    self._sock.sendall(self._seal.sealed(self._line(report)))
                except OSError:  # perhaps in the middle of a line: `watch` reconnects
                    self.hang_up()
                    raise
            return HEARTBEAT_S

    def watch(self) -> Generator[bool]:
        with connect(self._endpoint) as sock:
            try:
                sock.settimeout(SILENCE_S)
                lines = _Lines(sock)
                seal = self._greet(sock, lines)
                sock.settimeout(HEARTBEAT_S)
                with self._sending:
                    self._sock, self._seal = sock, seal
                yield True
                while not self._over:
                    with contextlib.suppress(TimeoutError):
                        line = lines.next(_MESSAGE_BYTES)
                        self._on_message(json.loads(seal.opened(line)))
                        yield False
            except (ValueError, RecursionError) as problem:
                self._print_problem(f"the coordinator at {self._endpoint} sent an invalid message: {problem}")
                raise ConnectionError from problem
            finally:
                with self._sending:
                    self._sock = None

    def published(self) -> Published:
        return self._published

    def pause_s(self, failures: int, *, changed: bool) -> float:
        return _RETRY_S

    def close(self) -> None:
        self._over = True
        self.hang_up()

    def leave(self, *, reachable: bool) -> None:
        """Do nothing: closing the connection ends the membership."""

    def hang_up(self) -> None:
        """Close the connection, which ends `watch`."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _line(self, report: Report) -> bytes:
        """Return a report as JSON. A long failure loses its traceback and log because the coordinator rejects long lines."""
        line = json.dumps(dataclasses.asdict(_Line(report, self._process))).encode()
        if len(line) > _LINE_BYTES // 2 and report.failure:
            short = {name: value for name, value in report.failure.items() if name not in ("traceback", "log_tail")}
            short["reason"] = str(short.get("reason", ""))[:1000]
            report = dataclasses.replace(report, failure=short)
            line = json.dumps(dataclasses.asdict(_Line(report, self._process))).encode()
        return line

    def _greet(self, sock: socket.socket, lines: _Lines) -> sealed_lines.Plain:
        if not self._key:
            return sealed_lines.Plain()
        own = sealed_lines.nonce()
        peer = sealed_lines.greeted(lines.next(sealed_lines.LONGEST_NONCE))
        sock.sendall(sealed_lines.greeting(own))
        return sealed_lines.Seal(self._key, "member", own=own, peer=peer)

    def _print_problem(self, sentence: str) -> None:
        if sentence != self._last_problem:
            print(f"outlast | {sentence}; trying again", flush=True)
        self._last_problem = sentence

    def _on_message(self, message: object) -> None:
        new, last = decode(Published, message), self._published
        called = new.called or last.called
        if new.called and new.called.leave_s is not None:
            called = dataclasses.replace(new.called, deadline=time.time() + new.called.leave_s)
        self._published = Published(called, new.world or last.world, new.closed or last.closed)


class _Lines:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""

    def next(self, longest: int) -> bytes:
        """Return the next line. Raises OSError at the end of the stream, TimeoutError after the socket's timeout, and ValueError
        if the line is longer than `longest` bytes."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > longest:
                raise ValueError(f"a line has more than {longest} bytes")
            data = self._sock.recv(65536)
            if not data:
                raise ConnectionError("the peer disconnected")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def board(endpoint: str, member: Member) -> MemberSocket:
    return MemberSocket(
        endpoint, run=member.run, id=member.id, key=sealed_lines.key(member.environ) if endpoint.startswith(TCP) else b""
    )


def connect(endpoint: str) -> socket.socket:
    """Connect to the coordinator. Raises OSError."""
    if not endpoint.startswith(TCP):
        return unix_sockets.connect(endpoint.removeprefix(SCHEME))
    sock = socket.create_connection(tcp.host_port(endpoint.removeprefix(TCP)), timeout=CONNECT_S)
    tcp.ends_when_lost(sock, SILENCE_S)
    return sock


class Server:
    """The coordinator's side: it receives reports, detects lost members, and sends messages."""

    def __init__(
        self,
        *,
        run: str,
        take: Callable[[Report | Gone], None],
        key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` is the run's key; empty on a Unix socket. `clock` measures silence, and must stop while this process is paused;
        see `clock.Awake`."""
        self._run, self._key, self._clock = run, key, clock
        self._take = take
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._seals: dict[asyncio.StreamWriter, sealed_lines.Plain] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not reported yet, oldest first."""
        self._process: dict[int, str] = {}
        self._replaced: dict[int, collections.deque[str]] = {}
        self._joined: dict[int, int] = {}
        """The newest generation reported for each index."""
        self._beats: dict[int, float] = {}
        self._printed_at = -math.inf
        self._encoded: tuple[object, bytes] | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self, where: Path | socket.socket) -> None:
        """Listen on a path, replacing a dead launcher's socket, or on a TCP socket that already listens."""
        if isinstance(where, socket.socket):
            self._server = await asyncio.start_server(self._serve, sock=where, limit=_LINE_BYTES, backlog=_BACKLOG)
            return
        sock = unix_sockets.listening(where)
        sock.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in [*self._writers.values(), *self._strangers]:
            writer.close()

    def send(self, to: Iterable[int], kind: str, content: object) -> None:
        """Send a message to those of the given members that are connected; the other members receive it after their next
        report."""
        for writer in filter(None, map(self._writers.get, to)):
            self._write(writer, kind, content)

    def _write(self, writer: asyncio.StreamWriter, kind: str, content: Any) -> None:
        if writer.transport.get_write_buffer_size() > _MESSAGE_BYTES:
            writer.transport.abort()  # the member reports but does not read
            return
        if self._encoded is None or self._encoded[0] is not content:  # encode a world once for all its members
            self._encoded = content, json.dumps({kind: dataclasses.asdict(content)}).encode()
        writer.write(self._seals[writer].sealed(self._encoded[1]))

    def drop_silent(self) -> None:
        """Disconnect members that have been silent for too long; a stopped process would keep its connection open."""
        now = self._clock()
        silent = [id for id, beat in self._beats.items() if now - beat > SILENCE_S and id in self._writers]
        for id in silent:
            del self._beats[id]
            self._writers[id].transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        id: int | None = None
        self._strangers[writer] = None
        if len(self._strangers) > _STRANGERS:
            next(iter(self._strangers)).transport.abort()
        try:
            async with asyncio.timeout(_PROVE_S):
                sealed = self._seals[writer] = await self._greet(reader, writer)
                line = await reader.readline()
            while line.endswith(b"\n"):
                said = decode(_Line, json.loads(sealed.opened(line)))
                report = said.report
                self._strangers.pop(writer, None)
                if report.run != self._run:  # the worker is left over from an earlier run with the same name
                    self._write(writer, "closed", Closed(f"run {report.run} is over", contract.Exit.FAILED))
                    return
                if id is None and not self._admit(report, said.process[:64], writer):
                    reason = f"another process is worker {report.id} of run {self._run} now, in the place of this one"
                    self._write(writer, "closed", Closed(reason, contract.Exit.INTERRUPTED))
                    return
                id = report.id if id is None else id
                if report.id != id:
                    raise ValueError(f"worker {id} speaks for worker {report.id}")
                if self._writers.get(id) is not writer:
                    return
                self._beats[id] = self._clock()
                self._joined[id] = max(report.generation, self._joined.get(id, 0))
                self._take(report)
                line = await reader.readline()
        except (ValueError, RecursionError) as problem:
            self._print_problem(writer, f"an invalid report: {problem}")
        except (OSError, TimeoutError):  # the peer disconnected in the middle of a line, or sent nothing
            pass
        except Exception:  # one member's message must not end the server
            self._print_problem(writer, f"a report of worker {id} that could not be processed:\n{traceback.format_exc()}")
        finally:
            self._strangers.pop(writer, None)
            self._seals.pop(writer, None)
            if id is not None and self._writers.get(id) is writer:
                del self._writers[id]
                self._beats.pop(id, None)
                self._take(Gone(id))
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> sealed_lines.Plain:
        if not self._key:
            return sealed_lines.Plain()
        own = sealed_lines.nonce()
        writer.write(sealed_lines.greeting(own))
        return sealed_lines.Seal(self._key, "decider", own=own, peer=sealed_lines.greeted(await reader.readline()))

    def _admit(self, report: Report, process: str, writer: asyncio.StreamWriter) -> bool:
        """Accept a member's connection; returns False if a later process has replaced the connecting process.

        A new coordinator can tell which process is later only if both have joined worlds. A process that has joined none may be
        new, may have hung before its first world, or may be the restart of a process that was refused here.
        """
        id = report.id
        other, last = self._writers.get(id), self._process.get(id)
        replaced = self._replaced.setdefault(id, collections.deque(maxlen=_MOST_REPLACED))
        outdated = process != last and not report.again and 0 < report.generation < self._joined.get(id, 0)
        if outdated or process in replaced:
            return False
        self._writers[id], self._process[id] = writer, process
        if last is not None and last != process:
            replaced.append(last)
            if other is not None:
                self._take(Gone(id))
        if other is not None:
            other.transport.abort()
        return True

    def _print_problem(self, writer: asyncio.StreamWriter, sentence: str) -> None:
        """Print a problem, but not too often, because a peer may send any number of invalid messages."""
        now = time.monotonic()
        if now - self._printed_at < _PRINT_S:
            return
        self._printed_at = now
        peer = writer.get_extra_info("peername")
        who = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process on this machine"
        print(f"outlast | rendezvous: {who} sent {sentence}", file=sys.stderr, flush=True)
