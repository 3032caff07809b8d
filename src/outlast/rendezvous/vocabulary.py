"""The inputs and results of `rendezvous.who_trains`.

Field names are the wire format of `Call` and `World`. Import all classes from `rendezvous.who_trains`.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

from outlast.job import contract
from outlast.rendezvous import partition

Id = Annotated[int, lambda id: id < contract.MOST_WORKERS]
is_address = re.compile(r"[!-~]{1,255}:[0-9]{1,5}").fullmatch
Address = Annotated[str, is_address]
MaybeAddress = Annotated[str, lambda address: not address or is_address(address)]
"""An `Address`, or an empty string."""


class MemberState(enum.StrEnum):
    WAITING = "waiting"
    """Ready to join a world, and not training."""
    TRAINING = "training"
    LEAVING = "leaving"
    """The member was asked to leave (SIGTERM, drain). It saves with the other members first."""
    DONE = "done"
    """The training processes have finished successfully."""


@dataclass(frozen=True)
class Member:
    """A worker as described in its newest report; see `messages.Report` for its fields."""

    id: int
    """The worker's index, which is independent of its rank."""
    address: str
    standing: MemberState
    generation: int = 0
    since: float = 0.0
    """When `standing` last changed."""
    failed: bool = False
    why: str = ""
    """Description of the failure; empty if the failure is unknown or only a consequence of another worker's failure."""
    unheard: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    noticed: float = 0.0
    """When `unheard` last grew."""
    held: int = 0
    again: bool = False
    owes: bool = True
    batch: tuple[int, ...] = ()
    mesh_address: str = ""


class Cause(enum.StrEnum):
    """The machine-readable reason for a call."""

    UNKNOWN = ""
    """No cause was given, or a newer version has introduced it."""
    START = "start"
    RESUME = "resume"
    """The run continues after a pause in which no worker trained."""
    LOST = "lost"
    FAILED = "failed"
    LEFT = "left"
    """Workers left the world although they were not called."""
    LATE = "late"
    """Workers did not join the world, or did not save, in time."""
    PARTLY_DONE = "partly-done"
    """Some workers have finished, and the others cannot finish without them."""
    FOREIGN = "foreign"
    """Workers report a generation that this coordinator has not published."""
    LEAVING = "leaving"
    SHRINK = "shrink"
    GROW = "grow"
    SUSPEND = "suspend"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Call:
    """A request to re-rendezvous for `generation`.

    A later call for the same generation replaces this call if a planned call becomes unplanned, or if more workers leave.
    """

    generation: int
    reason: str
    planned: bool
    """True if training saves first; otherwise its unsaved work is dropped at once."""
    at: float = 0.0
    leaving: tuple[int, ...] = ()
    """Workers whose absence is not a failure once they have saved."""
    cause: Cause = Cause.UNKNOWN
    lost: tuple[int, ...] = ()
    """Unresponsive workers to kill; see `rendezvous.partition`."""


@dataclass(frozen=True)
class World:
    """A group of workers that train together."""

    generation: int
    members: Annotated[tuple[Id, ...], lambda ids: 0 < len(set(ids)) == len(ids)]
    """Worker ids in rank order."""
    address: Address
    """Address of rank 0, which hosts the store."""
    reason: str
    at: float = 0.0
    held: int = 0
    """The newest complete step of any worker in the last world. Resuming below this step loses steps and is reported."""
    mesh_addresses: tuple[MaybeAddress, ...] = ()
    """Each member's mesh address in rank order, empty for a member without a mesh. Older versions publish no addresses."""


@dataclass(frozen=True)
class Wait:
    """A decision to do nothing until the next event or `look_again`."""

    reason: str
    look_again: float | None = None
    steady: str = field(default="", compare=False)
    """`reason` without the remaining seconds, so that it changes only with the situation."""
    idle: str = field(default="", compare=False)
    """Why some workers are not training with the others and will not do so soon; empty if there are no such workers. Part of
    `reason`."""

    def __post_init__(self) -> None:
        if not self.steady:
            object.__setattr__(self, "steady", self.reason)


@dataclass(frozen=True)
class Closed:
    """A decision to form no further worlds, because training is done or suspended."""

    reason: str
    done: bool


Decision = Call | World | Wait | Closed


@dataclass(frozen=True)
class Desired:
    replicas: int
    """Number of workers; 0 suspends the job. The target is the largest allowed size up to this number, or else the smallest
    allowed size."""
    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    expected: frozenset[int] | None = None
    """Ids of the workers that should be members; absent workers are awaited until a timeout. If None, any worker may join until
    the target is reached."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the rendezvous, in seconds."""

    start: float = 30.0
    """Timeout for missing workers while no worker holds any state, counted from when the smallest allowed world could form."""
    recovery: float = 1.0
    """Timeout for missing workers while surviving workers are idle."""
    growth: float = 5.0
    """Minimum age of a world before it grows, and how long the first newcomer waits for more."""
    leave: float = 75.0
    """Grace period in which training saves after a planned call."""
    answer: float = 10.0
    """Timeout for a connected worker to join a world or stop its processes, and for all workers to report to a new
    coordinator."""


@dataclass(frozen=True)
class State:
    """The state on which the coordinator bases its decisions."""

    members: Mapping[int, Member]
    """Connected workers, plus members of the world that were DONE when they disconnected."""
    world: World | None = None
    """The last published world, even if it is no longer training."""
    called: Call | None = None
    """The last call, which is pending while its generation is newer than the world's."""
    since: float = -math.inf
    """When this coordinator took over another coordinator's world. Members must report within `Timeouts.answer` of it."""
    min_generation: int = 0
    """The highest generation that must not be used, because generations up to it may have existed unseen."""
    lost: Mapping[int, partition.Loss] = field(default_factory=dict)
    """Recent losses, keyed by worker id. These workers are kept out of worlds for a while."""
    held: int = 0
    """The newest step reported by any worker of the last world, connected or not."""
    departed: frozenset[int] = frozenset()
    """Workers that had joined the world and disconnected. A new process with the same index cannot rejoin this world."""

    @property
    def inside(self) -> list[Member]:
        """Members that have joined the world, in rank order."""
        ranks, generation = (self.world.members, self.world.generation) if self.world else ((), 0)
        return [self.members[id] for id in ranks if id in self.members and self.members[id].generation >= generation]

    def reported(self, member: Member) -> Self:
        """Return the state after a worker's report. Changes in the worker's peers or in the step that it holds leave `since`
        unchanged."""
        last = self.members.get(member.id)
        if last is not None:
            if last.generation == member.generation and set(member.unheard) <= set(last.unheard):
                member = replace(member, noticed=last.noticed)
            ignored = ("unheard", "refused", "noticed", "since", "held", "owes", "batch")
            if replace(last, **{name: getattr(member, name) for name in ignored}) == member:
                member = replace(member, since=last.since)
            if member == last:
                return self
        return replace(self, members={**self.members, member.id: member}, held=max(self.held, member.held))

    def gone(self, *ids: int) -> Self:
        """Return the state after workers disconnected. A worker that was DONE in this world remains in the state."""
        joined = {member.id: member for member in self.inside}
        gone = self.members.keys() & set(ids) - {id for id, m in joined.items() if m.standing is MemberState.DONE}
        if not gone:
            return self
        members = {id: m for id, m in self.members.items() if id not in gone}
        return replace(self, members=members, departed=self.departed | (gone & joined.keys()))

    def after(self, decision: Decision) -> Self:
        """Return the state after a decision."""
        if isinstance(decision, Call):
            already = self.called.lost if self.called and self.called.generation == decision.generation else ()
            now, none = decision.at, partition.Loss(-math.inf, 0)
            lost = {id: self.lost.get(id, none).again(now, decision.reason) for id in decision.lost if id not in already}
            return replace(self, called=decision, lost={**self.lost, **lost})
        if isinstance(decision, World):
            # DONE in an older world does not count: drop members with that state, which may have exited.
            members = {id: m for id, m in self.members.items() if m.standing is not MemberState.DONE}
            lost = {id: replace(loss, held=loss.held and id not in decision.members) for id, loss in self.lost.items()}
            return replace(self, members=members, world=decision, called=None, lost=lost, held=0, departed=frozenset())
        return self
