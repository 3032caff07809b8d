"""The peers that a member watches, and the state of each peer. Pure: times arrive as arguments, in seconds of one steady clock.

A broken connection proves nothing: a middlebox resets it, a cable is out for a second. So we reconnect at once, and a peer is
unheard only if that fails: it refuses twice, or does not answer for `patience_s`.

    heard    --lost-->  doubt  --accepted, proven-->  heard
    doubt    --refused twice, or silent for patience_s-->  unheard
    unheard  --proven-->  heard
    any      --left-->  left: the peer said goodbye, and is neither contacted nor reported
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

REFUSALS = 2
"""Number of refusals in a row that prove that the process is gone."""
AGAIN_S, PAUSE_S = 0.1, 0.5
"""Pause before the next attempt: after a refusal, and once the peer is unheard."""
ATTEMPT_S, LATER_S = 0.3, 1.0
"""Timeout of an attempt to connect: in doubt, where each attempt sends a new SYN (the kernel would repeat the first one only
after 1 s), and once the peer is unheard."""


@dataclasses.dataclass
class PeerState:
    """The state of one peer. `since` is the time at which doubt began; None if there is no doubt."""

    since: float | None = None
    patience_s: float = 0.0
    refusals: int = 0
    unheard: str = ""
    """Why the peer is unheard, as the end of a sentence that begins with its name; empty while it is heard."""
    gone: bool = False
    """True if nobody listens at the peer's address: the machine answers, but the process is gone."""
    left: bool = False
    """True if the peer has said goodbye."""

    def doubted(self, now: float, patience_s: float) -> None:
        """Called when there is no connection; if none is established within `patience_s`, the peer is unheard."""
        if self.since is None:
            self.since, self.patience_s = now, patience_s

    def accepted(self) -> None:
        """Called when a kernel has accepted the connection. That ends a doubt, since nothing more comes from a stopped process;
        but an unheard peer must prove its identity first: another process may have the port by now."""
        if not self.unheard:
            self.since = None

    def refused(self) -> None:
        """Called when an attempt was refused, or the accepting process hung up or lacks the key: no member listens there any
        more."""
        self.refusals += 1
        if self.refusals >= REFUSALS:
            self.unheard, self.gone = "refuses connections", True

    def passed(self, now: float) -> None:
        """Called when time has passed without a connection."""
        if self.since is not None and now >= self.ends:
            self.unheard = f"has not answered for {now - self.since:.1f} s after its connection broke"

    def proven(self) -> None:
        """Called when the peer has proven its identity: all doubts are reset."""
        self.since, self.refusals, self.unheard, self.gone = None, 0, "", False

    @property
    def ends(self) -> float:
        """Time at which patience ends; infinite if there is no doubt."""
        return math.inf if self.since is None or self.unheard else self.since + self.patience_s

    @property
    def attempt_s(self) -> float:
        """Timeout of one attempt to connect."""
        return LATER_S if self.unheard else ATTEMPT_S

    @property
    def pause_s(self) -> float:
        """Pause after a failed attempt."""
        return PAUSE_S if self.unheard else AGAIN_S if self.refusals else 0.0


EVERYBODY = 8
"""Maximum size of a world in which every member watches all others."""


def watched(id: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the peers that member `id` watches, in rank order; `members` are in rank order, too.

    In a large world, these are the peers at distance 1 and 2 on both sides, and the opposite peer. If i watches j, j watches i.
    So each member is watched by five or six others, and the ring stays connected whichever two are lost. Opposite peers sit in
    another rack, as the ranks of one rack are mostly neighbours: so a rack that is cut off as a whole is noticed by as many
    members as the rack has.
    """
    if len(members) <= EVERYBODY:
        return tuple(each for each in members if each != id)
    place, size = members.index(id), len(members)
    places = {(place + sign * distance) % size for distance in (1, 2, size // 2) for sign in (1, -1)}
    return tuple(members[each] for each in sorted(places))
