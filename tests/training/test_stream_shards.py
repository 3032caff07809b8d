"""Prepared data in shards: their order, what a sample is, and positions that survive resizes."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.order import Windows
from outlast.training import Shards, Stream
from texts import a_text


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


# The order


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


# What a sample is


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


# Positions


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


# Mistakes


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
