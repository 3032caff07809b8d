"""The order of samples, of arrays and of prepared data in shards; who gets which, and positions that survive anything."""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.order import Windows
from outlast.training import Batch, Shards, Stream
from outlast.training.data_waits import Stalls
from outlast.training.samples.stream import permuted, share_of
from texts import a_text


def a_stream(samples: int = 100, batch: int = 16, **options: Any) -> Stream:
    return Stream((np.arange(samples), np.arange(samples) % 7), batch, **{"prefetch": 0, **options})


def of_all_ranks(streams: list[Stream]) -> Iterator[list[Batch]]:
    """The batches of all ranks, step by step; every rank has a stream of its own."""
    return map(list, zip(*(stream.batches(rank, len(streams)) for rank, stream in enumerate(streams)), strict=True))


# The order


def test_the_order_is_the_same_for_ever():
    assert permuted(np.arange(10), 10, seed=0, epoch=0).tolist() == [2, 0, 8, 7, 6, 3, 4, 1, 9, 5]
    assert permuted(np.arange(4), 50_000, seed=1, epoch=2).tolist() == [15424, 36681, 32326, 933]
    assert permuted(np.arange(2) + 10**12, 3 * 10**12, seed=7, epoch=0).tolist() == [776843569046, 1625391307603]


@pytest.mark.parametrize("samples", [2, 13])
def test_every_sample_is_as_likely_at_every_position(samples: int):
    trials, places = 2000, np.arange(samples)
    counts = np.zeros((samples, samples))
    pairs: Counter[tuple[int, int]] = Counter()
    for seed in range(trials):
        order = permuted(places, samples, seed, epoch=0)
        counts[places, order] += 1
        pairs[int(order[0]), int(order[1])] += 1
    expected = trials / samples
    freedom = (samples - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5
    kinds = samples * (samples - 1)
    expected = trials / kinds
    assert len(pairs) == kinds
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < kinds + 5 * (2 * kinds) ** 0.5


# Who gets what


@given(count=st.integers(0, 1000), ranks=st.integers(1, 40))
def test_parts_are_contiguous_and_differ_by_at_most_one(count: int, ranks: int):
    parts = [share_of(count, ranks, rank) for rank in range(ranks)]
    assert [parts[0][0], *(end for _, end in parts)] == [*(start for start, _ in parts), count]
    sizes = [end - start for start, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 70),
    ranks=st.integers(1, 5),
    microbatch=st.none() | st.integers(1, 20),
    epochs=st.integers(1, 3),
)
def test_all_ranks_together_see_every_sample_once_an_epoch(
    samples: int, batch: int, ranks: int, microbatch: int | None, epochs: int
):
    batch = max(batch, ranks * (microbatch or 1))
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for batches in of_all_ranks([a_stream(samples, batch, microbatch=microbatch, epochs=epochs) for _ in range(ranks)]):
        shares = [share for b in batches for _, share in b.split()]
        assert sum(shares) == pytest.approx(ranks)
        assert sum(len(b.indices) for b in batches) == batches[0].size
        for b in batches:
            seen[b.epoch] += b.indices.tolist()
            pieces = list(b.split())
            assert pieces  # a rank with nothing to do would leave the others waiting for its gradients
            taken = [int(i) for (x, _), share in pieces if share for i in x]
            assert taken == b.indices.tolist()
    assert all(sorted(indices) == list(range(samples)) for indices in seen.values())


@given(ranks=st.integers(1, 4), samples=st.integers(8, 90), microbatch=st.none() | st.integers(1, 2))
def test_shares_make_the_gradient_that_of_the_global_mean(ranks: int, samples: int, microbatch: int | None):
    x = np.random.default_rng(0).standard_normal(samples)
    streams = [Stream((x,), 8, microbatch=microbatch, prefetch=0) for _ in range(ranks)]
    for batches in of_all_ranks(streams):
        parts = [sum(float(piece.mean()) * share for (piece,), share in b.split()) for b in batches]
        whole = np.concatenate([x[b.indices] for b in batches])
        assert sum(parts) / ranks == pytest.approx(whole.mean())


def test_micro_batches_are_the_same_for_every_world_size():
    def pieces(ranks: int) -> set[tuple[int, ...]]:
        streams = [a_stream(100, 32, microbatch=6) for _ in range(ranks)]
        return {tuple(x.tolist()) for batches in of_all_ranks(streams) for b in batches for (x, _), share in b.split() if share}

    assert pieces(1) == pieces(2) == pieces(3) == pieces(5)


@pytest.mark.parametrize(("samples", "ranks"), [(10, 3), (16, 2), (3, 4)])
def test_fsdp_computes_as_many_micro_batches_on_every_rank(samples: int, ranks: int):
    class Sharded(torch.nn.Linear):
        def set_requires_gradient_sync(self, needed: bool) -> None:
            exchanged.append(needed)

    streams = [a_stream(samples, batch=16, microbatch=2) for _ in range(ranks)]
    (batches,) = of_all_ranks(streams)
    most = -(-samples // (2 * ranks))
    for batch in batches:
        exchanged: list[bool] = []
        pieces = list(batch.split(Sharded(1, 1)))
        assert exchanged == [False] * (most - 1) + [True]
        shares = [share for _, share in batch.split()]
        assert [share for _, share in pieces] == [0.0] * (most - len(shares)) + shares


def test_a_world_larger_than_the_micro_batches_is_refused():
    with pytest.raises(OutlastError, match=r"batch \(32\) makes 2 micro-batches of 16, fewer than the 3 ranks"):
        next(a_stream(batch=32, microbatch=16).batches(0, 3))


# Positions


@settings(max_examples=settings.default.max_examples // 2)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(4, 40)), min_size=1, max_size=6),
    samples=st.integers(20, 120),
    epochs=st.integers(1, 3),
    prefetch=st.sampled_from([0, 3]),
    old=st.booleans(),
)
def test_changing_world_and_batch_at_any_step_hands_out_every_sample_once_an_epoch(
    worlds: list[tuple[int, int, int]], samples: int, epochs: int, prefetch: int, old: bool
):
    state = a_stream(samples, 8, epochs=epochs).state_dict()
    seen: list[tuple[int, int]] = []
    total = 0
    for ranks, steps, batch in [*worlds, (2, 10**6, 8)]:
        streams = [a_stream(samples, batch, epochs=epochs, prefetch=prefetch) for _ in range(ranks)]
        for stream in streams:
            stream.load_state_dict({k: v for k, v in state.items() if k not in (("batch", "total_steps") if old else ())})
        totals = {stream.total_steps for stream in streams}
        for done, batches in enumerate(of_all_ranks(streams), start=1):
            seen += [(b.epoch, i) for b in batches for i in b.indices.tolist()]
            states = [stream.state_dict() for stream in streams]
            assert all(other == states[0] for other in states)
            state = states[0]
            totals |= {stream.total_steps for stream in streams}
            if done >= steps:
                break
        [total] = totals  # the same from the first step with this batch to the last
    assert sorted(seen) == [(epoch, i) for epoch in range(epochs) for i in range(samples)]
    assert state["step"] == total == state["total_steps"]


def test_a_resumed_stream_goes_on_with_the_very_next_batch():
    undisturbed = [b.indices.tolist() for b in a_stream(95, 10, epochs=3, seed=4)]
    for at in (1, 9, 10, 11, 29, 30):
        first = a_stream(95, 10, epochs=3, seed=4)
        for batch in first:
            if batch.step + 1 == at:
                break
        second = a_stream(95, 10, epochs=3, seed=4)
        second.load_state_dict(first.state_dict())
        assert len(second) == 30 - at
        assert [b.indices.tolist() for b in second] == undisturbed[at:]


def test_the_stream_ends_after_its_steps_however_many_epochs_that_takes():
    stream = a_stream(20, 8, steps=7)
    epoch = [(8, 0), (8, 8), (4, 16)]
    assert [(b.epoch, b.size, b.start, b.ends_epoch) for b in stream] == [
        (e, s, at, s == 4) for e in range(3) for s, at in epoch
    ][:7]
    assert (stream.total_steps, stream.steps_per_epoch, len(stream), list(stream)) == (7, 3, 0, [])


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ({"shuffle": False}, "saved with shuffle=False and now has shuffle=True.*use shuffle=False or start a new run"),
        ({"version": 0}, "order 0, this Outlast knows 1"),
    ],
)
def test_a_stream_in_another_order_does_not_resume(saved: dict[str, Any], sentence: str):
    with pytest.raises(OutlastError, match=sentence):
        a_stream().load_state_dict(a_stream().state_dict() | saved)


def test_another_batch_changes_the_steps_to_come_and_not_the_epochs():
    first = a_stream(100, 10, epochs=4)
    for batch in first:
        if batch.step + 1 == 15:  # 1.5 epochs
            break
    wider = a_stream(100, 25, epochs=4)
    wider.load_state_dict(first.state_dict())
    assert (wider.total_steps, len(wider), wider.saved_with) == (15 + 2 + 2 * 4, 10, (10, 40))
    rest = list(wider)
    assert [(b.epoch, b.size) for b in rest[:3]] == [(1, 25), (1, 25), (2, 25)]
    assert (wider.step, wider.total_steps, len(wider)) == (25, 25, 0)
    over = a_stream(100, 25, epochs=1)
    over.load_state_dict(wider.state_dict())
    assert (over.total_steps, list(over)) == (25, []), "what was asked for is done already"


# Datasets


def test_arrays_of_every_kind_come_as_tensors(tmp_path: Path):
    x = np.arange(40, dtype=np.uint8).reshape(10, 4)
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=x.shape)
    mapped[:] = x
    for dataset in ((x,), (mapped,), {"x": x}, torch.from_numpy(x), np.load(tmp_path / "x.npy", mmap_mode="r")):
        batch = next(iter(Stream(dataset, 4, shuffle=False)))
        ((data, share),) = batch.split()
        rows = data["x"] if isinstance(data, dict) else data[0] if isinstance(data, tuple) else data
        assert rows.equal(torch.from_numpy(x[:4]))
        assert share == 1.0


def test_map_style_datasets_are_collated_and_cut_into_micro_batches():
    dataset = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    batch = next(iter(Stream(dataset, 5, microbatch=2, shuffle=False)))
    assert [([t.tolist() for t in data], share) for data, share in batch.split()] == [
        ([[0, 1], [0, 2]], 0.4),
        ([[2, 3], [4, 6]], 0.4),
        ([[4], [8]], 0.2),
    ]
    lengths = Stream(dataset, 5, collate=lambda samples: len(samples))
    assert [data for b in lengths for data, _ in b.split()] == [5, 5]


class Noisy(Dataset[Any]):
    """Augmentation draws from all three generators."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.random()) + float(torch.rand(()))

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("workers", [0, 1])
def test_random_augmentation_is_a_function_of_seed_epoch_and_sample(workers: int):
    def drawn(stream: Stream, ranks: int = 1) -> dict[tuple[int, int], float]:
        return {
            (b.epoch, int(i)): float(noise)
            for rank in range(ranks)
            for b in stream.batches(rank, ranks)
            for (indices, noises), _ in b.split()
            for i, noise in zip(indices, noises, strict=True)
        }

    undisturbed = drawn(Stream(Noisy(), 4, epochs=2, seed=3, workers=workers))
    assert len(set(undisturbed.values())) == 24
    resumed = Stream(Noisy(), 4, epochs=2, seed=3, workers=workers, microbatch=2)
    for batch in resumed:
        if batch.step == 3:
            break
    rest = drawn(resumed)
    assert rest == {key: undisturbed[key] for key in rest}
    assert len(rest) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_draws_nothing_from_the_generators_of_training(workers: int):
    kept = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for _ in Stream(Noisy(), 4, workers=workers):
        pass
    assert random.getstate() == kept[0]
    assert np.random.get_state()[1].tolist() == kept[1]
    assert torch.get_rng_state().equal(kept[2])


def test_what_goes_wrong_while_reading_ahead_is_raised_where_the_batch_is_due():
    class Torn(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            if 25 in np.asarray(key):
                raise OSError("sample 25 cannot be read")
            return np.asarray(super().__getitem__(key))

    seen: list[int] = []
    with pytest.raises(OSError, match="sample 25"):
        seen.extend(batch.step for batch in Stream(np.arange(40).view(Torn), 10, shuffle=False, prefetch=3))
    assert seen == [0, 1]


def test_leaving_the_loop_early_ends_the_thread_that_reads_ahead():
    before = set(threading.enumerate())  # other tests of this process may hold a stream
    for _ in Stream(np.arange(1000), 10, prefetch=2):
        started = set(threading.enumerate()) - before
        break
    assert [thread.name for thread in started] == ["outlast-stream"]
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


X = np.zeros((6, 2))


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ((np.arange(0),), "the dataset is empty"),
        ({"x": X, "y": "cats"}, r"a dict of columns, and \['y'\] is 'cats'"),
        ((X, np.array(3)), r"column \[1\] of the dataset is a single number"),
        (iter([1, 2]), "is a list_iterator; give the Stream a tuple of arrays, or a dataset with __getitem__ and __len__"),
        (12, "is 12; give the Stream"),
    ],
)  # fmt: skip
def test_what_is_no_dataset_is_refused_with_what_to_do(dataset: Any, sentence: str):
    """More of them are in the table of the guide: `test_script_mistakes.py`."""
    with pytest.raises(OutlastError, match=sentence):
        Stream(dataset, 2)


def test_a_batch_is_a_whole_number():
    with pytest.raises(OutlastError, match=r"batch \(12.5\) and"):
        a_stream(batch=12.5)  # type: ignore[arg-type]


# Waiting for data


def test_a_stream_counts_the_seconds_that_its_steps_wait():
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            arrived.wait(0.05 if index == 3 else 0)
            return super().__getitem__(index)

    arrived = threading.Event()
    stream = Stream(Slow(torch.arange(6)), 1, shuffle=False)
    waited = [stream.waited_s for _ in stream]
    assert waited[3] - waited[2] >= 0.05
    assert "let processes read the samples: Stream(..., workers=4)" in stream.remedy
    assert a_stream(prefetch=1).remedy == "raise prefetch (now 1) of the Stream, or put the data on a faster disk"


def test_a_warning_comes_when_much_of_a_period_was_waiting_and_not_again_soon():
    stalls = Stalls(now=0.0)
    said = [
        (now, stalls.warning(now, waited, "wait less")) for now, waited in ((59, 59), (61, 60), (121, 70), (182, 85), (250, 140))
    ]
    assert [text for _, text in said if text] == ["training waited for data 24.6 % of the last 1m01s; wait less"]
    assert said[3][1]
    assert stalls.warning(1200, 1000, "wait less")


@given(samples=st.integers(1, 5000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_every_epoch_holds_every_sample_once(samples: int, seed: int, epoch: int):
    assert sorted(permuted(np.arange(samples), samples, seed, epoch)) == list(range(samples))


def pictures(directory: Path, sizes: tuple[int, ...] = (3, 4)) -> Path:
    """Prepared columns: `label` counts the samples, `image` has a shape, `caption` is ragged."""
    directory.mkdir(exist_ok=True)
    made, first = [], 0
    for number, size in enumerate(sizes):
        labels = np.arange(first, first + size)
        captions, offsets = shard_format.ragged([np.full(label % 3, label, np.uint8) for label in labels], "uint8")
        image = np.repeat(labels, 12).reshape(size, 3, 2, 2).astype(np.uint8)
        columns = {"label": labels, "image": image, "caption": captions, "caption.offsets": offsets}
        made.append(shard_format.write_columns(directory / f"train-{number:05d}.safetensors", columns))
        first += size
    shard_format.write(directory, shard_format.Manifest("images", {"train": shard_format.Part(tuple(made))}))
    return directory


# Shards: their order


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    window=st.integers(1, 12),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 1000),
    cut=st.integers(1, 50),
)
def test_every_epoch_holds_every_sample_once_and_reads_few_shards_at_a_time(
    sizes: list[int], window: int, seed: int, epoch: int, cut: int
):
    samples, order = sum(sizes), Windows(sizes, window, seed)
    positions = np.arange(samples)
    taken = order.at(positions, epoch)
    assert sorted(taken) == list(range(samples))
    pieces = [Windows(sizes, window, seed).at(positions[i : i + cut], epoch) for i in range(0, samples, cut)]
    assert np.concatenate(pieces).tolist() == taken.tolist(), "a position's sample depends on nothing that was read before"
    shards = np.searchsorted(np.cumsum(sizes), taken, side="right")
    for position in positions:
        announced = order.ahead(int(position), epoch, 1)
        assert len(announced) <= window
        assert shards[position] in announced
        assert order.ahead(int(position), epoch, 3)[: len(announced)] == announced


def test_the_order_in_windows_is_the_same_for_ever():
    order = Windows([4, 2, 5, 3, 6], 2, seed=3)
    assert order.at(np.arange(20), epoch=1).tolist() == [8, 9, 0, 1, 3, 2, 10, 7, 6, 17, 15, 11, 16, 18, 19, 13, 12, 14, 4, 5]
    assert order.ahead(15, epoch=1, windows=3) == [4, 3, 1, 2]


# Shards: what a sample is


@pytest.mark.parametrize(("shard", "dtype"), [(None, "uint16"), (100, "uint16"), (100, "uint32")])
def test_a_sample_of_text_is_a_block_and_the_next_token(tmp_path: Path, shard: int | None, dtype: str):
    shards = Shards(a_text(tmp_path, shard=shard, dtype=dtype), block=30)
    starts = range(0, 990, 30) if shard is None else [i + j for i in range(0, 1000, 100) for j in (0, 30, 60)]
    assert [s.tolist() for s in (shards[i] for i in range(len(shards)))] == [list(range(i, i + 31)) for i in starts]
    assert shards[0].dtype == torch.int64
    assert len(Shards(tmp_path, "val", block=49)) == 1
    seen = [row.tolist() for b in Stream(shards, 7) for x, _ in b.split() for row in x]
    assert sorted(seen) == [list(range(i, i + 31)) for i in starts]
    assert seen != sorted(seen)


def test_nanogpts_directory_is_read_unchanged(tmp_path: Path):
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "train.bin")
    stream = Stream(Shards(tmp_path, block=10), batch=4)
    assert (len(stream), stream.samples, stream.state_dict()["order"]) == (3, 10, "permuted")
    with pytest.raises(OutlastError, match="no part val, it has train"):
        Shards(tmp_path, "val", block=10)


def test_columns_come_as_a_dict_and_ragged_ones_as_lists(tmp_path: Path):
    shards = Shards(pictures(tmp_path))
    batch = next(iter(Stream(shards, 7, seed=1)))
    ((data, share),) = batch.split()
    assert (sorted(data), share, sorted(data["label"].tolist())) == (["caption", "image", "label"], 1.0, list(range(7)))
    assert data["image"].shape == (7, 3, 2, 2)
    for label, image, caption in zip(data["label"], data["image"], data["caption"], strict=True):
        assert image.unique().tolist() == [label]
        assert caption.tolist() == [label] * (int(label) % 3)
    one = shards[-1]
    assert (int(one["label"]), one["caption"].tolist(), one["image"].shape) == (6, [], (3, 2, 2))
    with pytest.raises(IndexError):
        shards[7]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_is_applied_to_samples_and_its_chance_is_a_function_of_the_sample(tmp_path: Path, workers: int):
    def drawn() -> list[tuple[int, float]]:
        shards = Shards(pictures(tmp_path), transform=noisy)
        return [
            (int(i), float(n)) for b in Stream(shards, 3, workers=workers) for x, _ in b.split() for i, n in zip(*x, strict=True)
        ]

    assert drawn() == drawn()
    assert sorted(i for i, _ in drawn()) == list(range(7))


def noisy(sample: dict[str, Any]) -> tuple[int, float]:
    return int(sample["label"]), random.random()


def test_shards_go_to_another_process(tmp_path: Path):
    shards = Shards(a_text(tmp_path), block=10)
    assert pickle.loads(pickle.dumps(shards))[3].equal(shards[3])


# Shards: positions


@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(4, 40)), min_size=1, max_size=5),
    window=st.integers(1, 6),
    changed=st.integers(1, 6),
)
def test_resizes_and_another_window_hand_out_every_sample_once(
    tmp_path_factory: Any, worlds: list[tuple[int, int, int]], window: int, changed: int
):
    place = tmp_path_factory.getbasetemp() / "resized"
    if not place.exists():
        a_text(place, 600, shard=97)
    state, seen = Stream(Shards(place, block=8, window=window), 8, epochs=2).state_dict(), []
    for ranks, steps, batch in [*worlds, (2, 10**6, 8)]:
        streams = [Stream(Shards(place, block=8, window=changed), batch, epochs=2, prefetch=0) for _ in range(ranks)]
        for stream in streams:
            stream.load_state_dict(state)  # which names the window that the run began with
        parts = [stream.batches(rank, ranks) for rank, stream in enumerate(streams)]
        for done, batches in enumerate(zip(*parts, strict=True), start=1):
            seen += [(b.epoch, i) for b in batches for i in b.indices.tolist()]
            state = streams[0].state_dict()
            if done >= steps:
                break
    assert len(seen) == len(set(seen)) == 2 * streams[0].samples


def test_one_order_for_a_run_wherever_its_shards_are(tmp_path: Path):
    place = a_text(tmp_path, shard=100)
    windows = Stream(Shards(place, block=10, window=3), 8)
    order = {"version": 1, "seed": 0, "samples": 90, "shuffle": True, "order": "windows", "window": 3, "data": ""}
    position = {"epoch": 0, "position": 0, "step": 0, "batch": 8, "total_steps": 12}
    assert windows.state_dict() | {"data": ""} == order | position
    local = Stream(Shards(place, block=10), 8)
    assert local.state_dict()["order"] == "permuted"
    ordinary = [b.indices.tolist() for b in Stream(Shards(place, block=10), 8)]
    assert ordinary == [b.indices.tolist() for b in Stream(np.zeros(90), 8)], "local data keep the order of arrays"
    local.load_state_dict(windows.state_dict())
    assert [b.indices.tolist() for b in local] == [b.indices.tolist() for b in windows] != ordinary
    for old in ({}, {"order": "permuted", "window": 10}):
        again = Stream(Shards(place, block=10, window=3), 8)
        again.load_state_dict({**Stream(np.zeros(90), 8).state_dict(), **old})
        assert [b.indices.tolist() for b in again] == ordinary


def test_other_data_do_not_go_on(tmp_path: Path):
    state = Stream(Shards(a_text(tmp_path / "a", shard=100), block=10), 8).state_dict()
    other = Stream(Shards(a_text(tmp_path / "b", shard=100, dtype="uint32"), block=10), 8)
    with pytest.raises(OutlastError, match=r"saved over shards with other checksums \(\w{16}\).*same data or start a new run"):
        other.load_state_dict(state)
    with pytest.raises(OutlastError, match=r"saved in the order 'windows' of shards.*same data"):
        Stream(np.zeros(90), 8).load_state_dict({**state, "order": "windows"})
    with pytest.raises(OutlastError, match=r"saved in the order 'spiral' of shards.*the Outlast that saved it"):
        other.load_state_dict({**state, "order": "spiral"})


# Shards: mistakes


def test_data_and_arguments_that_do_not_fit_are_refused(tmp_path: Path):
    text, images = a_text(tmp_path / "text"), pictures(tmp_path / "images")
    for wrong, sentence in (
        (lambda: Shards(text), "holds text, which needs a block of 1 token or more: block is None"),
        (lambda: Shards(text, block=0), "needs a block of 1 token or more: block is 0"),
        (
            lambda: Shards(images, block=8),
            r"holds images, and a block \(here 8\) is for text; leave block out, or name prepared text",
        ),
        (lambda: Shards(text, block=1000), "no shard of train in .* has the 1001 tokens.*use a smaller block"),
        (lambda: Shards(text, block=8, window=0), r"window \(0\) must be a number of shards"),
        (lambda: Shards(tmp_path / "gone", block=8), "does not exist"),
    ):
        with pytest.raises(OutlastError, match=sentence):
            wrong()
