"""The order of samples as a library: the same global batches in every world, without anything else of Outlast."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import order
from outlast.order import BatchSampler, Loader


def world(samples: int, batch: int, ranks: int, *, step: int = 0, **options: int | bool | None) -> list[list[int]]:
    """The rest of an epoch after `step` steps, as global batches: those of all ranks, step by step."""
    samplers = [BatchSampler(samples, batch, rank=rank, ranks=ranks, **options) for rank in range(ranks)]  # type: ignore[arg-type]
    for sampler in samplers:
        sampler.seek(step)
    pieces = [list(sampler) for sampler in samplers]
    each = samplers[0].accumulate
    steps = len(pieces[0]) // each
    return [[index for rank in pieces for piece in rank[n * each : (n + 1) * each] for index in piece] for n in range(steps)]


worlds = st.integers(1, 48).flatmap(lambda batch: st.tuples(st.just(batch), st.sampled_from(order.worlds(batch))))


@given(worlds, st.integers(1, 200), st.integers(1, 8), st.integers(0, 3), st.data())
def test_every_world_gets_the_batches_of_a_world_of_one(
    at: tuple[int, int], samples: int, most: int, seed: int, data: st.DataObject
) -> None:
    batch, ranks = at
    step = data.draw(st.integers(0, -(-samples // batch) - 1))
    alone = world(samples, batch, 1, seed=seed)
    assert world(samples, batch, ranks, most=most, seed=seed, step=step) == alone[step:]
    flat = list(itertools.chain(*alone))
    assert sorted(flat[:samples]) == list(range(samples)), "each sample once"
    assert flat[samples:] == (flat[:samples] * batch)[: len(flat) - samples], "filled up from the beginning of the epoch"


@given(worlds, st.integers(1, 8))
def test_a_plan_shares_the_batch_in_the_largest_micro_batches_that_fit(at: tuple[int, int], most: int) -> None:
    batch, ranks = at
    size, accumulate = order.plan(batch, ranks, most)
    assert size * accumulate * ranks == batch
    assert size <= most
    assert not any(batch // ranks % larger == 0 for larger in range(size + 1, most + 1))


def test_an_epoch_may_leave_out_its_last_batch_and_keep_the_order_of_the_data() -> None:
    assert world(10, 4, 2, shuffle=False, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world(10, 4, 2, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert world(40, 4, 2) != world(40, 4, 2, seed=1)


def test_epochs_differ_and_a_step_is_sought_across_them() -> None:
    sampler = BatchSampler(12, 4)
    first, second = list(sampler), (sampler.set_epoch(1), list(sampler))[1]
    assert first != second
    sampler.seek(4)
    sampler.set_epoch(1)  # as trainers do before each epoch
    assert list(sampler) == second[1:]
    assert len(sampler) == len(first) == 3


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: order.plan(64, 6), r"64 samples cannot be shared equally among 6 ranks; 1, 2, 4, 8, 16, 32, 64 ranks can"),
        (lambda: order.plan(0, 1), r"batch \(0\) must be a whole number of 1 or more"),
        (lambda: order.plan(8, 2, 0), r"most \(0\) must be"),
        (lambda: BatchSampler(0, 4), "a dataset of 0 samples has no batch of 4"),
        (lambda: BatchSampler(3, 4, drop_last=True), "a dataset of 3 samples has no batch of 4"),
        (lambda: BatchSampler(8, 4, rank=2, ranks=2), "rank 2 is not one of 2 ranks, which are counted from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_said(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def loader(ranks: int, rank: int, most: int | None = None) -> Loader:
    return Loader([10 * n for n in range(20)], BatchSampler(20, 4, rank=rank, ranks=ranks, most=most), list)


def test_the_state_of_a_loader_fits_every_world() -> None:
    alone = [value for batch in itertools.islice(loader(1, 0), 12) for value in batch]  # two epochs and more
    two, four = [loader(2, rank, most=1) for rank in range(2)], [loader(4, rank) for rank in range(4)]
    seen = [[next(reader) for reader in readers for _ in range(2)] for readers in [[iter(each) for each in two]] * 7]
    with pytest.raises(ValueError, match="1 of 2 micro-batches into a step"):
        next(iter(two[0])), two[0].state_dict()
    state = two[1].state_dict()
    assert state["steps"] == 7
    for each in four:
        each.load_state_dict(state)
    seen += [[next(reader) for reader in readers] for readers in [[iter(each) for each in four]] * 5]
    assert [value for step in seen for piece in step for value in piece] == alone
    with pytest.raises(ValueError, match="saved with batch=4, and it is 5 now"):
        Loader(list(range(20)), BatchSampler(20, 5), list).load_state_dict(state)


def test_the_file_works_alone_with_numpy(tmp_path: Path) -> None:
    shutil.copy(order.__file__, tmp_path / "order.py")
    program = (
        "import sys, order; print(list(order.BatchSampler(10, 4)), any(name in sys.modules for name in ('outlast', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{list(BatchSampler(10, 4))} False\n"
