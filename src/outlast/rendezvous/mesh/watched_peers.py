"""The peers that a member watches, and the state of each peer. Pure: times are arguments, in seconds on one steady clock.

A broken connection alone proves nothing, because a middlebox may have reset it. So we reconnect at once, and a peer becomes
unheard only if it refuses twice or does not answer for `patience_s`.

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
"""Number of consecutive refusals that prove that the process has ended."""
AGAIN_S, PAUSE_S = 0.1, 0.5
"""Pauses in seconds before reconnecting: after a refusal, and once the peer is unheard."""
ATTEMPT_S, LATER_S = 0.3, 1.0
"""Timeouts in seconds for connecting: while the peer is in doubt, and once it is unheard. `ATTEMPT_S` is short because the kernel
would repeat a SYN only after 1 s."""


@dataclasses.dataclass
class PeerState:
    """The state of one peer. `since` is when the peer came into doubt; None if it is not in doubt."""

    since: float | None = None
    patience_s: float = 0.0
    refusals: int = 0
    unheard: str = ""
    """Why the peer is unheard, as a predicate for the peer's name; empty while the peer is heard."""
    gone: bool = False
    """True if the peer's machine refuses connections, so its process has ended."""
    left: bool = False

    def doubted(self, now: float, patience_s: float) -> None:
        """Record a missing connection. The peer becomes unheard unless it accepts a connection within `patience_s`."""
        if self.since is None:
            self.since, self.patience_s = now, patience_s

    def accepted(self) -> None:
        """Record that the peer's kernel has accepted a connection, which ends any doubt. An unheard peer must also prove its
        identity, because another process may have its port."""
        if not self.unheard:
            self.since = None

    def refused(self) -> None:
        """Record that no member listens at the address: the connection was refused, or the process that accepted it disconnected
        or lacks the key."""
        self.refusals += 1
        if self.refusals >= REFUSALS:
            self.unheard, self.gone = "refuses connections", True

    def passed(self, now: float) -> None:
        if self.since is not None and now >= self.ends:
            self.unheard = f"has not answered for {now - self.since:.1f} s after its connection broke"

    def proven(self) -> None:
        self.since, self.refusals, self.unheard, self.gone = None, 0, "", False

    @property
    def ends(self) -> float:
        """Time at which a peer in doubt becomes unheard; infinite for other peers."""
        return math.inf if self.since is None or self.unheard else self.since + self.patience_s

    @property
    def attempt_s(self) -> float:
        return LATER_S if self.unheard else ATTEMPT_S

    @property
    def pause_s(self) -> float:
        return PAUSE_S if self.unheard else AGAIN_S if self.refusals else 0.0


EVERYBODY = 8
"""Maximum size of a world in which every member watches all others."""
SMALL = 64
"""Maximum size of a world in which every member knows the addresses of all others."""


def watched(id: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the peers that member `id` watches. `members` and the result are in rank order.

    In a large world, these are the peers at distance 1 and 2 on both sides, so the ring stays connected if any two members are
    lost, and the opposite peer, which is probably in another rack. Watching is mutual.
    """
    if len(members) <= EVERYBODY:
        return tuple(each for each in members if each != id)
    place, size = members.index(id), len(members)
    places = {(place + sign * distance) % size for distance in (1, 2, size // 2) for sign in (1, -1)}
    return tuple(members[each] for each in sorted(places))


def known(id: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the peers whose addresses member `id` needs: those that it watches, and rank 0, which leads attempts. Rank 0, and
    every member of a small world, needs all addresses."""
    if id == members[0] or len(members) <= SMALL:
        return tuple(each for each in members if each != id)
    return tuple(dict.fromkeys((members[0], *watched(id, members))))
