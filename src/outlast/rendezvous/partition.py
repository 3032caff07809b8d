"""Decides which members of a partitioned world are lost. Pure.

Members watch each other (`rendezvous.mesh`) and report unresponsive peers as *unheard*. A pair of members is *broken* if one does
not hear the other. A broken pair stops training because every step needs every pair. `decide` picks the members to remove so that
no broken pair remains:

1. Members whose machines refuse connections are removed at once.
2. If the members form sides that do not hear each other, one side stays. A side with more than half of the members stays at once
if it has shown a sign of life. Otherwise all live members have AGREE_S to report, then the largest side with a sign of life stays
(ties: the side with the lowest rank).
3. Of a pair in that side that is still broken after PATIENCE_S, the member with more broken pairs is removed (ties: the higher
rank).

Before a minority removes a silent majority, all members are called (`ask`), and members that do not answer within CONFIRM_S are
lost. If no member hears any other, the mesh is at fault, and no member is lost. See docs/decisions/0040-partitions.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outlast.base.clock import until
from outlast.rendezvous.mesh import watched_peers

AGREE_S = 1.0
"""Maximum delay, in seconds, between reports of one partition."""
PATIENCE_S = 2.0
"""Seconds for which a single broken pair is tolerated, because its connection may recover."""
CONFIRM_S = 2.0
"""Timeout, in seconds, for an unheard majority to answer a call."""
HELD_S, LONGEST_HELD_S = 10.0, 300.0
"""Seconds for which a member is kept out of worlds after its first loss, doubled by each further loss, and the maximum."""
FORGIVEN_S = 600.0
"""Seconds without a loss after which a member's next loss counts as its first."""

Pair = frozenset[int]


@dataclass(frozen=True)
class View:
    """One member's report about its peers in the current world."""

    unheard: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """The subset of `unheard` whose processes have ended."""
    noticed: float = 0.0
    """When `unheard` last grew."""
    answers: bool = False
    """True if the member has stopped its processes and waits, so it is alive."""

    @property
    def speaks(self) -> bool:
        """True if the member has shown a sign of life since a pair broke."""
        return bool(self.unheard) or self.answers


@dataclass(frozen=True)
class Verdict:
    """The members that are lost."""

    lost: tuple[int, ...] = ()
    """Silent members and members of removed sides, in rank order."""
    gone: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    """Remaining members that do not hear the members to remove; empty if only the latter reported silent peers."""
    ask: tuple[int, ...] = ()
    """The majority, if any, that a minority does not hear: all members must be called, to find out which members answer."""
    look_again: float | None = None
    """When the verdict may change without new reports."""

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.lost, *self.gone)


@dataclass(frozen=True)
class Loss:
    """A member's most recent loss in a partition."""

    at: float
    times: int = 1
    reason: str = ""
    held: bool = True
    """True if the member is kept out of worlds; False once a world has needed it anyway."""

    def again(self, at: float, reason: str) -> Loss:
        """Return the record of this member's next loss."""
        return Loss(at, self.times + 1 if at - self.at < FORGIVEN_S else 1, reason)

    @property
    def held_s(self) -> float:
        """Seconds for which the member is kept out of worlds."""
        return 0.0 if not self.held else min(LONGEST_HELD_S, HELD_S * 2 ** min(self.times - 1, 16))


def decide(ranks: Sequence[int], views: Mapping[int, View], now: float, *, called_at: float | None = None) -> Verdict:
    """Return the lost members of a world.

    `ranks` are the world's members in rank order. Members without a view are ignored: they have ended or no longer need peers.
    `called_at` is the time of a pending unplanned call.
    """
    here = [id for id in ranks if id in views]
    broken = _broken(here, views)
    watched = {pair for pair in _watched(ranks) if pair <= views.keys()} if broken else set()
    if not broken or (len(here) > 2 and watched <= broken.keys()):
        return Verdict()
    gone = _gone(here, views)
    rest = [id for id in here if id not in gone]
    sides = _sides(rest, broken, watched)
    stay, waits_until, ask = _staying(rest, sides, views, called_at, now)
    ends = [waits_until]
    if waits_until is None and not ask:
        lost = set(rest) - stay
        within = {pair: until(at, PATIENCE_S, now) for pair, at in broken.items() if pair <= stay}
        ends = [*within.values()]
        lost |= _cover([id for id in rest if id in stay], [pair for pair, end in within.items() if end is None])
    else:
        lost = set()
    out = lost | gone or set(ask)
    by = tuple(id for id in here if id not in out and out & set(views[id].unheard))
    return Verdict(
        tuple(id for id in here if id in lost),
        tuple(id for id in here if id in gone),
        by,
        ask,
        min((end for end in ends if end is not None), default=None),
    )


def _broken(ranks: Sequence[int], views: Mapping[int, View]) -> dict[Pair, float]:
    members, since = set(ranks), dict[Pair, float]()
    for id in ranks:
        for peer in members.intersection(views[id].unheard) - {id}:
            pair = frozenset((id, peer))
            since[pair] = min(views[id].noticed, since.get(pair, math.inf))
    return since


def _watched(ranks: Sequence[int]) -> set[Pair]:
    places = range(len(ranks))
    return {frozenset((ranks[one], ranks[other])) for one in places for other in watched_peers.watched(one, places)}


def _gone(ranks: Sequence[int], views: Mapping[int, View]) -> set[int]:
    """Return silent members whose machines refuse connections. In a world of more than two members, returns none if half or more
    of them are silent, because one member may be wrong about all others."""
    refused = {peer for id in ranks for peer in views[id].refused}
    gone = {id for id in ranks if id in refused and not views[id].speaks}
    return gone if 2 * len(gone) < len(ranks) or len(ranks) == 2 else set()


def _sides(rest: Sequence[int], broken: Iterable[Pair], watched: Iterable[Pair]) -> list[set[int]]:
    """Return groups of members that hear each other. Members connected by unbroken watched pairs form a group. Groups without a
    broken pair between them are merged, because not all members of a large world watch each other."""
    side, broken = {id: {id} for id in rest}, set(broken)
    for pair in set(watched) - broken:
        one, other = (side.get(id) for id in pair)
        if one is not None and other is not None and one is not other:
            one |= other
            side.update(dict.fromkeys(other, one))
    place = {id: rank for rank, id in enumerate(rest)}
    parts = {id(each): each for each in side.values()}.values()
    groups: list[set[int]] = []
    for part in sorted(parts, key=lambda part: (-len(part), min(place[each] for each in part))):
        for group in groups:
            if not any(pair & part and pair & group for pair in broken):
                group |= part
                break
        else:
            groups.append(part)
    return groups


def _staying(
    rest: Sequence[int], sides: Sequence[set[int]], views: Mapping[int, View], called_at: float | None, now: float
) -> tuple[set[int], float | None, tuple[int, ...]]:
    """Return the side that stays (empty while undecided), the time at which to decide again, and the members to call first, if
    any."""
    if len(sides) < 2:
        return set(rest), None, ()
    speaks = [any(views[id].speaks for id in side) for side in sides]
    most = [side for side, spoken in zip(sides, speaks, strict=True) if spoken and 2 * len(side) > len(rest)]
    if most:
        return most[0], None, ()
    open_until = max((until(views[id].noticed, AGREE_S, now) or now for id in rest if views[id].unheard), default=now)
    if open_until > now:
        return set(), open_until, ()
    spoken = [side for side, spoken in zip(sides, speaks, strict=True) if spoken]
    stay = max(spoken, key=lambda side: (len(side), -min(rest.index(id) for id in side)))
    silent = [side for side in sides if 2 * len(side) > len(rest)]
    if silent:
        if called_at is None:
            return stay, None, tuple(id for id in rest if id in silent[0])
        if (answered := until(called_at, CONFIRM_S, now)) is not None:
            return set(), answered, ()
    return stay, None, ()


def _cover(ranks: Sequence[int], broken: Iterable[Pair]) -> set[int]:
    """Return a greedy vertex cover of the broken pairs; in a tie, the highest rank is chosen."""
    left, cover = set(broken), set[int]()
    place = {id: rank for rank, id in enumerate(ranks)}
    while left:
        counts: dict[int, int] = {}
        for id in itertools.chain.from_iterable(left):
            counts[id] = counts.get(id, 0) + 1
        worst = max(counts, key=lambda id: (counts[id], place[id]))
        cover.add(worst)
        left = {pair for pair in left if worst not in pair}
    return cover
