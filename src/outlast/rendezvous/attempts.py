"""Attempts: the members of a world start its training processes again by themselves, without their coordinator. Pure.

An attempt is another start of the same world: the same generation, the same members, a fresh store. It is made when processes
failed and every member says that it is here, that its own processes are gone, and that nothing else is wanted of it. The member
of rank 0 leads: it asks the others to stop, collects what they say, and says go.

    Ready   member -> leader     my processes are gone; this is how they failed, and where I would host the store
    Stop    leader -> members    stop your processes, and say when they are gone
    Go      leader -> members    everybody is ready: the store is here
    No      both ways            not this time: the coordinator decides

A `Party` is one member's part in it; it takes messages and the time, and returns messages. What stays true, whatever is lost,
doubled, late or reordered: a member takes up an attempt only after every member had said that its processes of the one before
are gone; an attempt has one store; a party that has refused never goes. Messages are repeated, seldom, until they are answered.

The coordinator always wins: when it calls the members, publishes a world or ends the run, `refuse` ends the party of that world.
If some have gone by then, that call brings them back as it would from any attempt.
Used by `rendezvous.handler`; decision 0041.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from outlast.job import contract
from outlast.job.contract import Exit
from outlast.rendezvous import failures, restarts
from outlast.rendezvous.transports.sockets import is_count, is_number

REPEAT_S = 5.0
"""Interval at which messages without an answer are repeated. The mesh delivers each, or says that it has not; the answer to a
stop is that processes are gone, which takes seconds, and a thousand members must not be asked for it all the time."""
LATE_S = 2.0
"""Time after which a member that waits for the others also reports to the coordinator."""
TRIES, KILLED_TRIES = restarts.SAME_STEP - 1, 10
"""Attempts in a row without progress: after an error or a hang at one step, of which the next one ends the job; after a kill."""
PAST = 20
"""Most attempts that a report lists."""
_WORDS = 1000
"""Most characters of a traceback or a log in a message, and in the newest attempt of a report; older ones have none."""


@dataclass(frozen=True)
class Past:
    """A failure that the members have repaired themselves."""

    generation: int
    attempt: int
    """The attempt that repaired it, counted from 1 in each generation; it failed in the one before."""
    worker: int
    failure: Mapping[str, Any]
    """As `sockets.Report.failure`."""
    at: float = 0.0
    """When it was repaired, by the steady clock of the member that reports it: to be compared within one report only."""

    @property
    def start(self) -> tuple[int, int]:
        """The start of processes that failed, as `failure.Failure.start`."""
        return self.generation, self.attempt - 1

    @property
    def sentence(self) -> str:
        """What was done about it: the beginning of a sentence."""
        return f"repaired by its workers, attempt {self.attempt} of generation {self.generation}"

    @classmethod
    def of(cls, said: object) -> Self:
        """From untrusted JSON. Raises ValueError."""
        return cls(**_fields(cls, said))


@dataclass(frozen=True)
class Ready:
    """The processes of the sender are gone."""

    generation: int
    attempt: int
    """The one that it is ready for."""
    address: str
    """`host:port` where it would host the store."""
    step: int = 0
    """How far its processes were."""
    failure: Mapping[str, Any] | None = None
    """How they failed; None if they were stopped."""


@dataclass(frozen=True)
class Stop:
    """Stop the training processes."""

    generation: int
    attempt: int
    """The one to be ready for."""


@dataclass(frozen=True)
class Go:
    """Everybody is ready."""

    generation: int
    attempt: int
    address: str
    """Of the store."""
    worker: int
    """Whose failure it was."""
    failure: Mapping[str, Any]

    @property
    def past(self) -> Past:
        return Past(self.generation, self.attempt, self.worker, self.failure)


@dataclass(frozen=True)
class No:
    """The coordinator must decide."""

    generation: int
    attempt: int
    reason: str


Message = Ready | Stop | Go | No
Letters = list[tuple[int, Message]]
"""Messages, each with the member that it is for."""
_KINDS: Mapping[str, type[Message]] = {"ready": Ready, "stop": Stop, "go": Go, "no": No}


def written(message: Message) -> dict[str, Any]:
    """A message as JSON."""
    return {"word": type(message).__name__.lower(), **dataclasses.asdict(message)}


def read(said: object) -> Message | None:
    """A message from JSON; None for what no party writes. Fields of newer versions are ignored."""
    kind = _KINDS.get(str(said.get("word"))) if isinstance(said, Mapping) else None
    try:
        return kind(**_fields(kind, said)) if kind else None
    except ValueError:
        return None


_FITS: Mapping[str, Any] = {
    "generation": is_count,
    "attempt": lambda value: is_count(value) and value > 0,
    "worker": lambda value: is_count(value) and value < contract.MOST_WORKERS,
    "step": is_count,
    "address": lambda value: isinstance(value, str) and len(value) < 300,
    "reason": lambda value: isinstance(value, str),
    "failure": lambda value: isinstance(value, Mapping),
    "at": is_number,
}


def _fields(cls: Any, said: object) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise ValueError(f"{cls.__name__.lower()} of an attempt cannot be {said!r:.80}")
    found = {}
    for each in dataclasses.fields(cls):
        if each.default is not dataclasses.MISSING and said.get(each.name) is None:
            continue
        if each.name not in said or not _FITS[each.name](said[each.name]):
            raise ValueError(f"{each.name} of an attempt cannot be {said.get(each.name)!r:.80}")
        found[each.name] = said[each.name]
    return found


def shortened(failure: Mapping[str, Any], most: int = _WORDS) -> dict[str, Any]:
    """A failure with at most so many characters of its traceback and log, the last ones."""
    words = {name: str(failure[name])[-most:] if most else "" for name in ("traceback", "log_tail") if failure.get(name)}
    return {**failure, **words}


def listed(past: Iterable[Past]) -> list[dict[str, Any]]:
    """The last of these for a report, the words of all but the newest left out: a report has a greatest size."""
    newest = list(past)[-PAST:]
    return [
        {**dataclasses.asdict(each), "failure": shortened(each.failure, _WORDS if each is newest[-1] else 0)} for each in newest
    ]


def before(generation: int, attempt: int) -> tuple[int, int]:
    """The last start of processes that there can have been before this one: no generation has a billion."""
    return (generation, attempt - 1) if attempt else (generation - 1, 10**9)


def uncounted(reports: Iterable[Iterable[object]], judged: tuple[int, int], generation: int) -> list[tuple[Past, float]]:
    """What reports of up to that `generation` list and is not counted yet, in the order in which to count it, each with how many
    seconds before the newest it was repaired: whoever counts may have been away for days. `judged` is the last start of processes
    whose failure was counted. What cannot be read is left out."""
    found: dict[tuple[int, int], tuple[Past, float]] = {}
    for said in reports:
        readable: list[Past] = []
        for each in said:
            with contextlib.suppress(ValueError):
                readable.append(Past.of(each))
        for past in readable:
            if judged < past.start and past.generation <= generation:
                ago_s = max(other.at for other in readable) - past.at  # less, from who has not heard of the newest yet
                found[past.start] = past, max(ago_s, found.get(past.start, (past, ago_s))[1])
    return [each for _, each in sorted(found.items())]


class Stage(enum.Enum):
    """What a member does."""

    TRAINING = enum.auto()
    STOPPING = enum.auto()
    """It was asked to stop its processes."""
    READY = enum.auto()
    """They are gone, and it waits for the others."""
    GOES = enum.auto()
    """All have agreed: it is to take up `Party.go`."""
    REFUSED = enum.auto()
    """The coordinator decides what comes next; there is no further attempt of this world."""


class Party:
    """The part of the member `id` in the attempts of one world of `members`, in rank order. `limit` is how many attempts it makes
    while nothing new is saved, as `restarts.Policy.limit`."""

    def __init__(self, id: int, members: tuple[int, ...], generation: int, limit: int) -> None:
        self.id, self.members, self.generation, self.limit = id, members, generation, limit
        self.leader = members[0]
        self.attempt = 0
        """The one that this member trains in, or trained in last."""
        self.stage = Stage.TRAINING
        self.reason = ""
        """Why it was refused."""
        self.go: Go | None = None
        """The last that all agreed on."""
        self._mine: Ready | None = None
        self._since = 0.0
        self._repeated = -math.inf
        """When what has no answer was sent last."""
        self._ready: dict[int, Ready] = {}
        """Of the leader: what the members said for the next attempt."""
        self._first = 0.0
        """Of the leader: when the first of them did."""
        self._step: int | None = None
        """Of the leader: the furthest step at which an attempt was made."""
        self._tries = 0
        """Of the leader: attempts made since then."""
        self._committed = 0
        """Of the leader: the newest committed step that a failure told of."""
        self._unsaved = 0
        """Of the leader: attempts made since then."""

    # What happens here

    def stopped(self, address: str, step: int, failure: Mapping[str, Any] | None, now: float) -> Letters:
        """Our processes are gone: they failed, or were stopped. We would host the store at `address`."""
        if self.stage not in (Stage.TRAINING, Stage.STOPPING):
            return []
        failure = shortened(failure) if failure else None
        self._mine = Ready(self.generation, self.attempt + 1, address, step, failure)
        self.stage, self._since, self._repeated = Stage.READY, now, now
        if self.id == self.leader:
            return self._heard(self.id, self._mine, now)
        return [(self.leader, self._mine)]

    def refuse(self, reason: str) -> Letters:
        """Make no attempt: the coordinator has spoken, or must."""
        if self.stage is Stage.REFUSED:
            return []
        waits = self._ready if self.id == self.leader else {self.leader: None} if self.stage is not Stage.TRAINING else {}
        self.stage, self.reason = Stage.REFUSED, reason
        no = No(self.generation, self.attempt + 1, reason)
        return [(id, no) for id in waits if id != self.id]  # who asks later gets the same answer

    def taken_up(self) -> None:
        """Our processes start with the attempt that was agreed on."""
        assert self.go is not None
        self.attempt, self.stage, self._mine = self.go.attempt, Stage.TRAINING, None
        self._ready = {}

    def late(self, now: float) -> bool:
        """Whether we have waited for the others for so long that the coordinator should know."""
        return self.stage is Stage.READY and now - self._since >= LATE_S

    def tick(self, now: float) -> Letters:
        """Repeat what has no answer; to be asked now and then while we wait or lead."""
        letters = self._asked_to_stop(now) if self.id == self.leader else []
        if self.stage is Stage.READY and self.id != self.leader and self._mine and now - self._repeated >= REPEAT_S:
            self._repeated = now
            letters.append((self.leader, self._mine))
        return letters

    # What the others say

    def take(self, sender: int, message: Message, now: float) -> Letters:
        """A message of another member."""
        if message.generation != self.generation or sender not in self.members or sender == self.id:
            return []
        if self.id == self.leader:
            match message:
                case Ready():
                    return self._heard(sender, message, now)
                case No() if message.attempt > self.attempt and self.stage is not Stage.GOES:
                    return self.refuse(message.reason)
            return []
        if sender != self.leader or message.attempt <= self.attempt:
            return []
        match message:
            case Stop():
                return self._told_to_stop(message)
            case Go() if self.stage is Stage.READY and message.attempt == self.attempt + 1:
                self.go, self.stage = message, Stage.GOES
            case No() if self.stage is not Stage.GOES:
                self.stage, self.reason = Stage.REFUSED, message.reason
        return []

    def _told_to_stop(self, stop: Stop) -> Letters:
        if self.stage is Stage.REFUSED:
            return [(self.leader, No(self.generation, stop.attempt, self.reason))]
        if self.stage is Stage.GOES:
            return []
        if stop.attempt > self.attempt + 1:  # we missed the go of one that has failed since: our failure led to that one
            self.attempt = stop.attempt - 1
            if self._mine:
                self._mine = dataclasses.replace(self._mine, attempt=stop.attempt, failure=None)
        if self.stage is Stage.READY and self._mine:
            return [(self.leader, self._mine)]
        self.stage = Stage.STOPPING
        return []

    # The leader

    def _heard(self, sender: int, ready: Ready, now: float) -> Letters:
        if self.stage is Stage.REFUSED:
            return [(sender, No(self.generation, ready.attempt, self.reason))]
        if self.go and ready.attempt == self.go.attempt:  # it has missed the go, unless this comes late
            return [
                (sender, Stop(self.generation, self.attempt + 1) if self._ready and self.stage is not Stage.GOES else self.go)
            ]
        if self.stage is Stage.GOES or ready.attempt != self.attempt + 1:
            return []
        if not self._ready:
            self._first, self._repeated = now, -math.inf
        self._ready[sender] = ready
        if len(self._ready) < len(self.members):
            return self._asked_to_stop(now)
        return self._decided(now)

    def _asked_to_stop(self, now: float) -> Letters:
        """Ask those that train to stop; not yet while the cause of the failure may still be about to report."""
        if not self._ready or self.stage in (Stage.GOES, Stage.REFUSED) or now - self._repeated < REPEAT_S:
            return []
        if failures.held_until(self._pending(now), self._first, now, failures.COORDINATOR) is not None:
            return []
        self._repeated = now
        if self.stage is Stage.TRAINING:
            self.stage = Stage.STOPPING
        stop = Stop(self.generation, self.attempt + 1)
        return [(id, stop) for id in self.members if id != self.id and id not in self._ready]

    def _pending(self, now: float) -> list[failures.Pending]:
        failed = ((id, ready.failure) for id, ready in self._ready.items())
        return [failures.reported(said, id, (self.generation, self.attempt), now) for id, said in failed if said]

    def _decided(self, now: float) -> Letters:
        pending = self._pending(now)
        reached = max(ready.step for ready in self._ready.values())
        progress = self._step is None or reached > self._step
        told = [(ready.failure or {}).get("committed") for ready in self._ready.values()]
        committed = max((step for step in told if isinstance(step, int) and is_count(step)), default=0)
        unsaved = 0 if committed > self._committed else self._unsaved
        if why := refused(pending, self._tries if not progress else 0):
            return self.refuse(why)
        if unsaved >= self.limit:
            return self.refuse(f"restarts.limit ({self.limit}) is used up")
        self._committed, self._unsaved = max(self._committed, committed), unsaved + 1
        cause = failures.cause(pending).failure
        self._step, self._tries = (reached, 1) if progress else (self._step, self._tries + 1)
        failed = self._ready[cause.worker].failure
        address = self._ready[self.id].address
        self.go = Go(self.generation, self.attempt + 1, address, cause.worker, failed or {})
        self.stage = Stage.GOES
        return [(id, self.go) for id in self.members if id != self.id]


def refused(pending: list[failures.Pending], tries: int) -> str:
    """Why the members cannot repair these failures by themselves; empty if they can. `tries` is how many attempts in a row were
    made without progress."""
    if not pending:
        return "no member knows what failed"
    first = failures.cause(pending).failure
    if first.code in (Exit.INTERRUPTED, Exit.MISCONFIGURED, Exit.GIVEN_UP):
        return f"{first.reason}; another attempt would not help"
    starved = first.cause is contract.FailureCause.OUT_OF_MEMORY
    raised = (starved or not contract.killed(first.code)) and not first.hung
    if first.early or (raised and not first.step):  # whether it would be raised again the coordinator knows better
        return f"{first.reason} before its first step"
    most = TRIES if raised or first.hung else KILLED_TRIES
    return f"{tries} attempts in a row made no progress" if tries >= most else ""
