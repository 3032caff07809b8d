"""One peer as a member sees it: the connection by which it watches it and sends to it, and the messages that wait for an answer.

Runs in the mesh's thread only. Messages are numbered and repeated when a connection is made anew; the peer drops those that it
has had, so each arrives once and in order.
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

from outlast.job.seal import Forged
from outlast.rendezvous.mesh import hearing
from outlast.rendezvous.mesh.connection import Connection, resolved

FIRST_S, BROKEN_S, WOKEN_S = 3.0, 1.0, 5.0
"""How long a peer may take to answer before it is unheard: at first, when its connection broke (2 s after its last sign of life),
and when this process or machine has just stood still, so that connections broke that others did not break."""
_NUMBERS = itertools.count(1)
"""Of all messages of this process: they grow also when it meets a peer again that it has forgotten and that has had others."""


class Undelivered(Exception):
    """A message has not been acknowledged; it may have arrived."""


@dataclass
class _Message:
    line: Mapping[str, Any]
    future: Future[None]
    until: float


class Peer:
    """`hello` is what we say of ourselves."""

    def __init__(self, id: int, selector: selectors.BaseSelector, hello: Mapping[str, Any], key: bytes) -> None:
        self.id, self.watched = id, False
        self.address = ""
        self.hearing = hearing.Hearing()
        self.proven = self.met = False
        """Whether the connection that there is was answered by this very peer, and whether any was, at this address."""
        self._selector, self._hello, self._key = selector, hello, key
        self._connection: Connection | None = None
        self._connecting = False
        self._attempt_until, self._next_attempt = 0.0, 0.0
        self._messages: dict[int, _Message] = {}
        self.due = 0.0
        """When its next turn is; at once after whatever happens to it. A thousand peers of which one speaks have one turn."""

    def meet(self, address: str, now: float) -> None:
        """The peer is at this address; a new one is another process, of which nothing is known yet."""
        if address == self.address:
            return
        if address:
            resolved(address)
        self._hang_up()
        self.address, self.hearing, self.met = address, hearing.Hearing(), False
        self._next_attempt, self.due = now, now

    def forget(self, now: float) -> None:
        """A new world: who is not connected now may be another process, or may not have come. Wait for its address."""
        if not self.proven:
            self.meet("", now)

    def send(self, message: Mapping[str, Any], future: Future[None], now: float, within_s: float) -> None:
        """Have a message delivered; the future ends when it is, or has not been in time."""
        if not self.watched and self._connection is None and not self.hearing.left:
            self.hearing, self._next_attempt = hearing.Hearing(), 0.0  # of old; nobody has looked since
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
        """Do what is due; when there is something to do again."""
        self._expire(now)
        if not self.address or self.hearing.left or not (self.watched or self._messages or self._connection):
            return min((each.until for each in self._messages.values()), default=now + 1.0)
        if self._connecting and now >= self._attempt_until:
            self._failed(now)
        if self._connection is None or self._connecting:
            self.hearing.doubted(now, patience_s)
            self.hearing.passed(now)
            if self.hearing.unheard:
                self._give_up(f"worker {self.id} {self.hearing.unheard}")
        if self._connection is None and now >= self._next_attempt:
            self._call(now)
        self._listen()
        due = self._attempt_until if self._connecting else self._next_attempt if self._connection is None else now + 1.0
        return min(due, self.hearing.ends, *(each.until for each in self._messages.values()), now + 1.0)

    def ready(self, events: int, now: float) -> None:
        """The socket can be read or written."""
        connection, self.due = self._connection, now
        if connection is None:
            return
        try:
            if self._connecting:
                if error := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                self._connecting = False
                self.hearing.accepted()
            for said in connection.receive() if events & selectors.EVENT_READ else ():
                self._hear(said)
            if self._connection:
                connection.flush()
        except (OSError, ValueError, RecursionError) as problem:
            self._broken(problem, now)

    def close(self) -> None:
        """Hang up, and give up what has not been delivered."""
        self._give_up("this worker has left the mesh")
        self._hang_up()

    def _call(self, now: float) -> None:
        self._attempt_until = now + self.hearing.attempt_s
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

    def _hear(self, said: Mapping[str, Any]) -> None:
        if "hello" in said:
            found = said["hello"]
            if not isinstance(found, Mapping) or (found.get("id"), found.get("run")) != (self.id, self._hello["run"]):
                raise Forged(f"it is not worker {self.id} of this run")
            self.hearing.proven()
            self.proven = self.met = True
            for each in self._messages.values():
                if self._connection:
                    self._connection.send(each.line)
        elif not self.proven:
            raise Forged("it does not begin with hello")
        elif "got" in said:
            if had := self._messages.pop(said["got"], None):
                had.future.set_result(None)
        elif "unknown" in said:
            if had := self._messages.pop(said["unknown"], None):
                had.future.set_exception(Undelivered(f"worker {self.id} knows no such message; it runs another version"))
        elif "goodbye" in said:
            self.hearing = hearing.Hearing(left=True)
            self._give_up(f"worker {self.id} has left")
            self._hang_up()

    def _broken(self, problem: Exception, now: float) -> None:
        """What there was of a connection is over. A member that was there has hung up or was reset; one that was not, refused."""
        silent = isinstance(problem, OSError) and not isinstance(problem, ConnectionError)
        refused = not self.proven and not silent
        if refused:
            self.hearing.refused()
        self._failed(now, refused=refused)

    def _failed(self, now: float, *, refused: bool = False) -> None:
        earliest = now if self.proven or refused else max(now, self._attempt_until)
        self._hang_up()
        self._next_attempt = earliest + self.hearing.pause_s * random.SystemRandom().uniform(0.8, 1.2)

    def _problem(self) -> str:
        if self.hearing.left:
            return f"worker {self.id} has left"
        return f"worker {self.id} {self.hearing.unheard}" if self.hearing.unheard else ""

    def _expire(self, now: float) -> None:
        for number, each in [*self._messages.items()]:
            if now >= each.until:
                del self._messages[number]
                where = "" if self.address else "; its address is not known"
                each.future.set_exception(Undelivered(f"worker {self.id} has not acknowledged a message in time{where}"))

    def _give_up(self, reason: str) -> None:
        waiting, self._messages = self._messages, {}
        for each in waiting.values():
            each.future.set_exception(Undelivered(reason))

    def _listen(self) -> None:
        """Have the selector wait for what we wait for."""
        if self._connection is None:
            return
        events = selectors.EVENT_WRITE if self._connecting else selectors.EVENT_READ
        if self._connection.writing:
            events |= selectors.EVENT_WRITE
        known = self._selector.get_map().get(self._connection.sock)
        if known is None:
            self._selector.register(self._connection.sock, events, self)
        elif known.events != events:
            self._selector.modify(self._connection.sock, events, self)

    def _hang_up(self) -> None:
        if self._connection is not None:
            if self._selector.get_map().get(self._connection.sock):
                self._selector.unregister(self._connection.sock)
            self._connection.close()
        self._connection, self._connecting, self.proven = None, False, False
