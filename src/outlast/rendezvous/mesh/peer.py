"""A member's connection to one watched or messaged peer, with its unacknowledged messages. Runs in the mesh's thread only.

Messages are numbered, and sent again on a new connection. The peer drops duplicates, so it handles each message once and in
order.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import selectors
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outlast.job.sealed_lines import Forged
from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.mesh.connection import Connection, resolved

FIRST_S, BROKEN_S, WOKEN_S = 3.0, 1.0, 5.0
"""Seconds after which a silent peer counts as unheard: at first, after its connection broke, and after a pause of this machine,
which breaks connections on our side only."""
_NUMBERS = itertools.count(1)
"""Numbers for messages. All peers share one counter, because a peer that returns remembers the numbers that it has seen."""


class Undelivered(Exception):
    """Raised if a message was not acknowledged, although it may have arrived."""


@dataclass
class _Message:
    line: Mapping[str, Any]
    future: Future[None]
    until: float


class Peer:
    """One of this member's peers. `hello` is the first message that we send to it."""

    def __init__(self, id: int, selector: selectors.BaseSelector, hello: Mapping[str, Any], key: bytes) -> None:
        self.id, self.watched = id, False
        self.address = ""
        self.state = watched_peers.PeerState()
        self.proven = self.met = False
        """Whether the peer has proven its identity on the current connection, and on any connection to this address."""
        self._selector, self._hello, self._key = selector, hello, key
        self._connection: Connection | None = None
        self._connecting = False
        self._attempt_until, self._next_attempt = 0.0, 0.0
        self._messages: dict[int, _Message] = {}
        self.due = 0.0
        """Time of the peer's next turn; any event sets it to now. Other peers are skipped, because a world may have thousands."""

    def meet(self, address: str, now: float) -> None:
        """Set the peer's address. A new address means a new process, so the connection and the state are dropped. Raises
        ValueError."""
        if address == self.address:
            return
        if address:
            resolved(address)
        self._hang_up()
        self.address, self.state, self.met = address, watched_peers.PeerState(), False
        self._next_attempt, self.due = now, now

    def forget(self, now: float) -> None:
        """Before a new world, clear the address of a peer that is not connected: another process may have taken its place."""
        if not self.proven:
            self.meet("", now)

    def send(self, message: Mapping[str, Any], future: Future[None], now: float, within_s: float) -> None:
        """Send a message. `future` completes when the message is acknowledged, or fails after `within_s` seconds."""
        if not self.watched and self._connection is None and not self.state.left:
            self.state, self._next_attempt = watched_peers.PeerState(), 0.0  # the state is outdated
        if problem := self._problem():
            future.set_exception(Undelivered(problem))
            return
        number, self.due = next(_NUMBERS), now
        line = {"number": number, "message": message}
        self._messages[number] = _Message(line, future, now + within_s)
        if self.proven and self._connection:
            try:
                self._connection.send(line)
            except OSError as error:
                self._broken(error, now)

    def turn(self, now: float, patience_s: float) -> float:
        """Do all work that is due, and return the time of the next turn."""
        self._expire(now)
        if not self.address or self.state.left or not (self.watched or self._messages or self._connection):
            return min((each.until for each in self._messages.values()), default=now + 1.0)
        if self._connecting and now >= self._attempt_until:
            self._failed(now)
        if self._connection is None or self._connecting:
            self.state.doubted(now, patience_s)
            self.state.passed(now)
            if self.state.unheard:
                self._give_up(f"worker {self.id} {self.state.unheard}")
        if self._connection is None and now >= self._next_attempt:
            self._call(now)
        self._listen()
        due = self._attempt_until if self._connecting else self._next_attempt if self._connection is None else now + 1.0
        return min(due, self.state.ends, *(each.until for each in self._messages.values()), now + 1.0)

    def ready(self, events: int, now: float) -> None:
        connection, self.due = self._connection, now
        if connection is None:
            return
        try:
            if self._connecting:
                if error := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                self._connecting = False
                self.state.accepted()
            for message in connection.receive() if events & selectors.EVENT_READ else ():
                self._on_message(message)
            if self._connection:
                connection.flush()
        except (OSError, ValueError, RecursionError) as problem:
            self._broken(problem, now)

    def close(self) -> None:
        """Disconnect, and fail undelivered messages."""
        self._give_up("this worker has left the mesh")
        self._hang_up()

    def _call(self, now: float) -> None:
        self._attempt_until = now + self.state.attempt_s
        family, where = resolved(self.address)
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            self._connection, self._connecting = Connection(sock, "member", self._key), True
            self._connection.send({"hello": self._hello})
            error = sock.connect_ex(where)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError as problem:
            self._broken(problem, now)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if "hello" in message:
            hello = message["hello"]
            if not isinstance(hello, Mapping) or (hello.get("id"), hello.get("run")) != (self.id, self._hello["run"]):
                raise Forged(f"it is not worker {self.id} of this run")
            self.state.proven()
            self.proven = self.met = True
            for each in self._messages.values():
                if self._connection:
                    self._connection.send(each.line)
        elif not self.proven:
            raise Forged("it does not begin with hello")
        elif "got" in message:
            if pending := self._messages.pop(message["got"], None):
                pending.future.set_result(None)
        elif "unknown" in message:
            if pending := self._messages.pop(message["unknown"], None):
                pending.future.set_exception(
                    Undelivered(f"worker {self.id} does not support this message; it runs another version")
                )
        elif "goodbye" in message:
            self.state = watched_peers.PeerState(left=True)
            self._give_up(f"worker {self.id} has left")
            self._hang_up()

    def _broken(self, problem: Exception, now: float) -> None:
        """Handle a broken connection. A peer that disconnects or sends invalid data before it has proven its identity counts as
        refusing."""
        silent = isinstance(problem, OSError) and not isinstance(problem, ConnectionError)
        refused = not self.proven and not silent
        if refused:
            self.state.refused()
        self._failed(now, refused=refused)

    def _failed(self, now: float, *, refused: bool = False) -> None:
        earliest = now if self.proven or refused else max(now, self._attempt_until)
        self._hang_up()
        self._next_attempt = earliest + self.state.pause_s * random.SystemRandom().uniform(0.8, 1.2)

    def _problem(self) -> str:
        if self.state.left:
            return f"worker {self.id} has left"
        return f"worker {self.id} {self.state.unheard}" if self.state.unheard else ""

    def _expire(self, now: float) -> None:
        for number, each in [*self._messages.items()]:
            if now >= each.until:
                del self._messages[number]
                where = "" if self.address else "; its address is unknown"
                each.future.set_exception(Undelivered(f"worker {self.id} has not acknowledged a message in time{where}"))

    def _give_up(self, reason: str) -> None:
        waiting, self._messages = self._messages, {}
        for each in waiting.values():
            each.future.set_exception(Undelivered(reason))

    def _listen(self) -> None:
        if self._connection is None:
            return
        events = selectors.EVENT_WRITE if self._connecting else selectors.EVENT_READ
        if self._connection.writing:
            events |= selectors.EVENT_WRITE
        registered = self._selector.get_map().get(self._connection.sock)
        if registered is None:
            self._selector.register(self._connection.sock, events, self)
        elif registered.events != events:
            self._selector.modify(self._connection.sock, events, self)

    def _hang_up(self) -> None:
        if self._connection is not None:
            if self._selector.get_map().get(self._connection.sock):
                self._selector.unregister(self._connection.sock)
            self._connection.close()
        self._connection, self._connecting, self.proven = None, False, False
