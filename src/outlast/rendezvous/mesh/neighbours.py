"""Whom each member of a world watches."""

from __future__ import annotations

from collections.abc import Sequence

EVERYBODY = 8
"""Worlds up to this size: everybody watches everybody."""


def watched(id: int, members: Sequence[int]) -> tuple[int, ...]:
    """The peers that member `id` watches, in rank order; `members` are in rank order, too.

    In a large world: those at distance 1 and 2 on both sides, and those opposite. If i watches j, j watches i. So each member is
    watched by five or six others, and the ring stays connected whichever two are lost. Those opposite sit in another rack, as the
    ranks of one rack are mostly neighbours: a rack that is cut off as a whole is noticed by as many as it has members.
    """
    if len(members) <= EVERYBODY:
        return tuple(each for each in members if each != id)
    place, size = members.index(id), len(members)
    places = {(place + sign * distance) % size for distance in (1, 2, size // 2) for sign in (1, -1)}
    return tuple(members[each] for each in sorted(places))
