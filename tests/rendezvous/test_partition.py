"""Who of a world is lost when some members do not hear others: what is judged in which situation, and what always holds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.rendezvous import partition
from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.partition import Loss, Verdict, View

NOW = 1000.0


def views(size: int, unheard: Mapping[int, tuple[int, ...]], *, refused=(), at=NOW, answers=()) -> dict[int, View]:
    """What each of so many members reports, at the same time."""
    found = {}
    for id in range(size):
        peers = unheard.get(id, ())
        found[id] = View(peers, tuple(peer for peer in peers if peer in refused), at, id in answers)
    return found


def judged(size: int, unheard: Mapping[int, tuple[int, ...]], *, after=0.0, asked=None, **how) -> Verdict:
    return partition.decide(range(size), views(size, unheard, **how), NOW + after, called_at=asked)


def cut(size: int, *sides: set[int]) -> dict[int, tuple[int, ...]]:
    """What members report between which nothing passes, if all of them live."""
    where = {id: number for number, side in enumerate(sides) for id in side}
    return {
        id: tuple(peer for peer in watched_peers.watched(id, range(size)) if where[peer] != where[id])
        for id in range(size)
        if len(sides) > 1
    }


SITUATIONS: dict[str, tuple[Verdict, Verdict]] = {
    "all hear each other": (judged(4, {}), Verdict()),
    "the others agree": (judged(3, {0: (2,), 1: (2,)}), Verdict(lost=(2,), by=(0, 1))),
    "one does not hear another": (judged(3, {0: (2,)}), Verdict(look_again=NOW + 2)),
    "one does not hear another, and nobody follows": (judged(3, {0: (2,)}, after=2), Verdict(lost=(2,), by=(0,))),
    "an address refuses": (judged(3, {0: (1,)}, refused=(1,)), Verdict(gone=(1,), by=(0,))),
    "an address refuses in a world of two": (judged(2, {1: (0,)}, refused=(0,)), Verdict(gone=(0,), by=(1,))),
    "all the others may be dead": (judged(4, {3: (0, 1, 2)}), Verdict(look_again=NOW + 1)),
    "one-way loss": (judged(4, {3: (0, 1, 2), 1: (3,)}), Verdict(lost=(3,), by=(1,))),
    "a broken pair": (judged(3, {0: (1,), 1: (0,)}, after=2), Verdict(lost=(1,), by=(0,))),
    "two broken pairs of one": (judged(4, {0: (1, 2)}, after=2), Verdict(lost=(0,))),
    "a silent majority": (judged(3, {2: (0, 1)}, after=1), Verdict(by=(2,), ask=(0, 1))),
    "a majority that is called": (judged(3, {2: (0, 1)}, after=1, asked=NOW + 1), Verdict(look_again=NOW + 3)),
    "a majority that does not answer": (judged(3, {2: (0, 1)}, after=3, asked=NOW + 1), Verdict(lost=(0, 1), by=(2,))),
    "a majority that answers": (judged(3, {2: (0, 1)}, after=2, asked=NOW + 1, answers=(0, 1)), Verdict(lost=(2,))),
    "nobody hears anybody": (judged(4, cut(4, *({id} for id in range(4))), after=60), Verdict()),
    "nobody hears anybody in a large world": (judged(12, cut(12, *({id} for id in range(12))), after=60), Verdict()),
    "members without a report": (partition.decide(range(4), {id: View((3,), (), NOW) for id in range(2)}, NOW + 60), Verdict()),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_who_is_lost(situation: str):
    found, verdict = SITUATIONS[situation]
    assert found == verdict


@pytest.mark.parametrize(
    ("size", "sides", "lost"), [(4, ({0, 1}, {2, 3}), (2, 3)), (5, ({0, 1}, {2, 3, 4}), (0, 1)), (2, ({0}, {1}), (1,))]
)
def test_of_two_sides_the_larger_stays_or_that_of_rank_0(size: int, sides, lost: tuple[int, ...]):
    stay = tuple(id for id in range(size) if id not in lost)
    assert judged(size, cut(size, *sides), after=1) == Verdict(lost=lost, by=stay)


def test_a_side_without_a_majority_waits_for_the_reports_of_the_other():
    half = cut(4, {0, 1}, {2, 3})
    first = {id: half[id] for id in (2, 3)}
    assert judged(4, first) == Verdict(look_again=NOW + 1)
    assert judged(4, first, after=1) == Verdict(lost=(0, 1), by=(2, 3))  # they say nothing: they are dead


def test_in_a_large_world_sides_are_those_that_hear_each_other():
    size = 24
    one = judged(size, cut(size, {7}, set(range(size)) - {7}))
    assert (one.lost, one.by) == ((7,), watched_peers.watched(7, range(size)))
    even, odd = set(range(0, size, 2)), set(range(1, size, 2))
    assert judged(size, cut(size, even, odd), after=1).lost == tuple(sorted(odd))
    thirds = [set(range(first, size, 3)) for first in range(3)]
    assert judged(size, cut(size, *thirds), after=1).lost == tuple(sorted(thirds[1] | thirds[2]))


def test_a_member_that_is_lost_again_and_again_is_kept_out_for_longer():
    loss = Loss(0.0)
    for held in (10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0):
        assert loss.held_s == held
        loss = loss.again(loss.at + held, "")
    assert loss.again(loss.at + 600, "").held_s == 10.0


SIZES = st.integers(2, 14)


@st.composite
def partitions(draw) -> tuple[int, list[set[int]], set[int]]:
    """A world in parts that do not hear each other, and who of it is dead."""
    size = draw(SIZES)
    parts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    sides = [{id for id, part in enumerate(parts) if part == number} for number in set(parts)]
    return size, sides, draw(st.sets(st.integers(0, size - 1), max_size=size - 1))


@given(partitions())
@example((3, [{0, 1, 2}], {0, 1}))
@example((5, [{0, 1, 2}, {3, 4}], {0, 1, 2}))
def test_what_stays_hears_itself_and_never_are_all_lost(found):
    size, sides, dead = found
    where = {id: number for number, side in enumerate(sides) for id in side}
    silent = {
        id: tuple(peer for peer in watched_peers.watched(id, range(size)) if peer in dead or where[peer] != where[id])
        for id in range(size)
        if id not in dead
    }
    alive = tuple(id for id in range(size) if id not in dead)
    last = judged(size, silent, after=60, asked=NOW, answers=alive)
    stay = set(range(size)) - set(last.lost) - set(last.gone)
    assert stay
    assert not last.ask
    if last != Verdict():
        assert stay & set(alive)
        assert all(not stay & set(silent[id]) for id in stay & set(alive))
        assert last.look_again is None


@st.composite
def tales(draw) -> tuple[int, dict[int, View]]:
    """Any reports whatever."""
    size = draw(SIZES)
    ids = st.integers(0, size - 1)
    found = {}
    for id in range(size):
        unheard = draw(st.lists(ids.filter(lambda peer, id=id: peer != id), unique=True, max_size=4))
        refused = tuple(peer for peer in unheard if draw(st.booleans()))
        found[id] = View(tuple(unheard), refused, draw(st.sampled_from([NOW - 3, NOW - 1, NOW])), draw(st.booleans()))
    return size, found


@given(tales(), st.randoms(use_true_random=False), st.sampled_from([None, NOW - 5, NOW]))
def test_any_order_of_reports_is_judged_alike_and_not_all_are_lost(tale, random, asked):
    size, found = tale
    before = partition.decide(range(size), found, NOW, called_at=asked)
    shuffled = list(found.items())
    random.shuffle(shuffled)
    assert partition.decide(range(size), dict(shuffled), NOW, called_at=asked) == before
    out = {*before.lost, *before.gone}
    assert len(out) < size
    assert not set(before.lost) & set(before.gone)
    assert before.look_again is None or before.look_again > NOW


@given(st.integers(3, 14), st.data())
def test_one_liar_never_costs_a_majority(size, data):
    liar = data.draw(st.integers(0, size - 1))
    others = [id for id in range(size) if id != liar]
    named = tuple(data.draw(st.lists(st.sampled_from(others), unique=True)))
    refused = data.draw(st.sets(st.sampled_from(others)))
    asked = None
    for after in (0.0, 1.0, 2.0, 3.0, 60.0):
        answers = others if asked is not None and after > asked else []
        found = judged(
            size, {liar: named}, refused=refused, after=after, asked=None if asked is None else NOW + asked, answers=answers
        )
        asked = after if found.ask and asked is None else asked
        assert 2 * len({*found.lost, *found.gone}) < size
