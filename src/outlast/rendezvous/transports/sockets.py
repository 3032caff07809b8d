"""The rendezvous transport by sockets, from workers directly to the coordinator.

The socket is the launcher's Unix socket on one machine (`unix:///path`), or a port of worker 0 in pods without an operator or an
etcd (`c10d://host:port`).

Workers report, one process coordinates (`rendezvous.coordinator`). Each report contains the whole state of a member, so a late or
duplicated report, or a restart of the coordinator, does no harm. A member is lost once its connection is closed, or after
`SILENCE_S` of silence.

    member -> coordinator   {"report": Report, "process": word}       on every change, and every HEARTBEAT_S
    coordinator -> member   {"called": Called} {"world": World} {"closed": Closed}

Strangers can reach a port, so lines to a port are sealed with the run's key (`job.sealed_lines`). An invalid message only
closes its sender's connection. If several processes have the same index, the last process to connect is the member.

Used by `rendezvous.handler` (the client, threads: torch's agent is synchronous); `local.launcher` and `rendezvous.worker0` (the
server, asyncio).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import re
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from outlast.base import tcp, unix_sockets
from outlast.job import contract, sealed_lines
from outlast.rendezvous import world
from outlast.rendezvous.world import MemberState, World

if TYPE_CHECKING:
    from outlast.rendezvous.transport import Member

CONNECT_S = 5.0
HEARTBEAT_S = 1.0
SILENCE_S = 8.0
"""Time in seconds after which a silent member is lost. Arbitrary: longer than a pause of 5 s with the next heartbeat. The mesh
detects silent machines earlier."""
_RETRY_S = 0.2
_LINE_BYTES = 64 << 10
"""Maximum number of bytes in a line of a report, which has some 12 KiB with a traceback and the tail of a log."""
_MESSAGE_BYTES = 4 << 20
"""Maximum number of bytes in a line to a member, and in the queue of a member that does not read. A world of 10,000 workers has
60 KiB."""
_PROVE_S = 5.0
"""Timeout for the first report on a connection, in seconds."""
_STRANGERS, _BACKLOG = 512, 256
"""Maximum number of connections without a report (beyond it the oldest is closed), and the listen backlog."""
_PRINT_S = 1.0
"""Minimum interval in seconds between printed problems with messages."""
_MOST_REPLACED = 64
"""Maximum number of remembered replaced processes of one index."""
_MOST_UNHEARD = 256
"""Maximum number of peers in one report; a member watches few."""
_MOST_PAST = 64
"""Maximum number of repaired failures in one report."""
Kind = TypeVar("Kind", bound="Called | Closed | World")
_ADDRESS = re.compile(r"([!-~]{1,255}:[0-9]{1,5})?")
SCHEME = "unix://"
TCP = "c10d://"


@dataclasses.dataclass(frozen=True)
class Report:
    """A member's report to the coordinator."""

    run: str
    id: int
    standing: str
    """A `world.MemberState`."""
    generation: int = 0
    """Generation of the member's current or last world."""
    since: float = 0.0
    address: str = ""
    """`host:port` where the member would host the world's store."""
    failed: bool = False
    failure: Mapping[str, Any] | None = None
    """The failure in `generation`: `{rank, code, reason, cause, traceback, log_tail, time, echo, step, committed}`.

    `cause` is a `contract.FailureCause`, `log_tail` has the last lines of the rank's log; both are optional. `echo` marks an
    error that only echoes the death of another rank. `left` is true if processes had already exited with 0. `step` and
    `committed` are the last step and the newest saved step; None for a plain script.
    """
    mesh: bool = False
    """True if this member watches its peers in this world and has heard all of them."""
    unheard: tuple[int, ...] = ()
    """Watched members of the same world that were heard before and are now silent or refuse connections."""
    refused: tuple[int, ...] = ()
    """The subset of `unheard` whose machines refuse connections, so their processes have ended."""
    attempt: int = 0
    """Number of restarts of the processes of `generation` without the coordinator."""
    past: tuple[Mapping[str, Any], ...] = ()
    """The last failures repaired by such restarts, in any generation: `attempts.Past`. Only a few members report them."""
    held: int = 0
    """The newest complete step that the member's processes had saved or in memory when they were stopped. It is sent between two
    worlds."""
    owes: bool = True
    """True if other workers may not yet be able to load the step that this member holds or is saving; False if they can, or never
    will."""
    again: bool = False
    """True if this process has replaced the process that joined `generation`, which its peers no longer hear."""
    batch: tuple[int, ...] = ()
    """The batch as last reported by the member's processes, with their start: `(generation, attempt, batch)`, empty without one.

    `batch` is the samples of one step over all ranks, divided by the number of processes of this member. The size of a world must
    divide it. 0 if the processes of one member cannot share the samples equally, so that no size would help.
    """

    def member(self, id: int, *, since: float, received: float, why: str = "") -> world.Member:
        """Return the worker `id` as this report describes it. Times are the coordinator's: since when the worker has had its
        standing, and when the report was received. `why` describes a failure of its own."""
        return world.Member(
            id,
            self.address,
            MemberState(self.standing),
            self.generation,
            since,
            self.failed,
            why,
            self.unheard,
            self.refused,
            received,
            self.held,
            self.again,
            self.owes,
            self.batch,
        )

    def changed(self, standing: str, **fields: Any) -> Self:
        """Return the next report. A change of the generation resets the fields about peers."""
        another = fields.get("generation", self.generation) != self.generation
        reset: dict[str, Any] = {"unheard": (), "refused": (), "attempt": 0, "again": False} if another else {}
        if standing not in (MemberState.TRAINING, MemberState.LEAVING):
            reset["mesh"] = False
        return dataclasses.replace(self, **{"standing": standing, "since": time.time(), **reset, **fields})

    @classmethod
    def of(cls, value: object) -> Self:
        """Parse untrusted JSON. Raises ValueError for an invalid report; ignores fields of newer versions.

        The contents of `failure` and `past` are checked by their readers, `root_cause.reported` and `attempts.uncounted`.
        """
        if not isinstance(value, Mapping):
            raise ValueError("it is not a report")
        fields = {each.name: value[each.name] for each in dataclasses.fields(cls) if each.name in value}
        for name, value in fields.items():
            if not _FITS[name](value):
                raise ValueError(f"{name} of a report cannot be {value!r:.80}")
        if missing := {"run", "id", "standing"} - fields.keys():
            raise ValueError(f"a report must have {', '.join(sorted(missing))}")
        if (failure := fields.get("failure")) and not is_count(failure.get("committed", 0)):
            fields["failure"] = {**failure, "committed": None}
        peers: dict[str, Any] = {name: tuple(fields[name]) for name in ("unheard", "refused", "past", "batch") if name in fields}
        return cls(**{**fields, **peers, "standing": MemberState(fields["standing"])})


def is_count(value: object) -> bool:
    """Return whether a JSON value is an integer in [0, 2**53); booleans and floats are rejected."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number below 1e300; booleans are rejected."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_id(value: object) -> bool:
    return is_count(value) and isinstance(value, int) and value < contract.MOST_WORKERS


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MOST_UNHEARD and all(map(_is_id, value))


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "run": lambda value: isinstance(value, str),
    "id": _is_id,
    "standing": lambda value: isinstance(value, str) and value in list(MemberState),
    "generation": is_count,
    "since": is_number,
    "address": lambda value: isinstance(value, str) and _ADDRESS.fullmatch(value) is not None,
    "failed": lambda value: isinstance(value, bool),
    "failure": lambda value: value is None or isinstance(value, Mapping),
    "mesh": lambda value: isinstance(value, bool),
    "unheard": _are_ids,
    "refused": _are_ids,
    "attempt": is_count,
    "held": is_count,
    "again": lambda value: isinstance(value, bool),
    "owes": lambda value: isinstance(value, bool),
    "batch": lambda value: isinstance(value, list | tuple) and len(value) in (0, 3) and all(map(is_count, value)),
    "past": lambda value: (
        isinstance(value, list | tuple) and len(value) <= _MOST_PAST and all(isinstance(one, Mapping) for one in value)
    ),
}


@dataclasses.dataclass(frozen=True)
class Called:
    """Message: the members must meet for `generation`."""

    generation: int
    reason: str
    planned: bool
    deadline: float
    """Time at which a planned call turns into an unplanned one, in seconds since the epoch."""
    leave_s: float | None = None
    """Seconds from the message to `deadline`, which the recipient counts on its own clock."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """Message: the run is over, and no further world follows."""

    reason: str
    code: int
    """Exit code of the worker."""
    end: str = ""
    """A `contract.End`."""


class Client:
    """A member's side: it maintains the connection, repeats the report, and stores the coordinator's last messages.

    The client reconnects for ever, since a running world does not need the coordinator, which may return.
    """

    def __init__(self, endpoint: str, *, run: str, id: int, key: bytes = b"") -> None:
        """`key` is the key of the run, see `sealed_lines.key`; empty on a Unix socket."""
        self._endpoint, self._key = endpoint, key
        self.id = id
        self._process = secrets.token_hex(8)
        self._report = Report(run=run, id=id, standing="waiting", since=time.time())
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._seal = sealed_lines.Plain()
        self._over = False
        self._last_problem = ""
        self.called: Called | None = None
        self.world: World | None = None
        self.closed: Closed | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-rendezvous", daemon=True)

    def report(self, standing: str, **fields: Any) -> None:
        """See `transport.Client.report`."""
        with self._changed:
            self._report = self._report.changed(standing, **fields)
        if not self._thread.ident:
            self._thread.start()
        self._send()

    def amend(self, **fields: Any) -> None:
        """See `transport.Client.amend`."""
        with self._changed:
            self._report = dataclasses.replace(self._report, **fields)
        self._send()

    def wait(self, timeout_s: float) -> None:
        """See `transport.Client.wait`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Disconnect, which ends this member's membership."""
        self._over = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        with self._changed:
            if self._sock is None or not select.select([], [self._sock], [], 0)[1]:
                return  # the coordinator does not read; the next heartbeat sends the newest report
            try:
                self._sock.sendall(self._seal.sealed(self._line()))
            except OSError:  # perhaps within a line: the reader reconnects and reports again
                self._hang_up()

    def _line(self) -> bytes:
        """Return our report as JSON. A long failure loses its traceback and log, since the coordinator rejects long lines."""
        message = {"report": dataclasses.asdict(self._report), "process": self._process}
        line = json.dumps(message).encode()
        if len(line) > _LINE_BYTES // 2 and self._report.failure:
            short = {name: value for name, value in self._report.failure.items() if name not in ("traceback", "log_tail")}
            short["reason"] = str(short.get("reason", ""))[:1000]
            message["report"] = dataclasses.asdict(dataclasses.replace(self._report, failure=short))
            line = json.dumps(message).encode()
        return line

    def _run(self) -> None:
        while not self._over:
            try:
                sock = connect(self._endpoint)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            with sock:
                try:
                    sock.settimeout(SILENCE_S)
                    lines = _Lines(sock)
                    sealed = self._greet(sock, lines)
                    sock.settimeout(HEARTBEAT_S)
                    with self._changed:
                        self._sock, self._seal = sock, sealed
                    self._send()
                    self._read(lines, sealed)
                except OSError:
                    pass
                except (ValueError, KeyError, TypeError, RecursionError) as problem:
                    self._print_problem(f"the coordinator at {self._endpoint} sent an invalid message: {problem}")
                with self._changed:
                    self._sock = None
            time.sleep(_RETRY_S)

    def _greet(self, sock: socket.socket, lines: _Lines) -> sealed_lines.Plain:
        if not self._key:
            return sealed_lines.Plain()
        own = sealed_lines.nonce()
        peer = sealed_lines.greeted(lines.next(sealed_lines.LONGEST_NONCE))
        sock.sendall(sealed_lines.greeting(own))
        return sealed_lines.Seal(self._key, "member", own=own, peer=peer)

    def _read(self, lines: _Lines, sealed: sealed_lines.Plain) -> None:
        beat = time.monotonic()
        while not self._over:
            if time.monotonic() - beat >= HEARTBEAT_S:
                self._send()
                beat = time.monotonic()
            try:
                line = lines.next(_MESSAGE_BYTES)
            except TimeoutError:
                continue
            self._on_message(json.loads(sealed.opened(line)))

    def _print_problem(self, sentence: str) -> None:
        if sentence != self._last_problem:
            print(f"outlast | {sentence}; trying again", flush=True)
        self._last_problem = sentence

    def _on_message(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            if called := published(Called, message):
                if called.leave_s is not None:
                    called = dataclasses.replace(called, deadline=time.time() + called.leave_s)
                self.called = called
            if "world" in message:
                self.world = world_from(message["world"])
            self.closed = published(Closed, message) or self.closed
            self._changed.notify_all()


class _Lines:
    """Reads a socket line by line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""

    def next(self, longest: int) -> bytes:
        """Return the next line. Raises OSError at the end of the stream, TimeoutError if no line completes within the socket's
        timeout, and ValueError if the line is longer than `longest` bytes."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > longest:
                raise ValueError(f"a line has more than {longest} bytes")
            data = self._sock.recv(65536)
            if not data:
                raise ConnectionError("the peer disconnected")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def published(kind: type[Kind], message: Mapping[str, Any]) -> Kind | None:
    """Parse the Called, Closed or World in a message; returns None if the message has none. Ignores fields of newer versions."""
    if not (value := message.get(kind.__name__.lower())):
        return None
    names = [each.name for each in dataclasses.fields(kind) if each.name in value]
    fields: dict[str, Any] = {name: tuple(value[name]) if isinstance(value[name], list) else value[name] for name in names}
    return kind(**fields)


def world_from(value: object) -> World:
    """Parse a world from untrusted JSON. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("it is not a world")
    members, generation, at, held = value.get("members"), value.get("generation"), value.get("at", 0.0), value.get("held", 0)
    fits = (
        is_count(generation),
        isinstance(members, list | tuple) and 0 < len(set(members)) == len(members) and all(map(_FITS["id"], members)),
        bool(value.get("address")) and _FITS["address"](value["address"]),
        isinstance(value.get("reason"), str),
        is_number(at),
        is_count(held),
    )
    if not all(fits):
        raise ValueError(f"{value!r:.200} is not a world")
    return World(value["generation"], tuple(value["members"]), value["address"], value["reason"], at, held)


def client(endpoint: str, member: Member) -> Client:
    """Create a client for an endpoint, see `transport.Transport`."""
    return Client(
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
    """The coordinator's side: it receives reports, detects lost members, and sends messages to members."""

    def __init__(
        self,
        *,
        run: str,
        on_report: Callable[[Report], None],
        on_gone: Callable[[int], None],
        key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` is the key of the run, which every member must have; empty on a Unix socket. `clock` measures silence, and must
        pause while this process is paused, see `clock.Awake`."""
        self._run, self._key, self._clock = run, key, clock
        self._on_report = on_report
        self._on_gone = on_gone
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._seals: dict[asyncio.StreamWriter, sealed_lines.Plain] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections without a report, oldest first."""
        self._process: dict[int, str] = {}
        """The current process of each index."""
        self._replaced: dict[int, collections.deque[str]] = {}
        """Earlier processes of each index."""
        self._beats: dict[int, float] = {}
        self._printed_at = -math.inf
        self._encoded: tuple[object, bytes] | None = None
        """The last message, with its JSON form."""
        self._server: asyncio.AbstractServer | None = None

    async def start(self, where: Path | socket.socket) -> None:
        """Listen on a path, where the socket of a dead launcher is replaced, or on a listening TCP socket."""
        if isinstance(where, socket.socket):
            self._server = await asyncio.start_server(self._serve, sock=where, limit=_LINE_BYTES, backlog=_BACKLOG)
            return
        sock = unix_sockets.listening(where)
        sock.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_LINE_BYTES)

    async def stop(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        for writer in [*self._writers.values(), *self._strangers]:
            writer.close()

    def send(self, id: int, kind: str, content: object) -> None:
        """Send a message to a connected member; any other member receives it after its next report."""
        writer = self._writers.get(id)
        if writer is not None:
            self._write(writer, kind, content)

    def _write(self, writer: asyncio.StreamWriter, kind: str, content: Any) -> None:
        if writer.transport.get_write_buffer_size() > _MESSAGE_BYTES:
            writer.transport.abort()  # the member reports but does not read
            return
        if self._encoded is None or self._encoded[0] is not content:  # encode a world once for all its members
            self._encoded = content, json.dumps({kind: dataclasses.asdict(content)}).encode()
        writer.write(self._seals[writer].sealed(self._encoded[1]))

    def drop_silent(self) -> dict[int, int]:
        """Disconnect members that have been silent for too long, since a stopped process keeps its connection. Returns the pid of
        each member by id; 0 on another machine."""
        now = self._clock()
        silent = [id for id, beat in self._beats.items() if now - beat > SILENCE_S and id in self._writers]
        processes = {id: unix_sockets.process_of(self._writers[id].get_extra_info("socket")) for id in silent}
        for id in silent:
            del self._beats[id]
            self._writers[id].transport.abort()
        return processes

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
                message = json.loads(sealed.opened(line))
                report = Report.of(message["report"])
                self._strangers.pop(writer, None)
                if report.run != self._run:  # left over from an earlier run of the same name
                    self._write(writer, "closed", Closed(f"run {report.run} is over", contract.Exit.FAILED))
                    return
                if id is None and not self._admit(report.id, str(message.get("process", ""))[:64], writer):
                    reason = f"another process is worker {report.id} of run {self._run} now, in the place of this one"
                    self._write(writer, "closed", Closed(reason, contract.Exit.INTERRUPTED))
                    return
                id = report.id if id is None else id
                if report.id != id:
                    raise ValueError(f"worker {id} speaks for worker {report.id}")
                if self._writers.get(id) is not writer:
                    return
                self._beats[id] = self._clock()
                self._on_report(report)
                line = await reader.readline()
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            self._print_problem(writer, f"an invalid report: {problem}")
        except (OSError, TimeoutError):  # it disconnected within a line, or sent nothing
            pass
        except Exception:  # one member's message must not end the server
            self._print_problem(writer, f"a report of worker {id} that could not be processed:\n{traceback.format_exc()}")
        finally:
            self._strangers.pop(writer, None)
            self._seals.pop(writer, None)
            if id is not None and self._writers.get(id) is writer:
                del self._writers[id]
                self._beats.pop(id, None)
                self._on_gone(id)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> sealed_lines.Plain:
        if not self._key:
            return sealed_lines.Plain()
        own = sealed_lines.nonce()
        writer.write(sealed_lines.greeting(own))
        return sealed_lines.Seal(self._key, "decider", own=own, peer=sealed_lines.greeted(await reader.readline()))

    def _admit(self, id: int, process: str, writer: asyncio.StreamWriter) -> bool:
        """Accept a connection as a member's; returns False if a later process has replaced its process."""
        replaced = self._replaced.setdefault(id, collections.deque(maxlen=_MOST_REPLACED))
        if process in replaced:
            return False
        other, last = self._writers.get(id), self._process.get(id)
        self._writers[id], self._process[id] = writer, process
        if last is not None and last != process:
            replaced.append(last)
            if other is not None:
                self._on_gone(id)
        if other is not None:
            other.transport.abort()
        return True

    def _print_problem(self, writer: asyncio.StreamWriter, sentence: str) -> None:
        """Print a problem, at most once every `_PRINT_S`, since a peer may send any number of invalid messages."""
        now = time.monotonic()
        if now - self._printed_at < _PRINT_S:
            return
        self._printed_at = now
        peer = writer.get_extra_info("peername")
        who = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process on this machine"
        print(f"outlast | rendezvous: {who} sent {sentence}", file=sys.stderr, flush=True)
