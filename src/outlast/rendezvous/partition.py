"""Which members of a world are lost when some of them do not hear others. Pure.

Members watch one another (`rendezvous.mesh`) and report whom they do not hear. A pair of which one does not hear the other is
*broken*: training stands still, as every step needs every pair. `judged` says which members go so that no broken pair is left:

1. Whose process is gone, as its machine refuses connections: at once.
2. The members fall into sides that do not hear each other. The one with more than half of them stays, at once; without such a
   one, after AGREE_S, in which all that live report as well: the largest from which anybody speaks, of equal ones that of rank 0.
3. A pair that is broken within a side: after PATIENCE_S the member of more broken pairs goes, of two alike the higher rank.

A minority never has a silent majority removed by its word alone: all are called together first (`ask`), and those that do not
answer in CONFIRM_S are lost. And where each member hears nobody, the mesh is at fault (a port is blocked), and nobody is lost.
Docs: docs/decisions/0040-partitions.md. Called by `rendezvous.world`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outlast.base.clock import until
from outlast.rendezvous.mesh import hearing

AGREE_S = 1.0
"""How long reports of one partition may be apart: all ends of a link notice within half a second, then reports travel."""
PATIENCE_S = 2.0
"""How long a pair may be broken that both hear the others: it may heal, or the others' reports may be late."""
CONFIRM_S = 2.0
"""How long a majority that is not heard may take to answer a call."""
HELD_S, LONGEST_HELD_S = 10.0, 300.0
"""How long a member that was lost so is kept out of worlds: doubled with each loss up to the second."""
FORGIVEN_S = 600.0
"""A loss this long after the one before it is a first one again."""

Pair = frozenset[int]


@dataclass(frozen=True)
class View:
    """What one member reports of the world that it trains in."""

    unheard: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """Those of `unheard` whose process is gone."""
    noticed: float = 0.0
    """When `unheard` grew last."""
    answers: bool = False
    """Whether it has stopped its processes and waits: it lives."""

    @property
    def speaks(self) -> bool:
        """Whether it shows that it has lived after the break."""
        return bool(self.unheard) or self.answers


@dataclass(frozen=True)
class Verdict:
    """Who is lost."""

    lost: tuple[int, ...] = ()
    """Silent, or on a side that does not stay; in rank order."""
    gone: tuple[int, ...] = ()
    """Their processes have ended."""
    by: tuple[int, ...] = ()
    """Of those that stay who does not hear them; empty when only the lost do not hear those that stay."""
    ask: tuple[int, ...] = ()
    """A majority that a minority does not hear: call all together, to see who answers."""
    look_again: float | None = None
    """When there will be more to say, whatever is reported until then."""

    @property
    def out(self) -> tuple[int, ...]:
        """All without whom training goes on."""
        return (*self.lost, *self.gone)


@dataclass(frozen=True)
class Loss:
    """A member that was lost so, and when."""

    at: float
    times: int = 1
    """How often in a row."""
    reason: str = ""
    held: bool = True
    """False once it was needed for a world all the same."""

    def again(self, at: float, reason: str) -> Loss:
        """Its next loss."""
        return Loss(at, self.times + 1 if at - self.at < FORGIVEN_S else 1, reason)

    @property
    def held_s(self) -> float:
        """How long it is kept out of worlds."""
        return 0.0 if not self.held else min(LONGEST_HELD_S, HELD_S * 2 ** min(self.times - 1, 16))


def written(lost: Mapping[int, Loss], now: float) -> tuple[tuple[int, float, int], ...]:
    """Losses for the next coordinator: of each member that is kept out the id, the seconds since then, and how often in a row."""
    return tuple((id, now - loss.at, loss.times) for id, loss in lost.items() if loss.held)


def read(said: Iterable[tuple[int, float, int]], now: float) -> dict[int, Loss]:
    """The reverse of `written`."""
    return {id: Loss(now - ago_s, times) for id, ago_s, times in said}


def judged(ranks: Sequence[int], views: Mapping[int, View], now: float, *, asked: float | None = None) -> Verdict:
    """Who of a world is lost, by what its members report of it.

    `ranks` are its members in rank order; nothing is said of those without a view: they are known to be gone, or need no peers
    any more. `asked` is when an unplanned call went out to all, if one has.
    """
    here = [id for id in ranks if id in views]
    broken = _broken(here, views)
    watched = {pair for pair in _watched(ranks) if pair <= views.keys()} if broken else set()
    if not broken or (len(here) > 2 and watched <= broken.keys()):
        return Verdict()
    gone = _gone(here, views)
    rest = [id for id in here if id not in gone]
    sides = _sides(rest, broken, watched)
    stay, waits_until, ask = _staying(rest, sides, views, asked, now)
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
    """The broken pairs, each with the time at which it was reported first."""
    members, found = set(ranks), dict[Pair, float]()
    for id in ranks:
        for peer in members.intersection(views[id].unheard) - {id}:
            pair = frozenset((id, peer))
            found[pair] = min(views[id].noticed, found.get(pair, math.inf))
    return found


def _watched(ranks: Sequence[int]) -> set[Pair]:
    """The pairs that watch each other."""
    places = range(len(ranks))
    return {frozenset((ranks[one], ranks[other])) for one in places for other in hearing.watched(one, places)}


def _gone(ranks: Sequence[int], views: Mapping[int, View]) -> set[int]:
    """Members whose process is gone: refused, and without a word. More than some is for the sides to decide: it may be one that
    errs about all others."""
    refused = {peer for id in ranks for peer in views[id].refused}
    found = {id for id in ranks if id in refused and not views[id].speaks}
    return found if 2 * len(found) < len(ranks) or len(ranks) == 2 else set()


def _sides(rest: Sequence[int], broken: Iterable[Pair], watched: Iterable[Pair]) -> list[set[int]]:
    """The members in groups that hear each other: connected by pairs that watch each other and are whole. Groups of which no pair
    is broken belong together: in a large world they may be ones that do not watch each other."""
    side, broken = {id: {id} for id in rest}, set(broken)
    for pair in set(watched) - broken:
        one, other = (side.get(id) for id in pair)
        if one is not None and other is not None and one is not other:
            one |= other
            side.update(dict.fromkeys(other, one))
    place = {id: rank for rank, id in enumerate(rest)}
    parts = {id(each): each for each in side.values()}.values()
    found: list[set[int]] = []
    for part in sorted(parts, key=lambda part: (-len(part), min(place[each] for each in part))):
        for group in found:
            if not any(pair & part and pair & group for pair in broken):
                group |= part
                break
        else:
            found.append(part)
    return found


def _staying(
    rest: Sequence[int], sides: Sequence[set[int]], views: Mapping[int, View], asked: float | None, now: float
) -> tuple[set[int], float | None, tuple[int, ...]]:
    """The side that stays; until when that is open; and whom to ask first whether they live."""
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
        if asked is None:
            return stay, None, tuple(id for id in rest if id in silent[0])
        if (answered := until(asked, CONFIRM_S, now)) is not None:
            return set(), answered, ()
    return stay, None, ()


def _cover(ranks: Sequence[int], broken: Iterable[Pair]) -> set[int]:
    """Members without whom no broken pair is left, the one of most broken pairs first, of several the highest rank."""
    left, found = set(broken), set[int]()
    place = {id: rank for rank, id in enumerate(ranks)}
    while left:
        counts: dict[int, int] = {}
        for id in itertools.chain.from_iterable(left):
            counts[id] = counts.get(id, 0) + 1
        worst = max(counts, key=lambda id: (counts[id], place[id]))
        found.add(worst)
        left = {pair for pair in left if worst not in pair}
    return found
