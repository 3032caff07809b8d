"""The values that `rendezvous.world` decides on: what members report, what the user asks for, what is known, what is decided.

Field names are the wire format of `Call` and `World`. Import them from `rendezvous.world`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outlast.rendezvous import partition


class MemberState(enum.StrEnum):
    """What a member does, as it reports itself."""

    WAITING = "waiting"
    """Ready for a world; trains in none."""
    TRAINING = "training"
    LEAVING = "leaving"
    """Asked to leave (SIGTERM, drain): saves with the others, then leaves."""
    DONE = "done"
    """Its training processes have ended with success."""


@dataclass(frozen=True)
class Member:
    """A worker, by its newest report."""

    id: int
    """Index of the worker; not its rank."""
    address: str
    """`host:port` where the others would meet if it became rank 0."""
    standing: MemberState
    generation: int = 0
    """The world it trains in, or trained in last; 0 for none."""
    since: float = 0.0
    """When it took this standing; repeating a report does not change it."""
    failed: bool = False
    """Its training processes of `generation` failed, or it was found hung."""
    why: str = ""
    """What failed, in a sentence; empty when that is not known or only echoes another's failure."""
    unheard: tuple[int, ...] = ()
    """Members of the world of `generation` that it watches and does not hear any more."""
    refused: tuple[int, ...] = ()
    """Those of them whose process is gone: their machine refuses the connection."""
    noticed: float = 0.0
    """When `unheard` grew last; repeating it does not change this."""
    held: int = 0
    """The newest step that its processes had saved or in memory, whole, when they ended; 0: none, or not told."""
    again: bool = False
    """Its process is another than that which took up `generation`."""
    owes: bool = True
    """Whether others may not reach yet what it holds, or saves."""


class Cause(enum.StrEnum):
    """Why workers are called together, for programs; people read the sentence beside it."""

    UNKNOWN = ""
    """Not told, or told by a version that knows other causes."""
    START = "start"
    RESUME = "resume"
    """The run goes on after a pause in which no worker trained."""
    LOST = "lost"
    """Workers are gone."""
    FAILED = "failed"
    LEFT = "left"
    """Workers came out of the world without a word."""
    LATE = "late"
    """Workers did not take up the world, or did not save, in time."""
    PARTLY_DONE = "partly-done"
    """Some have finished and the others will not."""
    FOREIGN = "foreign"
    """There is a world that another coordinator decided."""
    LEAVING = "leaving"
    SHRINK = "shrink"
    GROW = "grow"
    SUSPEND = "suspend"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Call:
    """Request for a re-rendezvous: the workers are to come together for `generation`.

    Another call of the same generation replaces this one: it was planned and no longer is, or more workers leave.
    """

    generation: int
    reason: str
    planned: bool
    """Training saves first; otherwise it is dropped at once."""
    at: float = 0.0
    leaving: tuple[int, ...] = ()
    """Workers that go: once they have saved, their absence is no failure."""
    cause: Cause = Cause.UNKNOWN
    lost: tuple[int, ...] = ()
    """Workers that the others do not hear: to be killed, or told to end, where they are; see `rendezvous.partition`."""


@dataclass(frozen=True)
class World:
    """The workers that train together."""

    generation: int
    members: tuple[int, ...]
    """Worker ids in rank order."""
    address: str
    """Where they meet: the address of rank 0."""
    reason: str
    at: float = 0.0
    held: int = 0
    """The newest step that a worker of the last world has had, whole. To begin below it is a loss that people must hear of."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do before the next event, or before `look_again`."""

    reason: str
    look_again: float | None = None
    steady: str = field(default="", compare=False)
    """`reason` without the seconds that are left: the same each time while nothing changes."""

    def __post_init__(self) -> None:
        if not self.steady:
            object.__setattr__(self, "steady", self.reason)


@dataclass(frozen=True)
class Closed:
    """There is no further world: the training is done, or it is suspended."""

    reason: str
    done: bool


Decision = Call | World | Wait | Closed


@dataclass(frozen=True)
class Wanted:
    """The size that the user asks for."""

    replicas: int
    """Workers; 0 suspends the job. The target is the largest allowed size up to this, and at least the smallest."""
    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    expected: frozenset[int] | None = None
    """Workers that are to be members, whether connected or still being started; we wait for absent ones until a timeout.
    None: unknown, so any worker may join until the target is reached."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for workers, in seconds."""

    start: float = 30.0
    """For workers that are not there yet, from when the smallest allowed world could be formed; while no worker holds a state."""
    recovery: float = 1.0
    """The same while survivors stand idle."""
    growth: float = 5.0
    """From a world's beginning until it may be called together to grow; also from the first newcomer, for the others to come."""
    leave: float = 75.0
    """For training to save after a planned call."""
    answer: float = 10.0
    """For a connected worker to take up a world or to put down its processes; for all to report to a restarted coordinator."""


@dataclass(frozen=True)
class State:
    """What the coordinator knows."""

    members: Mapping[int, Member]
    """Workers that are connected, and those of the world that were DONE when they went."""
    world: World | None = None
    """The last published one, whether it still trains or not."""
    called: Call | None = None
    """The last call; it is pending while its generation is newer than the world's."""
    since: float = -math.inf
    """When this coordinator took over a world that is not its own: the members get `Timeouts.answer` from then to report."""
    floor: int = 0
    """Lower bound: no generation up to this one is used, since it may have existed unseen."""
    lost: Mapping[int, partition.Loss] = field(default_factory=dict)
    """Workers that others did not hear: they are kept out of worlds for a while."""
    held: int = 0
    """The newest step that a worker of the last world has told of, whether it is still there or not."""

    def heard(self, member: Member) -> State:
        """A worker reported. Repeating a report changes nothing; what it says of its peers, or of what it holds, is no new
        standing."""
        before = self.members.get(member.id)
        if before is not None:
            if before.generation == member.generation and set(member.unheard) <= set(before.unheard):
                member = replace(member, noticed=before.noticed)
            told = ("unheard", "refused", "noticed", "since", "held", "owes")
            if replace(before, **{name: getattr(member, name) for name in told}) == member:
                member = replace(member, since=before.since)
            if member == before:
                return self
        return replace(self, members={**self.members, member.id: member}, held=max(self.held, member.held))

    def gone(self, id: int) -> State:
        """A worker went. Who was DONE in this world may go: that it succeeded stays known."""
        member = self.members.get(id)
        if member is None:
            return self
        if (
            member.standing is MemberState.DONE
            and self.world
            and id in self.world.members
            and member.generation >= self.world.generation
        ):
            return self
        return replace(self, members={other: m for other, m in self.members.items() if other != id})

    def after(self, decision: Decision) -> State:
        """The state once a decision is taken."""
        if isinstance(decision, Call):
            before = self.called.lost if self.called and self.called.generation == decision.generation else ()
            now, none = decision.at, partition.Loss(-math.inf, 0)
            lost = {id: self.lost.get(id, none).again(now, decision.reason) for id in decision.lost if id not in before}
            return replace(self, called=decision, lost={**self.lost, **lost})
        if isinstance(decision, World):
            # What was DONE in older worlds was not enough, and those that said so may be gone.
            members = {id: m for id, m in self.members.items() if m.standing is not MemberState.DONE}
            lost = {id: replace(loss, held=loss.held and id not in decision.members) for id, loss in self.lost.items()}
            return replace(self, members=members, world=decision, called=None, lost=lost, held=0)
        return self
