"""The values that `rendezvous.world` decides on: members' reports, the desired size, the coordinator's state, its decisions.

Field names are the wire format of `Call` and `World`. Import them from `rendezvous.world`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outlast.rendezvous import partition


class MemberState(enum.StrEnum):
    """The activity of a member, as the member reports it."""

    WAITING = "waiting"
    """Ready for a world, and training in none."""
    TRAINING = "training"
    LEAVING = "leaving"
    """Asked to leave (SIGTERM, drain): the member saves with the other members, then leaves."""
    DONE = "done"
    """The training processes of the member have ended with success."""


@dataclass(frozen=True)
class Member:
    """A worker, as its newest report describes it."""

    id: int
    """Index of the worker; not its rank."""
    address: str
    """`host:port` at which the worker would host the world's store as rank 0."""
    standing: MemberState
    generation: int = 0
    """The world that the worker trains in, or trained in last; 0 for none."""
    since: float = 0.0
    """Time of the last change of `standing`; repeating a report does not change it."""
    failed: bool = False
    """Whether the worker's training processes of `generation` failed, or were found hung."""
    why: str = ""
    """A sentence about the failure; empty if it is unknown or only echoes another worker's failure."""
    unheard: tuple[int, ...] = ()
    """Members of the world of `generation` that the worker watches and does not hear any more."""
    refused: tuple[int, ...] = ()
    """The subset of `unheard` whose processes are gone: their machines refuse connections."""
    noticed: float = 0.0
    """Time at which `unheard` last grew; repeating a report does not change it."""
    held: int = 0
    """The newest complete step that the worker's processes had saved or in memory when they ended; 0: none, or not reported."""
    again: bool = False
    """Whether the worker was started again, so that its process is not the one that took up `generation`."""
    owes: bool = True
    """Whether the step that the worker holds or is saving may not be reachable for other workers yet."""


class Cause(enum.StrEnum):
    """Machine-readable reason for a call; people read the sentence beside it."""

    UNKNOWN = ""
    """Not given, or given by a version that knows other causes."""
    START = "start"
    RESUME = "resume"
    """The run goes on after a pause in which no worker trained."""
    LOST = "lost"
    FAILED = "failed"
    LEFT = "left"
    """Workers left the world without a report."""
    LATE = "late"
    """Workers did not take up the world, or did not save, in time."""
    PARTLY_DONE = "partly-done"
    """Some workers have finished, and the others will not."""
    FOREIGN = "foreign"
    """Another coordinator has decided on a world."""
    LEAVING = "leaving"
    SHRINK = "shrink"
    GROW = "grow"
    SUSPEND = "suspend"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Call:
    """Request for a re-rendezvous: the workers should come together for `generation`.

    Another call of the same generation replaces this one if a planned call becomes unplanned, or if more workers leave.
    """

    generation: int
    reason: str
    planned: bool
    """Whether training saves first; if not, its unsaved work is dropped at once."""
    at: float = 0.0
    leaving: tuple[int, ...] = ()
    """Workers that leave: once they have saved, their absence does not count as a failure."""
    cause: Cause = Cause.UNKNOWN
    lost: tuple[int, ...] = ()
    """Workers that the others do not hear, to be killed or told to exit; see `rendezvous.partition`."""


@dataclass(frozen=True)
class World:
    """The workers that train together."""

    generation: int
    members: tuple[int, ...]
    """Worker ids in rank order."""
    address: str
    """Address of rank 0, which hosts the store."""
    reason: str
    at: float = 0.0
    held: int = 0
    """The newest complete step that any worker of the last world has had. Resuming below this step loses steps, and is
    reported."""


@dataclass(frozen=True)
class Wait:
    """There is nothing to do before the next event, or before `look_again`."""

    reason: str
    look_again: float | None = None
    steady: str = field(default="", compare=False)
    """`reason` without the remaining seconds, so that the text stays the same as long as nothing changes."""

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
class Desired:
    """The size that the user requests."""

    replicas: int
    """Number of workers; 0 suspends the job. The target is the largest allowed size up to this number, and at least the smallest
    allowed size."""
    sizes: tuple[int, ...]
    """Allowed sizes of a world, ascending."""
    expected: frozenset[int] | None = None
    """Ids of the workers that should be members, connected or still starting; absent workers are awaited until a timeout. None:
    unknown, so any worker may join until the target is reached."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for workers, in seconds."""

    start: float = 30.0
    """How long to wait for missing workers while no worker holds a state, from the moment the smallest allowed world could be
    formed."""
    recovery: float = 1.0
    """The same while surviving workers are idle."""
    growth: float = 5.0
    """Minimum age of a world before it grows; also how long the first newcomer waits for more newcomers."""
    leave: float = 75.0
    """Time for training to save after a planned call."""
    answer: float = 10.0
    """Time for a connected worker to take up a world or to stop its processes; also the time for all workers to report to a
    restarted coordinator."""


@dataclass(frozen=True)
class State:
    """The state of the coordinator."""

    members: Mapping[int, Member]
    """Connected workers, and those of the world that were DONE when they disconnected."""
    world: World | None = None
    """The last published world, whether it still trains or not."""
    called: Call | None = None
    """The last call; it is pending while its generation is newer than the world's."""
    since: float = -math.inf
    """Time at which this coordinator took over another coordinator's world: members get `Timeouts.answer` from then on to
    report."""
    min_generation: int = 0
    """Generations up to this one are never used: they may have existed unseen."""
    lost: Mapping[int, partition.Loss] = field(default_factory=dict)
    """Workers that other workers did not hear; they are kept out of worlds for a while."""
    held: int = 0
    """The newest step that any worker of the last world has reported, whether the worker is still connected or not."""

    def reported(self, member: Member) -> State:
        """The state after a worker's report. Repeating a report changes nothing; news about the worker's peers, or about the step
        it holds, does not change `since`."""
        last = self.members.get(member.id)
        if last is not None:
            if last.generation == member.generation and set(member.unheard) <= set(last.unheard):
                member = replace(member, noticed=last.noticed)
            beside = ("unheard", "refused", "noticed", "since", "held", "owes")
            if replace(last, **{name: getattr(member, name) for name in beside}) == member:
                member = replace(member, since=last.since)
            if member == last:
                return self
        return replace(self, members={**self.members, member.id: member}, held=max(self.held, member.held))

    def gone(self, id: int) -> State:
        """The state after a worker disconnected. A worker that was DONE in this world stays in the state: it has succeeded."""
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
            already = self.called.lost if self.called and self.called.generation == decision.generation else ()
            now, none = decision.at, partition.Loss(-math.inf, 0)
            lost = {id: self.lost.get(id, none).again(now, decision.reason) for id in decision.lost if id not in already}
            return replace(self, called=decision, lost={**self.lost, **lost})
        if isinstance(decision, World):
            # DONE in an older world does not count: drop members with that state, which may have exited.
            members = {id: m for id, m in self.members.items() if m.standing is not MemberState.DONE}
            lost = {id: replace(loss, held=loss.held and id not in decision.members) for id, loss in self.lost.items()}
            return replace(self, members=members, world=decision, called=None, lost=lost, held=0)
        return self
