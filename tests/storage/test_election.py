"""Which snapshot counts, whatever is lost: the newest whole one, never a mixture, never an older one than can be had."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outlast.storage.snapshots import newest_snapshot, replicas
from outlast.storage.snapshots.newest_snapshot import Held
from outlast.storage.snapshots.part_format import Part
from outlast.storage.snapshots.replicas import Place


def a_part(rank: int = 0, kind: str = "unique", **fields: object) -> Part:
    """A part of step 5 of a world of two workers with a rank each."""
    base = Part(
        "r", 2, 5, world=2, rank=rank, worker=rank, local_rank=0, local_ranks=1, kind="unique", bytes=8, digest="00000000"
    )
    return dataclasses.replace(base, **{"kind": kind, **fields})  # type: ignore[arg-type]


def whole(**fields: object) -> list[Held]:
    """All parts of a snapshot, each at its worker."""
    return [Held(a_part(rank, kind, **fields), f"w{rank}:1") for rank in range(2) for kind in ("unique", "shared")]


def steps(found: newest_snapshot.Election) -> list[tuple[int, int]]:
    return [each.at for each in found.candidates]


def test_the_newest_whole_snapshot_wins_and_the_reason_why_a_newer_one_does_not_is_given():
    lost = [each for each in whole(step=6) if (each.part.rank, each.part.kind) != (1, "unique")]
    found = newest_snapshot.newest([*whole(), *lost, *whole(step=4)], "r", 2)
    assert steps(found) == [(2, 5), (2, 4)]
    assert found.reasons == ("the snapshot of step 6 (generation 2) lacks what rank 1 of 2 alone had",)


def test_one_worker_with_all_that_every_rank_had_is_enough():
    held = [each for each in whole() if (each.part.rank, each.part.kind) != (0, "shared")]
    [candidate] = newest_snapshot.newest(held, "r", 2).candidates
    assert [part.rank for part in candidate.parts] == [0, 1, 1]
    none = [each for each in held if each.part.kind != "shared"]
    assert newest_snapshot.newest(none, "r", 2).reasons == (
        "the snapshot of step 5 (generation 2) lacks a whole set of what all ranks had",
    )


def test_another_run_and_a_later_generation_do_not_count():
    found = newest_snapshot.newest([*whole(run="other"), *whole(generation=3)], "r", 2)
    assert steps(found) == []
    assert found.reasons == (
        "generation 3 is not over: its snapshot of step 5 is not for 2",
        "run other is another run than r: its snapshot of step 5 does not count",
    )


def test_a_replica_that_differs_from_its_original_is_left_out_and_two_that_differ_are_nobodys():
    lie = Held(a_part(1, replica=True, digest="ffffffff"), "w0:1")
    [candidate] = newest_snapshot.newest([*whole(), lie], "r", 2).candidates
    assert [each.address for each in candidate.unique[1]] == ["w1:1"]
    other = Held(a_part(1, replica=True), "w2:1")
    rest = [each for each in whole() if each.address == "w0:1"]
    reason = "the snapshot of step 5 (generation 2) is there in two versions of what rank 1 alone had"
    assert newest_snapshot.newest([*rest, lie, other], "r", 2).reasons == (reason,)


_SNAPSHOTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.sampled_from("ab")), min_size=1, max_size=3, unique=True)


@given(st.data(), st.integers(1, 4), _SNAPSHOTS, st.integers(0, 2))
def test_whatever_is_lost_the_newest_whole_snapshot_wins_and_is_never_a_mixture(data, workers, snapshots, count):
    places = [Place(f"w{worker}", node=f"n{worker % 3}") for worker in range(workers)]
    to = replicas.holders(places, count)
    held, world = [], 2 * workers
    for generation, step, session in snapshots:
        for rank in range(world):
            worker, local_rank = divmod(rank, 2)
            of = Part("r", generation, step, world, rank, worker, local_rank, 2, "unique", 8, 1, "0" * 8, session=session)
            held += [Held(of, f"w{worker}"), Held(dataclasses.replace(of, kind="shared"), f"w{worker}")]
            held += [Held(dataclasses.replace(of, replica=True), peer) for peer in to[worker]]
    left = data.draw(st.lists(st.sampled_from(held), unique_by=id))
    generation = data.draw(st.integers(1, 3))

    def reachable(at: tuple[int, int], session: str) -> bool:
        there = [each.part for each in left if each.part.at == at and each.part.session == session]
        sets = [{p.local_rank for p in there if p.kind == "shared" and p.worker == w} for w in range(workers)]
        return {p.rank for p in there if p.kind == "unique"} == set(range(world)) and {0, 1} in sets

    found = newest_snapshot.newest(left, "r", generation)
    expected = sorted({(g, s) for g, s, session in snapshots if g <= generation and reachable((g, s), session)}, reverse=True)
    assert list(dict.fromkeys(steps(found))) == expected
    for candidate in found.candidates:
        assert len({(*part.at, part.session, part.world) for part in candidate.parts}) == 1
        assert len(candidate.unique) == world
        assert all(each in left for holders in (*candidate.unique, *candidate.shared[0]) for each in holders)


def kept(to: list[tuple[str, ...]]) -> Counter[str]:
    """How many replicas each worker keeps."""
    return Counter(address for those in to for address in those)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=12), st.integers(0, 3))
def test_nobody_keeps_more_than_a_fair_share_and_nobody_lacks_a_replica_that_another_could_keep(places, count):
    workers = [Place(f"w{n}" if has else "", f"n{node}", f"z{zone}") for n, (node, zone, has) in enumerate(places)]
    to = replicas.holders(workers, count)
    holders = [place.address for place in workers if place.address]
    wanted = [min(count, len(holders) - bool(place.address)) for place in workers]
    assert [len(set(those)) for those in to] == wanted
    assert not any(place.address in those for place, those in zip(workers, to, strict=True))
    assert max(kept(to).values(), default=0) <= -(-sum(wanted) // max(1, len(holders)))
    assert to == replicas.holders(workers, count)


@given(st.integers(2, 4), st.integers(1, 4), st.booleans())
def test_replicas_lie_on_other_nodes_and_in_other_zones_where_these_are_alike(nodes, each, dealt):
    node = [n % nodes if dealt else n // each for n in range(nodes * each)]
    workers = [Place(f"w{n}", f"n{node[n]}", f"z{2 * node[n] // nodes}") for n in range(nodes * each)]
    for place, (address,) in zip(workers, replicas.holders(workers, 1), strict=True):
        other = workers[int(address[1:])]
        assert other.node != place.node
        assert other.zone != place.zone or nodes == 3


def test_workers_that_are_most_of_a_node_keep_each_others_replicas_as_the_rest_has_no_room():
    to = replicas.holders([Place(f"w{n}", f"n{n // 7}") for n in range(8)], 1)
    assert set(kept(to).values()) == {1}
    assert [those for those in to if those == ("w7",)] == [("w7",)]


def test_neighbours_have_their_replicas_far_from_each_other_and_everybody_keeps_as_much():
    workers = [Place(f"w{n}", f"n{n}") for n in range(6)]
    to = replicas.holders(workers, 1)
    assert to == [("w3",), ("w4",), ("w5",), ("w0",), ("w1",), ("w2",)]
    zones = [Place(f"w{n}", f"n{n // 2}", "ab"[n // 4]) for n in range(8)]
    assert all(int(those[0][1:]) // 4 != n // 4 for n, those in enumerate(replicas.holders(zones, 1)))
    assert set(kept(replicas.holders(zones, 2)).values()) == {2}
    assert replicas.holders([Place("w0"), Place("")], 1) == [(), ("w0",)], "a worker without memory keeps nothing"
