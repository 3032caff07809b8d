"""Attempts: a world's members restart its training processes without the coordinator. Pure.

An attempt starts the same world again with a fresh store, after a failure and once the processes of all members have ended. The
member with rank 0 leads.

    Ready   member -> leader     my processes have ended; how they failed, and where I would host the store
    Stop    leader -> members    stop your processes, and report when they have ended
    Go      leader -> members    all members are ready; the store's address
    No      both ways            no attempt: the coordinator decides

Invariants, even if messages are lost, duplicated, late or reordered: a member starts an attempt only after the processes of every
member have ended; an attempt has one store; a participant that has refused never starts. The coordinator always wins: when it
calls the members, publishes a world or ends the run, `refuse` ends the attempts of the current world. Used by
`rendezvous.membership`. See decision 0041.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.contract import Exit
from outlast.rendezvous import restart_budget, root_cause
from outlast.rendezvous.vocabulary import Address, Id

REPEAT_S = 5.0
"""Seconds after which an unanswered message is repeated. The value matters little, because the mesh reports every failed
delivery."""
LATE_S = 2.0
"""Seconds after which a waiting member also reports to the coordinator."""
TRIES, KILLED_TRIES = restart_budget.SAME_STEP - 1, 10
"""Maximum numbers of consecutive attempts without progress: after an error or a hang, and after a kill."""
PAST = 20
"""Maximum number of attempts that a report lists."""
_MOST_TEXT = 1000
"""Maximum number of characters of a traceback or log in a message."""
_Attempt = Annotated[int, lambda attempt: attempt > 0]


@dataclass(frozen=True)
class Past:
    """A failure that the members have repaired without the coordinator."""

    generation: int
    attempt: _Attempt
    """The attempt that repaired the failure, counted from 1 in each generation."""
    worker: Id
    failure: Mapping[str, Any]
    at: float = 0.0
    """Time of the repair on the reporting member's steady clock; comparable only within one report."""

    @property
    def start(self) -> tuple[int, int]:
        """Generation and attempt of the processes that failed."""
        return self.generation, self.attempt - 1

    @property
    def sentence(self) -> str:
        return f"repaired by its workers, attempt {self.attempt} of generation {self.generation}"


class Repaired(NamedTuple):
    """A repaired failure, and the seconds since its repair."""

    past: Past
    ago_s: float


@dataclass(frozen=True)
class Ready:
    """Message: the sender's processes have ended."""

    generation: int
    attempt: _Attempt
    address: Address
    """`host:port` where the sender would host the store."""
    step: int = 0
    failure: Mapping[str, Any] | None = None
    """How the processes failed; None if they were stopped."""


@dataclass(frozen=True)
class Stop:
    """Message: stop the training processes."""

    generation: int
    attempt: _Attempt


@dataclass(frozen=True)
class Go:
    """Message: all members are ready, and the attempt starts."""

    generation: int
    attempt: _Attempt
    address: Address
    worker: Id
    failure: Mapping[str, Any]

    @property
    def past(self) -> Past:
        return Past(self.generation, self.attempt, self.worker, self.failure)


@dataclass(frozen=True)
class No:
    """Message: there is no attempt, and the coordinator must decide."""

    generation: int
    attempt: _Attempt
    reason: str


Message = Ready | Stop | Go | No
Messages = list[tuple[int, Message]]
"""Messages with the ids of their recipients."""
_KINDS: Mapping[str, type[Message]] = {"ready": Ready, "stop": Stop, "go": Go, "no": No}


def written(message: Message) -> dict[str, Any]:
    return {"word": type(message).__name__.lower(), **dataclasses.asdict(message)}


def read(value: object) -> Message | None:
    """Parse a message; returns None if it is invalid. Fields from newer versions are ignored."""
    kind = _KINDS.get(str(value.get("word"))) if isinstance(value, Mapping) else None
    with contextlib.suppress(ValueError):
        return decode(kind, value) if kind else None
    return None


def shortened(failure: Mapping[str, Any], most: int = _MOST_TEXT) -> dict[str, Any]:
    """Return a failure with its traceback and log cut to the last `most` characters."""
    texts = {name: str(failure[name])[-most:] if most else "" for name in ("traceback", "log_tail") if failure.get(name)}
    return {**failure, **texts}


def listed(past: Iterable[Past]) -> list[dict[str, Any]]:
    """Return the newest repairs as JSON objects for a report. To keep the report small, only the newest has its traceback and
    log."""
    newest = list(past)[-PAST:]
    return [
        {**dataclasses.asdict(each), "failure": shortened(each.failure, _MOST_TEXT if each is newest[-1] else 0)}
        for each in newest
    ]


def previous_start(generation: int, attempt: int) -> tuple[int, int]:
    """Return a (generation, attempt) that is not below any earlier start's: no generation has a billion attempts."""
    return (generation, attempt - 1) if attempt else (generation - 1, 10**9)


def uncounted(reports: Iterable[Iterable[object]], counted: tuple[int, int], generation: int) -> list[Repaired]:
    """Return the reported repairs up to `generation` that have not been counted yet, in order.

    Ages are relative to the newest repair in the same report, because the coordinator may have been away for days. `counted` is
    the generation and attempt of the last counted failure. Invalid entries are omitted.
    """
    repairs: dict[tuple[int, int], Repaired] = {}
    for report in reports:
        valid: list[Past] = []
        for each in report:
            with contextlib.suppress(ValueError):
                valid.append(decode(Past, each))
        for past in valid:
            if counted < past.start and past.generation <= generation:
                ago_s = max(other.at for other in valid) - past.at  # the age is smaller if this report lacks the newest repair
                repairs[past.start] = Repaired(past, max(ago_s, repairs.get(past.start, (past, ago_s))[1]))
    return [each for _, each in sorted(repairs.items())]


class Stage(enum.Enum):
    TRAINING = enum.auto()
    STOPPING = enum.auto()
    """The leader has asked the member to stop its processes."""
    READY = enum.auto()
    """The member's processes have ended, and it waits for the other members."""
    GOES = enum.auto()
    """All members have agreed, and the member starts `Participant.go` next."""
    REFUSED = enum.auto()
    """The member refuses further attempts in this world, and leaves the decision to the coordinator."""


class Participant:
    """One member's side of a world's attempts: it takes messages and the time, and returns messages. `members` are in rank order.
    `limit` is as in `restart_budget.Policy.limit`."""

    def __init__(self, id: int, members: tuple[int, ...], generation: int, limit: int) -> None:
        self.id, self.members, self.generation, self.limit = id, members, generation, limit
        self.leader = members[0]
        self.attempt = 0
        self.stage = Stage.TRAINING
        self.reason = ""
        """Why the member refuses; empty if it does not."""
        self.go: Go | None = None
        """The last attempt that all members agreed to."""
        self._own: Ready | None = None
        self._since = 0.0
        self._repeated = -math.inf
        # Used by the leader only:
        self._ready: dict[int, Ready] = {}
        self._first = 0.0
        self._step: int | None = None
        self._tries = 0
        """Number of attempts since `_step`, the furthest step reached, last grew."""
        self._committed = 0
        self._unsaved = 0
        """Number of attempts since `_committed`, the newest committed step, last grew."""

    # Local events

    def stopped(self, address: str, step: int, failure: Mapping[str, Any] | None, now: float) -> Messages:
        """Handle the end of our processes. `failure` is None if they were stopped. `address` is where we would host the store."""
        if self.stage not in (Stage.TRAINING, Stage.STOPPING):
            return []
        failure = shortened(failure) if failure else None
        self._own = Ready(self.generation, self.attempt + 1, address, step, failure)
        self.stage, self._since, self._repeated = Stage.READY, now, now
        if self.id == self.leader:
            return self._on_ready(self.id, self._own, now)
        return [(self.leader, self._own)]

    def refuse(self, reason: str) -> Messages:
        """Refuse further attempts, because the coordinator has decided or must decide."""
        if self.stage is Stage.REFUSED:
            return []
        waiting = self._ready if self.id == self.leader else {self.leader: None} if self.stage is not Stage.TRAINING else {}
        self.stage, self.reason = Stage.REFUSED, reason
        no = No(self.generation, self.attempt + 1, reason)
        return [(id, no) for id in waiting if id != self.id]  # later requests get the same answer

    def taken_up(self) -> None:
        """Handle the start of our processes in the agreed attempt."""
        assert self.go is not None
        self.attempt, self.stage, self._own = self.go.attempt, Stage.TRAINING, None
        self._ready = {}

    def late(self, now: float) -> bool:
        """Return whether this member has waited so long that it should report to the coordinator."""
        return self.stage is Stage.READY and now - self._since >= LATE_S

    def tick(self, now: float) -> Messages:
        """Return messages that are due to be repeated. Call it regularly while this member waits or leads."""
        messages = self._request_stops(now) if self.id == self.leader else []
        if self.stage is Stage.READY and self.id != self.leader and self._own and now - self._repeated >= REPEAT_S:
            self._repeated = now
            messages.append((self.leader, self._own))
        return messages

    # Messages from other members

    def take(self, sender: int, message: Message, now: float) -> Messages:
        if message.generation != self.generation or sender not in self.members or sender == self.id:
            return []
        if self.id == self.leader:
            match message:
                case Ready():
                    return self._on_ready(sender, message, now)
                case No() if message.attempt > self.attempt and self.stage is not Stage.GOES:
                    return self.refuse(message.reason)
            return []
        if sender != self.leader or message.attempt <= self.attempt:
            return []
        match message:
            case Stop():
                return self._on_stop(message)
            case Go() if self.stage is Stage.READY and message.attempt == self.attempt + 1:
                self.go, self.stage = message, Stage.GOES
            case No() if self.stage is not Stage.GOES:
                self.stage, self.reason = Stage.REFUSED, message.reason
        return []

    def _on_stop(self, stop: Stop) -> Messages:
        if self.stage is Stage.REFUSED:
            return [(self.leader, No(self.generation, stop.attempt, self.reason))]
        if self.stage is Stage.GOES:
            return []
        if stop.attempt > self.attempt + 1:  # we missed the Go of an attempt that has failed since
            self.attempt = stop.attempt - 1
            if self._own:
                self._own = dataclasses.replace(self._own, attempt=stop.attempt, failure=None)
        if self.stage is Stage.READY and self._own:
            return [(self.leader, self._own)]
        self.stage = Stage.STOPPING
        return []

    # The leader

    def _on_ready(self, sender: int, ready: Ready, now: float) -> Messages:
        if self.stage is Stage.REFUSED:
            return [(sender, No(self.generation, ready.attempt, self.reason))]
        if self.go and ready.attempt == self.go.attempt:  # the sender has missed the Go, or this message is late
            return [
                (sender, Stop(self.generation, self.attempt + 1) if self._ready and self.stage is not Stage.GOES else self.go)
            ]
        if self.stage is Stage.GOES or ready.attempt != self.attempt + 1:
            return []
        if not self._ready:
            self._first, self._repeated = now, -math.inf
        self._ready[sender] = ready
        if len(self._ready) < len(self.members):
            return self._request_stops(now)
        return self._decided(now)

    def _request_stops(self, now: float) -> Messages:
        """Return stop requests for the members that still train; none while the root cause may still be reported."""
        if not self._ready or self.stage in (Stage.GOES, Stage.REFUSED) or now - self._repeated < REPEAT_S:
            return []
        if root_cause.held_until(self._pending(now), self._first, now, root_cause.COORDINATOR) is not None:
            return []
        self._repeated = now
        if self.stage is Stage.TRAINING:
            self.stage = Stage.STOPPING
        stop = Stop(self.generation, self.attempt + 1)
        return [(id, stop) for id in self.members if id != self.id and id not in self._ready]

    def _pending(self, now: float) -> list[root_cause.Pending]:
        start = self.generation, self.attempt
        return [root_cause.reported(each.failure, id, start, now) for id, each in self._ready.items() if each.failure]

    def _decided(self, now: float) -> Messages:
        pending = self._pending(now)
        reached = max(ready.step for ready in self._ready.values())
        progress = self._step is None or reached > self._step
        committed = max(root_cause.committed(ready.failure) or 0 for ready in self._ready.values())
        unsaved = 0 if committed > self._committed else self._unsaved
        if why := refused(pending, self._tries if not progress else 0):
            return self.refuse(why)
        if unsaved >= self.limit:
            return self.refuse(f"restarts.limit ({self.limit}) is used up")
        self._committed, self._unsaved = max(self._committed, committed), unsaved + 1
        cause = root_cause.cause(pending).failure
        self._step, self._tries = (reached, 1) if progress else (self._step, self._tries + 1)
        failed = self._ready[cause.worker].failure or {}
        if committed:  # a process that died as it started did not know its run's checkpoints
            failed = {**failed, "committed": committed}
        address = self._ready[self.id].address
        self.go = Go(self.generation, self.attempt + 1, address, cause.worker, failed)
        self.stage = Stage.GOES
        return [(id, self.go) for id in self.members if id != self.id]


def refused(pending: list[root_cause.Pending], tries: int) -> str:
    """Return why the members cannot repair these failures themselves; empty if they can. `tries` counts consecutive attempts
    without progress."""
    if not pending:
        return "no member has reported a failure"
    first = root_cause.cause(pending).failure
    if first.code in (Exit.INTERRUPTED, Exit.MISCONFIGURED, Exit.GIVEN_UP):
        return f"{first.reason}; another attempt would not help"
    starved = first.cause is contract.FailureCause.OUT_OF_MEMORY
    raised = (starved or not contract.killed(first.code)) and not first.hung
    if first.early or (raised and not first.step):  # only the coordinator can judge whether a restart would help
        return f"{first.reason} {'at an unknown step' if first.step is None else 'before its first step'}"
    most = TRIES if raised or first.hung else KILLED_TRIES
    return f"{tries} attempts in a row made no progress" if tries >= most else ""
