"""The agent's side of snapshots: lends memory to its worker's ranks, and runs the `data_port` for other agents.

Ranks connect to `snapshots.sock` in the worker's state directory, which only the worker's user can open. A rank requests a buffer
(a "room"), writes a part into it, and publishes the part. The agent then computes checksums, writes the header, and sends
replicas. So a rank that dies before it publishes leaves no part, and a rank that dies later leaves a complete one.

    agent -> rank   {"hello": {address, node, zone, budget, key, store}}
    rank -> agent   {"room": bytes, "at", "complete", "session"}    -> {"room": id, "size"} with a descriptor; the room may
                                                                       be used again until it is given back
                    {"publish": id, "part", "index", "to", "complete"}   no response, but {"event": [kind, step, state],
                                                                         "digest"}; a null index stands for the
                                                                         last one of this kind and local rank
                    {"give": [id, ...], "complete": at}                  no response
                    {"catalog": true}                               -> {"parts": [...]}
                    {"open": part}                                  -> {"open": id} with a descriptor;   {"close": id}
                    {"forget": [generation, step] or null}          -> {}
                    {"look": true}                                  no response: the store is asked for its newest checkpoint
                    {"newest": true}                                -> {"newest": at or null}, or {"problem", "retry"}
                    {"restore": true}                               -> a reply once the checkpoint is on the disk
    on any problem                                                  -> {"problem": sentence}
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.base import unix_sockets
from outlast.base.errors import OutlastError
from outlast.job import contract, sealed_lines
from outlast.job.contract import Env
from outlast.storage.snapshots import agent_messages, data_port, part_format, replicas, rooms
from outlast.storage.snapshots.part_format import Item, Part
from outlast.storage.snapshots.rooms import Refused, Room, Rooms

Query = Callable[[], object]
_NEWEST_S = 3.0
"""Timeout for a rank's `newest` request, in seconds. The store was usually asked earlier, at the rank's `look` request."""
_FINISHERS = 8
"""Maximum number of checksum threads; one runs for every four cores."""
_SMALL = part_format.BLOCK
"""A part of up to this many bytes is finished by the thread that receives it, because waking another thread would take as long.
"""


@dataclass(frozen=True)
class Publication:
    room: Room
    part: Part
    index: list[Item]
    rows: bytes
    to: tuple[str, ...]
    complete: rooms.At
    rank: _Rank


class Server:
    """Serves one worker's ranks. Its threads wait or release the GIL, so that the agent stays responsive.

    The function `restore` downloads the store's newest checkpoint, and `newest` returns that checkpoint's (generation, step), or
    None.
    """

    def __init__(self, environ: Mapping[str, str], budget: int, restore: Query, newest: Query = lambda: None) -> None:
        machine = rooms.Machine()
        self.rooms = Rooms(environ[Env.RUN], budget, lambda: machine.headroom)
        self._environ, self.fetch, self.newest = environ, restore, newest
        self._key = sealed_lines.key(environ)
        self._path = Path(environ[Env.STATE]) / contract.SNAPSHOTS
        self._published: queue.SimpleQueue[Publication] = queue.SimpleQueue()
        self.sender = replicas.Sender(self.rooms, self._key)
        self._port = data_port.Port(self.rooms, self._key, environ)
        self._restoring = threading.Lock()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Start listening. Raises OSError."""
        self._port.start()
        self._listener = unix_sockets.listening(self._path)
        _thread(self._accept, "accept")
        for _ in range(max(1, min(_FINISHERS, len(os.sched_getaffinity(0)) // 4))):
            _thread(self._finishing, "finish")

    def close(self) -> None:
        """Close the listeners and free the memory."""
        if self._listener is not None:
            agent_messages.close(self._listener)
            self._path.unlink(missing_ok=True)
        self._port.close()
        self.sender.close()
        self.rooms.close()

    @property
    def address(self) -> str:
        return self._port.address

    def _accept(self) -> None:
        assert self._listener is not None
        for sock in agent_messages.accepted(self._listener):
            _thread(_Rank(self, sock).serve, "rank")

    def hello(self) -> dict[str, object]:
        """Return the first message to a rank."""
        node = self._environ.get(Env.NODE) or _boot_id()
        where = {"node": node, "zone": self._environ.get(Env.ZONE, "")}
        return {"address": self.address, "budget": self.rooms.budget, "key": self._key.hex(), "store": True, **where}

    def publish(self, publication: Publication) -> None:
        """Compute a part's checksums, write its header, and send its replicas.

        Other threads do this for large parts.
        """
        if publication.part.bytes <= _SMALL:
            self._finish(publication)
        else:
            self._published.put(publication)

    def restore(self) -> dict[str, object]:
        """Download the store's newest checkpoint, and return the reply for the rank."""
        with self._restoring:
            return _answered(self.fetch)

    def query_newest(self) -> queue.SimpleQueue[dict[str, object]]:
        """Ask the store, in a thread, for its newest checkpoint. Returns a queue that will receive the reply for the rank."""
        answer: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        _thread(lambda: answer.put(_answered(self.newest)), "look")
        return answer

    def _finishing(self) -> None:
        while True:
            self._finish(self._published.get())

    def _finish(self, each: Publication) -> None:
        try:
            tail = part_format.tail(each.index, part_format.checksums(each.index, each.room.file.data), each.rows)
            part = part_format.finished(each.part, each.index, tail)
            self.rooms.hold(each.room, part, each.index, tail)
        except Exception as error:  # even for a bug, because the rank waits for a report
            self.rooms.release(each.room)
            each.rank.report(each.part, f"{each.part} cannot be kept: {error!r}")
            return
        if not each.to or part.bytes > _SMALL:
            each.rank.report(part, "held")
        if each.to:
            each.rank.sending(functools.partial(self._replicate, part, each))

    def _replicate(self, part: Part, each: Publication) -> None:
        try:
            problems = self.sender.send(part, each.to, each.complete)
        except Exception as error:  # the rank waits for a report
            problems = [f"no replica of {part}: {error!r}"]
        each.rank.report(part, "; ".join(["held", *problems]) if problems else "replicated")


class _Rank:
    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server, self._rooms = server, server.rooms
        self._connection = agent_messages.Connection(sock, longest=agent_messages.INDEX)
        self._lent: dict[int, Room] = {}
        self._open: list[Room] = []
        self._query: queue.SimpleQueue[dict[str, object]] | None = None
        self._indices: dict[tuple[str, int], tuple[list[Item], bytes]] = {}
        self._replicas: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def serve(self) -> None:
        connection = self._connection
        _thread(self._send, "replicate")
        try:
            connection.send({"hello": self._server.hello()})
            while True:
                request = connection.receive()
                try:
                    self._answer(request)
                except OutlastError as problem:
                    connection.send({"problem": str(problem)})
        except (OSError, ValueError):
            pass  # the rank has ended, or has sent an invalid request
        finally:
            for room in [*self._lent.values(), *self._open]:
                self._rooms.release(room)
            self._replicas.put(None)
            connection.close()

    def _answer(self, request: dict[str, Any]) -> None:
        match request:
            case {"room": int(size), "at": at, "complete": complete}:
                self._rooms.admit(self._rooms.run, _at(at), _at(complete), str(request.get("session", "")))
                room = self._rooms.take(size, _at(at))
                self._lent[room.id] = room
                self._connection.send({"room": room.id, "size": room.size}, room.file.fd)
            case {"publish": int(id), "part": part, "index": index, "to": to, "complete": complete}:
                self._publish(id, Part.of(part), index, [str(each) for each in to], _at(complete))
            case {"give": list(ids), "complete": complete}:
                self._rooms.give_back([self._lent.pop(id) for id in ids if id in self._lent], _at(complete))
            case {"catalog": True}:
                self._connection.send({"parts": [part.json() for part in self._rooms.parts()]})
            case {"open": part}:
                room = self._rooms.open(Part.of(part))
                self._open.append(room)
                fd = os.open(f"/proc/self/fd/{room.file.fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._connection.send({"open": room.id}, fd)
                os.close(fd)
            case {"close": int(id)}:
                for room in [room for room in self._open if room.id == id][:1]:
                    self._open.remove(room)
                    self._rooms.release(room)
            case {"forget": keep}:
                self._rooms.forget(None if keep is None else _at(keep))
                self._connection.send({})
            case {"look": True}:
                self._query = self._server.query_newest()
            case {"newest": True}:
                query, self._query = self._query or self._server.query_newest(), None
                try:
                    self._connection.send(query.get(timeout=_NEWEST_S))
                except queue.Empty:
                    self._connection.send({"problem": f"the store has not answered within {_NEWEST_S:.0f} s", "retry": True})
            case {"restore": True}:
                self._connection.send(self._server.restore())
            case _:
                raise ValueError(f"{request!r:.80} is no request")

    def _publish(self, id: int, part: Part, index: object, to: list[str], complete: rooms.At) -> None:
        try:
            if isinstance(index, list):  # kept even if this part is refused, because the rank does not send the index again
                self._indices[part.kind, part.local_rank] = [], b""
                self._indices[part.kind, part.local_rank] = [Item.of(each) for each in index], part_format.encoded(index)
            self._rooms.admit(part.run, part.at, complete, part.session)
            room = self._lent.get(id)
            if room is None or part.bytes > room.size:
                raise Refused(f"{part} has no room: {id} is none that this rank was given for it")
            items, rows = self._indices.get((part.kind, part.local_rank), ([], b""))
            if not rows:
                raise Refused(f"{part} has no index")
            part_format.checked(items, part)
        except OutlastError as problem:
            self.report(part, str(problem))
            return
        self._rooms.use(room, part.at)
        self._server.publish(Publication(room, part, items, rows, tuple(to), complete, self))

    def report(self, part: Part, state: str) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            self._connection.send({"event": [part.kind, part.step, state], "digest": part.digest})

    def sending(self, send: Callable[[], None]) -> None:
        self._replicas.put(send)

    def _send(self) -> None:
        while (send := self._replicas.get()) is not None:
            send()


def _answered(query: Query) -> dict[str, object]:
    try:
        return {"newest": query()}
    except OSError as error:
        return {"problem": f"the newest checkpoint cannot be fetched: {error}", "retry": True}
    except OutlastError as problem:
        return {"problem": str(problem), "retry": getattr(problem, "retry", False)}


def _at(value: object) -> rooms.At:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) for each in value)):
        raise ValueError(f"{value!r:.80} is no generation and step")
    return value[0], value[1]


def _boot_id() -> str:
    """Return an id that all containers of this machine share until it reboots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _thread(target: Callable[[], None], name: str) -> None:
    threading.Thread(target=target, name=f"outlast-snapshots-{name}", daemon=True).start()
