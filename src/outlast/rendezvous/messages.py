"""The messages between a run's members and their coordinator, on any kind of board.

    member -> coordinator   Report: the member's whole state, so a late or repeated report does no harm
    coordinator -> member   Published: the call, world and end that concern the member

Field names are the wire format, as in `rendezvous.vocabulary`; `base.typed_json` reads them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Annotated, Any, Self

from outlast.job.contract import End
from outlast.rendezvous import vocabulary
from outlast.rendezvous.vocabulary import Id, MaybeAddress, MemberState, World

_MOST_UNHEARD = 256
"""Maximum number of peers in one report."""
_MOST_PAST = 64
_Peers = Annotated[tuple[Id, ...], lambda ids: len(ids) <= _MOST_UNHEARD]


@dataclasses.dataclass(frozen=True)
class Report:
    """A member's report to the coordinator. `root_cause.reported` checks the contents of `failure`, and `attempts.uncounted`
    those of `past`."""

    run: str
    id: Id
    standing: MemberState
    generation: int = 0
    """The generation of the member's current or last world."""
    since: float = 0.0
    address: MaybeAddress = ""
    """`host:port` where the member would host the world's store."""
    failed: bool = False
    failure: Mapping[str, Any] | None = None
    """The failure in `generation`: `{rank, code, reason, cause, traceback, log_tail, time, echo, hung, left, early, step,
    committed}`. Fields may be missing.

    `cause` is a `contract.FailureCause`. `echo` is true if the error is only a consequence of another rank's end. For `hung`,
    `left` and `early` see `failure.Failure`. `step` is the last step and `committed` the newest saved step; both are None for a
    plain script.
    """
    mesh: bool = False
    """True if this member watches its peers in this world and has heard all of them."""
    unheard: _Peers = ()
    """Watched peers that were heard before and are now silent or refuse connections."""
    refused: _Peers = ()
    """The subset of `unheard` whose machines refuse connections, so their processes have ended."""
    attempt: int = 0
    """Number of times that the processes of `generation` were restarted without the coordinator."""
    past: Annotated[tuple[Mapping[str, Any], ...], lambda past: len(past) <= _MOST_PAST] = ()
    """The last repaired failures in any generation, as `attempts.Past`. Only a few members report them."""
    held: int = 0
    """The newest complete step that the member's processes had saved or held in memory when they ended. Sent between worlds."""
    owes: bool = True
    """True if other workers may not yet be able to load the step that this member holds or is saving; False if they can, or never
    will."""
    again: bool = False
    """True if this process has replaced the process that joined `generation`. Only workers that run the previous version report
    it."""
    batch: Annotated[tuple[int, ...], lambda batch: len(batch) in (0, 3)] = ()
    """The batch last reported by the member's processes, as `(generation, attempt, batch)`; empty if none was reported.

    `batch` is the number of samples per step over all ranks, divided by this member's number of processes. A world's size must
    divide it. It is 0 if the member's processes cannot share the samples equally.
    """
    mesh_address: MaybeAddress = ""
    """`host:port` where the member's mesh listens; empty if it has none."""

    def member(self, id: int, *, since: float, received: float, why: str = "") -> vocabulary.Member:
        """Return worker `id` as this report describes it. `since` is when its standing last changed and `received` when the
        report arrived, on the coordinator's clock. `why` describes the worker's own failure."""
        given: dict[str, Any] = {"id": id, "since": since, "noticed": received, "why": why}
        names = {each.name for each in dataclasses.fields(vocabulary.Member)} - given.keys()
        return vocabulary.Member(**given, **{name: getattr(self, name) for name in names})

    def changed(self, standing: str, **fields: Any) -> Self:
        """Return the next report. A new generation resets the fields that concern only the previous generation."""
        another = fields.get("generation", self.generation) != self.generation
        reset: dict[str, Any] = {"unheard": (), "refused": (), "attempt": 0, "again": False} if another else {}
        if standing not in (MemberState.TRAINING, MemberState.LEAVING):
            reset["mesh"] = False
        return dataclasses.replace(self, **{"standing": standing, "since": time.time(), **reset, **fields})


@dataclasses.dataclass(frozen=True)
class Gone:
    """The member has disconnected, or its key is gone. The coordinator's side of the board detects this; nobody sends it."""

    id: int


@dataclasses.dataclass(frozen=True)
class Called:
    """Message: the members must rendezvous for `generation`."""

    generation: int
    reason: str
    planned: bool
    deadline: float
    """When a planned call becomes unplanned, in seconds since the epoch."""
    leave_s: float | None = None
    """Seconds from receipt to `deadline`, on the recipient's clock."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """Message: the run is over, and no further world follows."""

    reason: str
    code: int
    """The worker's exit code."""
    end: End = End.UNKNOWN


@dataclasses.dataclass(frozen=True)
class Published:
    """The coordinator's messages. On a socket, each line carries one message."""

    called: Called | None = None
    world: World | None = None
    closed: Closed | None = None
    why: str = ""
    """The coordinator's reason for waiting; published only through etcd."""
