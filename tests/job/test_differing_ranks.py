"""Which rank's bits differ, from checksums alone."""

from __future__ import annotations

import pytest

from outlast.job import differing_ranks
from outlast.job.differing_ranks import Copy, differing, share, weight

SAME = {"model/0.weight": 1, "model/1.bias": 2, "optimizer/state/0.weight.exp_avg": 3}


def copy(rank: int, number: int = 0, **changed: int) -> Copy:
    return Copy(rank, rank, f"n{rank}", number, SAME | {name.replace("_", "/0.", 1): value for name, value in changed.items()})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_rank_takes_every_share_once_in_as_many_snapshots_as_its_worker_has_ranks(ranks: int) -> None:
    for turn in range(ranks):
        assert sorted(share(rank, turn, ranks) for rank in range(ranks)) == list(range(ranks))
    assert sorted(share(0, turn, ranks) for turn in range(ranks)) == list(range(ranks))


@pytest.mark.parametrize("workers", [1, 2, 3, 1000])
def test_weighted_checksums_add_up_to_nothing_only_if_all_are_equal(workers: int) -> None:
    equal = [float(weight(worker, workers) * 0xFFFFFFFF) for worker in range(workers)]
    assert sum(equal) == 0
    for odd in {0, workers - 1} if workers > 1 else ():
        assert sum(equal) - equal[odd] + float(weight(odd, workers) * 0xFFFFFFFE) != 0


def test_the_rank_that_differs_from_most_is_named_with_its_place_and_its_tensors() -> None:
    [found] = differing([copy(0), copy(1, model_weight=9), copy(2)])
    assert found.event(120, 116) == {
        "rank": 1,
        "worker": 1,
        "node": "n1",
        "tensors": ("model/0.weight",),
        "copies": 3,
        "agreed": 116,
        "reason": "rank 1 (worker 1, node n1) has other bits than the 2 others in model/0.weight at step 120 "
        "(all were equal at step 116); its memory or its processor may be faulty",
    }
    odd = Copy(2, 2, "", 0, dict.fromkeys(SAME, 7))
    [found] = differing([copy(0), copy(1), odd])
    assert found.sentence(7, 0).startswith(
        "rank 2 (worker 2) has other bits than the 2 others in model/0.weight and 2 more at step 7"
    )


def test_of_two_copies_none_is_named_as_the_wrong_one() -> None:
    [found] = differing([copy(0, model_weight=9), copy(1)])
    assert found.event(5, 0) == {
        "ranks": [0, 1],
        "tensors": ("model/0.weight",),
        "copies": 2,
        "agreed": 0,
        "reason": "rank 0 (worker 0, node n0) and rank 1 (worker 1, node n1) have different bits in model/0.weight at step 5; "
        "with 2 copies it cannot be told which is right",
    }


def test_copies_are_compared_within_their_share_and_several_ranks_are_named() -> None:
    copies = [copy(rank, number=rank % 2) for rank in range(6)]
    assert differing(copies) == []
    copies[1], copies[4] = copy(1, 1, model_weight=8), copy(4, 0, model_weight=9)
    assert sorted(each.ranks[0].rank for each in differing(copies)) == [1, 4]
    assert [each.copies for each in differing(copies)] == [3, 3]
    unread = Copy(0, 0, "n0", 0, {})
    assert [[each.rank for each in found.ranks] for found in differing([unread, copy(2), copy(4, model_weight=9)])] == [[2, 4]]


def test_a_run_goes_back_only_if_it_can_be_told_who_is_wrong_and_not_for_ever() -> None:
    found = differing([copy(0), copy(1, model_weight=9), copy(2)])
    assert differing_ranks.blamed(found) == (1,)
    nobody = differing([copy(3, 1, model_weight=9), copy(4, 1)])
    assert differing_ranks.blamed([*found, *nobody]) == differing_ranks.blamed([]) == ()
    assert not differing_ranks.stuck(40, [(1, 40)])
    assert not differing_ranks.stuck(41, [(1, 40), (2, 40)])
    assert differing_ranks.stuck(40, [(1, 20), (2, 40), (3, 41)])


def test_the_notice_names_rank_and_place() -> None:
    assert differing_ranks.notice(1, 120, "worker 1, node b") == (
        "rank 1 (worker 1, node b) has other bits than other ranks since step 120; `outlast report` and its log name the tensors"
    )
