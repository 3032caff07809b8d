"""A member's side of the attempts: a `Participant` connected to the mesh, the clock and the training processes.

`rendezvous.membership` calls `stop_requested` while processes train, and `agree` once they have ended. `rendezvous.attempts`
makes the decisions.
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
from outlast.rendezvous.who_trains import World

if TYPE_CHECKING:
    from outlast.rendezvous.mesh.mesh import Mesh

KIND = "attempt"
REPORTERS = 3
"""Number of members that report repairs, so that the coordinator of a thousand members reads only a few copies."""
_POLL_S = 0.02


class Repairs:
    """One member's attempts in successive worlds. One thread uses it, and the mesh's thread delivers messages."""

    def __init__(self, id: int, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is as in `attempts.Participant`."""
        self._id, self._limit, self._clock = id, limit, clock
        self._participant: attempts.Participant | None = None
        self._mesh: Mesh | None = None
        self._past: list[Past] = []
        self._newest: dict[int, attempts.Message] = {}
        """The last message from each member. A message may arrive before we have reached the attempt that it belongs to."""
        self._lock = threading.RLock()
        self._news = threading.Event()

    @property
    def attempt(self) -> int:
        """The current world's attempt, counted from 0."""
        return self._participant.attempt if self._participant else 0

    @property
    def reason(self) -> str:
        """The reason why the coordinator must decide; empty if the members may."""
        return self._participant.reason if self._participant else "the members do not watch each other"

    def enter(self, world: World, mesh: Mesh | None) -> None:
        """Enter a new world. If `mesh` is None, attempts are possible only in a world of one member."""
        with self._lock:
            alone = world.members == (self._id,)
            self._participant = (
                attempts.Participant(self._id, world.members, world.generation, self._limit) if mesh or alone else None
            )
            self._mesh = None if alone else mesh
            if self._mesh:
                self._mesh.handlers[KIND] = self._on_message
            self._catch_up()

    def stop_requested(self) -> bool:
        """Return whether our processes must stop. Call this often, because it also repeats unanswered messages."""
        with self._lock:
            if self._participant is None:
                return False
            self._send(self._participant.tick(self._clock()))
            return self._participant.stage is Stage.STOPPING

    def refuse(self, reason: str) -> None:
        """Refuse further attempts, so that the coordinator decides."""
        with self._lock:
            if self._participant:
                self._send(self._participant.refuse(reason))

    def agree(
        self,
        address: str,
        step: int,
        failure: Mapping[str, Any] | None,
        *,
        overruled: Callable[[], str],
        late: Callable[[], None],
    ) -> Go | None:
        """Wait for all members to agree on the next attempt, after our processes have ended. Returns None if the coordinator
        decides.

        `failure` describes how our processes failed; None if they were stopped. `overruled` returns a reason to refuse the
        attempt, or an empty string. `late` is called once if agreeing takes too long.
        """
        notified = False
        with self._lock:
            participant = self._participant
            if participant is None or (failure is None and participant.stage is not Stage.STOPPING):
                self.refuse("its processes have ended without a request")
                return None
            self._send(participant.stopped(address, step, failure, self._clock()))
        while True:
            self._news.clear()
            if reason := overruled():
                self.refuse(reason)
            with self._lock:
                if participant.stage is Stage.GOES:
                    return participant.go
                if participant.stage is not Stage.READY:
                    return None
                self._send(participant.tick(self._clock()))
                is_late = participant.late(self._clock()) and not notified
            if is_late:
                notified = True
                late()
            self._news.wait(_POLL_S)

    def taken_up(self) -> Past:
        """Handle the start of our processes in the agreed attempt, and return the repaired failure."""
        with self._lock:
            participant = self._participant
            if participant is None or participant.go is None:
                raise RuntimeError("no attempt was agreed on")
            participant.taken_up()
            self._past = [*self._past, dataclasses.replace(participant.go.past, at=self._clock())][-attempts.PAST :]
            self._catch_up()
            return self._past[-1]

    def report(self, *, failed: bool = False) -> dict[str, Any]:
        """Return the attempt fields of this member's `messages.Report`. After a failure, every member reports earlier repairs, so
        that failures are counted in order."""
        participant = self._participant
        if participant is None or not (failed or self._id in participant.members[:REPORTERS]):
            return {"attempt": self.attempt}
        return {"attempt": self.attempt, "past": tuple(attempts.listed(self._past))}

    def _send(self, messages: attempts.Messages) -> None:
        if self._mesh is None:
            return
        for to, message in messages:
            future = self._mesh.send(to, {"kind": KIND, **attempts.written(message)})
            future.add_done_callback(functools.partial(self._sent, to, message))

    def _sent(self, to: int, message: attempts.Message, future: Future[None]) -> None:
        """Refuse the attempt if a delivery failed: the member is unreachable or runs an older version."""
        if (problem := future.exception()) is None or isinstance(message, attempts.No):
            return
        with self._lock:
            participant = self._participant
            if participant is None or (message.generation, message.attempt) != (participant.generation, participant.attempt + 1):
                return
            if participant.stage in (Stage.READY, Stage.STOPPING):
                self.refuse(f"worker {to} cannot be reached: {problem}")
        self._news.set()

    def _on_message(self, sender: int, content: Mapping[str, Any]) -> None:
        message = attempts.read(content)
        with self._lock:
            if message:
                self._newest[sender] = message
            if message and self._participant:
                self._send(self._participant.take(sender, message, self._clock()))
        self._news.set()

    def _catch_up(self) -> None:
        """Process messages that arrived too early. The mesh has acknowledged them, so their senders do not repeat them soon."""
        for sender, message in self._newest.items() if self._participant else ():
            if self._participant and message.attempt > self._participant.attempt:
                self._send(self._participant.take(sender, message, self._clock()))
