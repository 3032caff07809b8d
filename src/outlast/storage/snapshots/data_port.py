"""An agent's data port. Other agents send replicas to it, and ranks of other workers read parts from it.

Any machine on the network can reach the port, so a peer must first prove that it has the run's key. If there are too many
connections, the oldest unauthenticated one is closed. Invalid input closes only the connection that it came from.

    {"put": part, "tail": bytes, "complete": at}    -> {"soon": true} while memory is allocated, {"go": true}; then the peer
                                                       sends tail and blocks; -> {"held": true}
    {"open": part}                                  -> {"part": part, "tail": bytes} and the tail
    {"items": [[place, bytes], ...]}                -> the bytes, from the open part
    on any problem                                  -> {"problem": sentence}
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Mapping
from typing import Any

from outlast.base import crc32
from outlast.base.errors import OutlastError
from outlast.job.contract import Env
from outlast.storage.snapshots import agent_messages, part_format
from outlast.storage.snapshots.part_format import Damaged, Part
from outlast.storage.snapshots.rooms import Room, Rooms

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def advertised(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the host to advertise, and whether to listen on all addresses. A single machine uses only 127.0.0.1."""
    if Env.ADDRESS not in environ:
        return "127.0.0.1", False
    named = [name for variable in VARIABLES for name in prefixes(environ.get(variable, ""))]
    return (_address(named) if named else "") or environ[Env.ADDRESS].strip("[]"), True


def prefixes(interfaces: str) -> list[str]:
    """Return the interface names in a value such as `eth0,ib` or `=eth0`; none for `^docker`."""
    return [] if interfaces.startswith("^") else [name for name in interfaces.removeprefix("=").split(",") if name]


def _address(prefixes: list[str]) -> str:
    import psutil

    for prefix in prefixes:
        for name, addresses in sorted(psutil.net_if_addrs().items()):
            for each in sorted(addresses, key=lambda each: each.family):
                if name.startswith(prefix) and each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address:
                    return str(each.address)
    return ""


_STRANGERS = 256
_READERS, _REPLICAS = 512, 128
"""Separate limits for concurrent readers and replica senders, so that neither can starve the other."""
_MOST = 768
"""Maximum number of connections; more wait in the listen queue. A process can usually open 1,024 files."""
_BACKLOG = 1024
_PROVE_S = 5.0


class Port:
    """An agent's data port."""

    def __init__(self, rooms: Rooms, key: bytes, environ: Mapping[str, str]) -> None:
        self._rooms, self._key, self._environ = rooms, key, environ
        self._changed = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}
        self._all = 0
        self._readers, self._replicas = threading.Semaphore(_READERS), threading.Semaphore(_REPLICAS)
        self._listener: socket.socket | None = None
        self.address = ""
        """Address (host:port); empty before `start`, or if there is no key."""

    def start(self) -> None:
        """Start listening, unless there is no key. Raises OSError."""
        if not self._key:
            return
        host, everywhere = advertised(self._environ)
        six = everywhere and socket.has_dualstack_ipv6()
        bind = ("" if everywhere else host, 0)
        family = socket.AF_INET6 if six or ":" in bind[0] else socket.AF_INET
        self._listener = socket.create_server(bind, family=family, dualstack_ipv6=six, backlog=_BACKLOG)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="outlast-snapshots-port", daemon=True).start()

    def close(self) -> None:
        agent_messages.close(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        for sock in agent_messages.accepted(self._listener):
            with self._changed:
                if self._strangers and (len(self._strangers) >= _STRANGERS or self._all >= _MOST):
                    first = next(iter(self._strangers))
                    del self._strangers[first]
                    with contextlib.suppress(OSError):  # the peer has closed it
                        first.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: self._all < _MOST)
                self._strangers[sock] = None
                self._all += 1
            threading.Thread(target=self._serve, args=(sock,), name="outlast-snapshots-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        opened: list[Room] = []
        try:
            connection = agent_messages.Connection(agent_messages.set_timeout(agent_messages.between_machines(sock), _PROVE_S))
            connection.greet(self._key, "decider")
            request = connection.receive()
            with self._changed:
                self._strangers.pop(sock, None)
            agent_messages.set_timeout(sock)
            with self._replicas if "put" in request else self._readers:
                while True:
                    self._answer(connection, request, opened)
                    request = connection.receive()
        except (OSError, ValueError, RecursionError):
            pass  # the peer is gone, or does not belong to the run
        finally:
            for room in opened:
                self._rooms.release(room)
            with self._changed:  # before the close, after which the descriptor's number may belong to another socket
                self._strangers.pop(sock, None)
                self._all -= 1
                self._changed.notify_all()
            sock.close()

    def _answer(self, connection: agent_messages.Connection, request: dict[str, Any], opened: list[Room]) -> None:
        try:
            match request:
                case {"put": part, "tail": int(tail), "complete": [int(generation), int(step)]}:
                    self._receive(connection, Part.of(part), tail, (generation, step))
                case {"open": part}:
                    room = self._rooms.open(Part.of(part))
                    opened.append(room)
                    assert room.part is not None
                    connection.send({"part": room.part.json(), "tail": room.tail})
                    connection.write_from(room.file.fd, part_format.PAGE + room.part.bytes, room.tail)
                case {"items": list(blocks)} if opened:
                    for block in blocks:
                        self._send(connection, opened[-1], block)
                case _:
                    raise ValueError(f"{request!r:.80} is no request")
        except OutlastError as problem:
            connection.send({"problem": str(problem)})

    def _send(self, connection: agent_messages.Connection, room: Room, block: object) -> None:
        assert room.part is not None
        match block:
            case [int(place), int(nbytes)] if 0 <= place <= place + nbytes <= room.part.bytes:
                connection.write_from(room.file.fd, part_format.PAGE + place, nbytes)
            case _:
                raise ValueError(f"{room.part} has no block {block!r:.80}")

    def _receive(self, connection: agent_messages.Connection, part: Part, length: int, complete: tuple[int, int]) -> None:
        """Receive a replica. Its header is written only after all checksums have been verified."""
        self._rooms.admit(part.run, part.at, complete, part.session, own=False)
        if length > part_format.LONGEST_TAIL:
            raise Damaged(f"the index of {part} has {length} bytes")
        room = self._rooms.take(part.bytes, part.at, replica=True, alive=lambda: connection.send({"soon": True}))
        held = False
        try:
            connection.send({"go": True})
            tail = bytearray(length)
            connection.read_into(memoryview(tail))
            index, crcs = part_format.read_tail(part, bytes(tail))
            wrong = ""
            for item, expected in zip(index, crcs, strict=True):
                for (place, nbytes), crc in zip(item.blocks(), expected, strict=True):
                    block = room.file.data[place : place + nbytes]
                    connection.read_into(block)
                    if crc32.update(block) != crc:
                        wrong = f"{item.key:.80} of {part} has arrived with a wrong checksum"
            if wrong:
                raise Damaged(wrong)
            self._rooms.hold(room, dataclasses.replace(part, replica=True), index, bytes(tail))
            held = True
            connection.send({"held": True})
        finally:
            if not held:
                self._rooms.release(room)
