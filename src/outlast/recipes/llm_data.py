"""What `llm` trains on: records that become tokens once on each machine, and micro-batches without padding.

`.jsonl` files are tokenized by `outlast data prepare jsonl`'s own code into this machine's cache, before training and all of
them, so a bad line is found then. A directory that was prepared by hand is read as it is.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from outlast.base import file_locks
from outlast.base.errors import OutlastError
from outlast.data import shards
from outlast.data.prepare import chat, jsonl, plan, work
from outlast.training import Shards
from outlast.worker.prepare import room

NONE = "none"
"""As `--val`: do not measure."""
Sample = tuple[Tensor, Tensor]
"""Tokens and labels, int32 of shape (t,)."""


class Source(NamedTuple):
    """A `.jsonl` file, or a part of a prepared directory."""

    path: Path
    part: str


def sources(data: str, val: str) -> tuple[Source, Source | None, str]:
    """What to train on, what to measure on, and a sentence when that is nothing. Raises OutlastError.

    `data` is a .jsonl file, a directory with train.jsonl, or a prepared one; `val` is empty for what lies beside it.
    """
    path = Path(data).expanduser()
    if "://" in data:
        raise OutlastError(f"--data {data} is in a store; name it as `data` of the job file, or copy it here: outlast pull")
    if not path.exists():
        raise OutlastError(f"--data {data} does not exist; name a .jsonl file, a directory with train.jsonl, or a prepared one")
    if path.is_dir() and (path / shards.MANIFEST).exists():
        train, beside = Source(path, plan.TRAIN), Source(path, plan.VAL)
        there = bool(shards.read(path).parts.get(plan.VAL))
    else:
        if path.is_dir():
            path = path / "train.jsonl"
            if not path.exists():
                raise OutlastError(f"--data {data} has no train.jsonl; name the file itself, or prepare it: outlast data prepare")
        train, beside = Source(path, plan.TRAIN), Source(path.parent / "val.jsonl", plan.TRAIN)
        there = beside.path.exists()
    if val == NONE:
        return train, None, "nothing is measured: --val none"
    if val:
        if not (chosen := Path(val).expanduser()).exists():
            raise OutlastError(f"--val {val} does not exist; name a .jsonl file, or --val none to measure nothing")
        prepared = chosen.is_dir()
        return train, Source(chosen, plan.VAL if prepared else plan.TRAIN), ""
    if not there or beside == train:
        missing = f"{beside.path} does not exist" if not there else f"{path} is what is trained on"
        return train, None, f"nothing is measured: {missing}; --val FILE names a validation file"
    return train, beside, ""


def cached(source: Source, tokenizer: Path, *, skip_bad: bool, ours: bool, say: Callable[[str], None]) -> Path:
    """The directory of a source as tokens; made where `ours`, by one process of the machine, unless it is there.

    Raises OutlastError for a line that is no record, with file, line and reason; with `skip_bad`, counts and names such lines.
    """
    if source.path.is_dir():
        return source.path
    settings = jsonl.Settings(str(tokenizer), val=0, skip_damaged=skip_bad)
    found = source.path.stat()
    about = str(source.path.resolve()), found.st_size, found.st_mtime_ns, settings.described
    directory = room.cache(os.environ) / "llm" / hashlib.sha256(repr(about).encode()).hexdigest()[:32]
    if not ours:
        return directory
    with source.path.open("rb") as file:
        empty = not any(line.strip() for line in file)
    if empty:
        raise OutlastError(f"{source.path} is empty; give it records, one a line")
    directory.parent.mkdir(parents=True, exist_ok=True)
    waiting = lambda: say(f"another process of this machine tokenizes {source.path}; waiting for it")  # noqa: E731
    with file_locks.exclusive(directory.with_suffix(".lock"), waiting=waiting, stop=threading.Event()):
        made = jsonl.prepare(work.Request(source.path, directory, 0), settings)
    if left_out := made.source.get("damaged"):
        first = "; ".join(made.source.get("left_out", ()))
        say(f"{left_out} of the lines of {source.path} are no records and are left out (--skip-bad): {first}")
    return directory


class Samples(Dataset[Sample]):
    """The samples of a source in which something is learned, cut to `limit` tokens; a label of -100 is not learned.

    The first token is never learned: nothing predicts it.
    """

    def __init__(self, directory: Path, part: str, limit: int, vocabulary: int) -> None:
        self._shards = Shards(directory, part)
        if "labels" not in shards.columns(directory / self._shards.manifest.part(part).shards[0].file):
            raise OutlastError(
                f"{directory} holds {self._shards.manifest.kind}, and this needs records: outlast data prepare jsonl"
            )
        self._limit = limit
        lengths, learned, largest = [], [], 0
        for shard in self._shards.manifest.part(part).shards:
            columns = shards.columns(directory / shard.file)
            offsets = columns[f"labels{shards.OFFSETS}"]
            largest = max(largest, int(columns["input_ids"].max(initial=0)))
            lengths.append(np.diff(offsets))
            learned.append(_learned(columns["labels"], offsets, limit))
        if largest >= vocabulary:
            raise OutlastError(
                f"{directory} has token {largest}, and the model knows {vocabulary}: they are another tokenizer's; prepare "
                "the records with the model's own"
            )
        every = np.concatenate(lengths)
        self.lengths = np.minimum(every, limit)
        self.learned = np.concatenate(learned)
        self._kept = np.flatnonzero(self.learned)
        self.cut = int((every > limit).sum())
        """Samples that lost their end."""
        self.without = len(every) - len(self._kept)
        """Samples in which nothing is left to learn."""
        if not len(self._kept):
            raise OutlastError(
                f"none of the {len(every)} samples of {directory} has a token to learn within {limit} tokens; raise --seq-len, "
                "or give completions, texts, or an assistant's messages"
            )
        self.tokens = int(self.lengths[self._kept].sum())
        self.digest = hashlib.sha256(f"{self._shards.fingerprint} {limit}".encode()).hexdigest()[:16]
        """What identifies the samples."""

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Sample:
        sample = self._shards[int(self._kept[index])]
        return sample["input_ids"][: self._limit], sample["labels"][: self._limit]


def _learned(labels: NDArray[np.int32], offsets: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """How many tokens of each sample are learned within the limit."""
    begin, end = offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + limit)
    so_far = np.concatenate(([0], np.cumsum(labels != chat.NOT_LEARNED)))
    return np.where(end > begin, so_far[end] - so_far[np.minimum(begin + 1, end)], 0)


class Row(NamedTuple):
    """What one forward pass computes: samples one after the other in one row, or each in a row of its own, padded at its end."""

    tokens: Tensor  # (b, t) int64
    positions: Tensor  # (b, t) int64, from 0 in every sample
    places: Tensor  # (n,) int64: where, of b * t, a token is predicted that is learned
    targets: Tensor  # (n,) int64: these tokens
    groups: tuple[tuple[Tensor, Tensor], ...]
    """Samples of about one length, for attention: where their tokens are (samples, longest), and which are real."""
    order: Tensor  # (t,) int64: where each token of a row is among those of all groups
    real: int
    """Tokens without padding."""


def packed(samples: Sequence[Sample], room: int) -> list[Row]:
    """Rows of at most `room` tokens, or of one longer sample, in the order of the samples."""
    rows: list[list[Sample]] = []
    left = 0
    for sample in samples:
        if not rows or len(sample[0]) > left:
            rows.append([])
            left = room
        rows[-1].append(sample)
        left -= len(sample[0])
    return [_row(some) for some in rows]


def _row(samples: Sequence[Sample]) -> Row:
    lengths = [len(tokens) for tokens, _ in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    labels = torch.cat([labels for _, labels in samples]).long()
    labels[torch.from_numpy(starts)] = chat.NOT_LEARNED  # the last token of the sample before predicts nothing
    places = (labels[1:] != chat.NOT_LEARNED).nonzero().flatten()
    groups, order = _groups(lengths, starts)
    return Row(
        tokens=torch.cat([tokens for tokens, _ in samples]).long()[None],
        positions=torch.cat([torch.arange(length) for length in lengths])[None],
        places=places,
        targets=labels[places + 1],
        groups=groups,
        order=order,
        real=sum(lengths),
    )


def _groups(lengths: Sequence[int], starts: NDArray[np.int64]) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """Samples whose lengths have the same power of two, so padding is less than half."""
    if len(lengths) == 1:
        return (), torch.arange(lengths[0])
    groups, met = [], []
    for size in sorted({length.bit_length() for length in lengths}):
        of = [i for i, length in enumerate(lengths) if length.bit_length() == size]
        own = np.array([lengths[i] for i in of])[:, None]
        at = np.arange(own.max())[None]
        where = starts[of][:, None] + np.minimum(at, own - 1)  # beyond the end: the last token again
        real = np.broadcast_to(at < own, where.shape)
        groups.append((torch.from_numpy(where), torch.from_numpy(np.flatnonzero(real))))
        met.append(where[real])
    return tuple(groups), torch.from_numpy(np.argsort(np.concatenate(met)))


def padded(samples: Sequence[Sample]) -> Row:
    """One row per sample, padded to the longest. Padding comes last and is not learned, so causal attention needs no mask."""
    longest = max(len(tokens) for tokens, _ in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full((len(samples), longest), chat.NOT_LEARNED, dtype=torch.int64)
    for row, (some, learned) in enumerate(samples):
        tokens[row, : len(some)] = some
        labels[row, 1 : len(some)] = learned[1:]
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=chat.NOT_LEARNED).flatten()
    places = (following != chat.NOT_LEARNED).nonzero().flatten()
    positions = torch.arange(longest).expand(len(samples), -1)
    real = sum(len(some) for some, _ in samples)
    return Row(tokens, positions, places, following[places], (), torch.arange(longest), real)
