"""The part of this process in attempts: it gives a `Party` the messages of the mesh, the time, and what became of the processes.

The elastic agent has one, its handler asks it twice: 20 times a second while processes train (`asked`), and when they are gone
(`agree`). Decisions are in `rendezvous.attempts`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from outlast.rendezvous import attempts
from outlast.rendezvous.attempts import Go, Past, Stage
from outlast.rendezvous.world import World

if TYPE_CHECKING:
    from outlast.rendezvous.mesh.mesh import Mesh

KIND = "attempt"
"""Of our messages in the mesh."""
TELL = 3
"""So many members of a world report what was repaired: who hears of a thousand need not hear it a thousand times."""
_POLL_S = 0.02
"""Interval of looks at the coordinator and the notice while we wait for the other members."""


class Repairs:
    """The attempts of one member, world after world. Used by one thread; the mesh's thread brings messages."""

    def __init__(self, id: int, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` as of `attempts.Party`."""
        self._id, self._limit, self._clock = id, limit, clock
        self._party: attempts.Party | None = None
        self._mesh: Mesh | None = None
        self._past: list[Past] = []
        self._newest: dict[int, attempts.Message] = {}
        """Of each member its last message: one may come before we are where it is."""
        self._lock = threading.RLock()
        self._news = threading.Event()

    @property
    def attempt(self) -> int:
        """The attempt of the current world; 0 for its first start."""
        return self._party.attempt if self._party else 0

    @property
    def reason(self) -> str:
        """Why the coordinator decides what comes next, if it does."""
        return self._party.reason if self._party else "the members do not watch each other"

    def enter(self, world: World, mesh: Mesh | None) -> None:
        """There is a new world. Without a mesh only a world of one member makes attempts."""
        with self._lock:
            alone = world.members == (self._id,)
            self._party = attempts.Party(self._id, world.members, world.generation, self._limit) if mesh or alone else None
            self._mesh = None if alone else mesh
            if self._mesh:
                self._mesh.handlers[KIND] = self._take
            self._catch_up()

    def asked(self) -> bool:
        """Whether our processes are to be stopped. To be called often: the leader repeats what has no answer."""
        with self._lock:
            if self._party is None:
                return False
            self._send(self._party.tick(self._clock()))
            return self._party.stage is Stage.STOPPING

    def refuse(self, reason: str) -> None:
        """The coordinator decides what comes next."""
        with self._lock:
            if self._party:
                self._send(self._party.refuse(reason))

    def agree(
        self,
        address: str,
        step: int,
        failure: Mapping[str, Any] | None,
        *,
        overruled: Callable[[], str],
        late: Callable[[], None],
    ) -> Go | None:
        """Our processes are gone: wait until all members have agreed on the next attempt; None if the coordinator decides.

        `failure` is how ours failed, None if they were stopped; `overruled` says why no attempt may be made any more; `late` is
        called once when this takes long.
        """
        said = False
        with self._lock:
            party = self._party
            if party is None or (failure is None and party.stage is not Stage.STOPPING):
                self.refuse("its processes have ended by themselves")
                return None
            self._send(party.stopped(address, step, failure, self._clock()))
        while True:
            self._news.clear()
            if reason := overruled():
                self.refuse(reason)
            with self._lock:
                if party.stage is Stage.GOES:
                    return party.go
                if party.stage is not Stage.READY:
                    return None
                self._send(party.tick(self._clock()))
                is_late = party.late(self._clock()) and not said
            if is_late:
                said = True
                late()
            self._news.wait(_POLL_S)

    def taken_up(self) -> Past:
        """Our processes start with the attempt that was agreed on. Returns what it repairs."""
        with self._lock:
            party = self._party
            if party is None or party.go is None:
                raise RuntimeError("no attempt was agreed on")
            party.taken_up()
            self._past = [*self._past, dataclasses.replace(party.go.past, at=self._clock())][-attempts.PAST :]
            self._catch_up()
            return self._past[-1]

    def report(self, *, failed: bool = False) -> dict[str, Any]:
        """What this member reports, fields of `sockets.Report`. With a failure every member tells what was repaired before it:
        a later failure must not be counted first."""
        party = self._party
        if party is None or not (failed or self._id in party.members[:TELL]):
            return {"attempt": self.attempt}
        return {"attempt": self.attempt, "past": tuple(attempts.listed(self._past))}

    def _send(self, letters: attempts.Letters) -> None:
        if self._mesh is None:
            return
        for to, message in letters:
            future = self._mesh.send(to, {"kind": KIND, **attempts.written(message)})
            future.add_done_callback(functools.partial(self._sent, to, message))

    def _sent(self, to: int, message: attempts.Message, future: Future[None]) -> None:
        """A member that cannot be reached, or is of an older version, takes part in nothing."""
        if (problem := future.exception()) is None or isinstance(message, attempts.No):
            return
        with self._lock:
            party = self._party
            if party is None or (message.generation, message.attempt) != (party.generation, party.attempt + 1):
                return
            if party.stage in (Stage.READY, Stage.STOPPING):
                self.refuse(f"worker {to} cannot be reached: {problem}")
        self._news.set()

    def _take(self, sender: int, said: Mapping[str, Any]) -> None:
        message = attempts.read(said)
        with self._lock:
            if message:
                self._newest[sender] = message
            if message and self._party:
                self._send(self._party.take(sender, message, self._clock()))
        self._news.set()

    def _catch_up(self) -> None:
        """Take what has come too early: the mesh has acknowledged it, and its sender waits."""
        for sender, message in self._newest.items() if self._party else ():
            if self._party and message.attempt > self._party.attempt:
                self._send(self._party.take(sender, message, self._clock()))
