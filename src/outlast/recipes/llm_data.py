"""Tokenizes the records of `llm` once per machine, and packs them into micro-batches without padding.

The code of `outlast data prepare jsonl` tokenizes `.jsonl` files into this machine's cache before training, so an invalid line is
reported before the first step. A prepared directory is read directly.
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
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from outlast.base import file_locks
from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import chat, jsonl, source_files, work_units
from outlast.training import Shards
from outlast.worker.prepare import data_cache_eviction

NONE = "none"  # value of --val that turns validation off
Sample = tuple[Tensor, Tensor]  # tokens and labels, int32 (t,); labels of -100 are not learned


class Source(NamedTuple):
    """A file with records, or a part of a prepared directory."""

    path: Path
    part: str


def sources(data: str, val: str) -> tuple[Source, Source | None, str]:
    """Return the sources for training and validation, and a message if there is none for validation. Raises OutlastError.

    `data` is a .jsonl file, a directory with train.jsonl, or a prepared directory. If `val` is empty, validation uses val.jsonl
    beside the training file, or the validation part of the prepared directory.
    """
    path = Path(data).expanduser()
    if "://" in data:
        raise OutlastError(f"--data {data} is in a store; name it as `data` of the job file, or copy it here: outlast pull")
    if not path.exists():
        raise OutlastError(f"--data {data} does not exist; name a .jsonl file, a directory with train.jsonl, or a prepared one")
    if path.is_dir() and (path / shard_format.MANIFEST).exists():
        train, beside = Source(path, source_files.TRAIN), Source(path, source_files.VAL)
        exists = bool(shard_format.read(path).parts.get(source_files.VAL))
    else:
        if path.is_dir():
            path = path / "train.jsonl"
            if not path.exists():
                raise OutlastError(f"--data {data} has no train.jsonl; name the file itself, or prepare it: outlast data prepare")
        train, beside = Source(path, source_files.TRAIN), Source(path.parent / "val.jsonl", source_files.TRAIN)
        exists = beside.path.exists()
    if val == NONE:
        return train, None, "nothing is measured: --val none"
    if val:
        if not (chosen := Path(val).expanduser()).exists():
            raise OutlastError(f"--val {val} does not exist; name a .jsonl file, or --val none to measure nothing")
        prepared = chosen.is_dir()
        return train, Source(chosen, source_files.VAL if prepared else source_files.TRAIN), ""
    if not exists or beside == train:
        missing = f"{beside.path} does not exist" if not exists else f"{path} is what is trained on"
        return train, None, f"nothing is measured: {missing}; --val FILE names a validation file"
    return train, beside, ""


def cached(source: Source, tokenizer: Path, *, skip_bad: bool, make: bool, say: Callable[[str], None]) -> Path:
    """Return the directory of a source's tokens. With `make`, it is written if it is missing, by one process per machine.

    Raises OutlastError with file, line and reason for a line that is not a record. With `skip_bad`, such lines are left out, and
    reported by `say`.
    """
    if source.path.is_dir():
        return source.path
    settings = jsonl.Settings(str(tokenizer), val=0, skip_damaged=skip_bad)
    status = source.path.stat()
    about = str(source.path.resolve()), status.st_size, status.st_mtime_ns, settings.described
    directory = data_cache_eviction.cache(os.environ) / "llm" / hashlib.sha256(repr(about).encode()).hexdigest()[:32]
    if not make:
        return directory
    with source.path.open("rb") as file:
        empty = not any(line.strip() for line in file)
    if empty:
        raise OutlastError(f"{source.path} is empty; give it records, one a line")
    directory.parent.mkdir(parents=True, exist_ok=True)
    waiting = lambda: say(f"another process of this machine tokenizes {source.path}; waiting for it")  # noqa: E731
    with file_locks.exclusive(directory.with_suffix(".lock"), waiting=waiting, stop=threading.Event()):
        made = jsonl.prepare(work_units.Request(source.path, directory, 0), settings)
    if left_out := made.source.get("damaged"):
        first = "; ".join(made.source.get("left_out", ()))
        say(f"{left_out} of the lines of {source.path} are no records and are left out (--skip-bad): {first}")
    return directory


class Samples(Dataset[Sample]):
    """A source's samples, truncated to `limit` tokens. Samples without a learned token after the first one are left out."""

    def __init__(self, directory: Path, part: str, limit: int, vocabulary: int) -> None:
        self._shards = Shards(directory, part)
        if "labels" not in shard_format.columns(directory / self._shards.manifest.part(part).shards[0].file):
            raise OutlastError(
                f"{directory} holds {self._shards.manifest.kind}, and this needs records: outlast data prepare jsonl"
            )
        self._limit = limit
        lengths, learned, largest = [], [], 0
        for shard in self._shards.manifest.part(part).shards:
            columns = shard_format.columns(directory / shard.file)
            offsets = columns[f"labels{shard_format.OFFSETS}"]
            largest = max(largest, int(columns["input_ids"].max(initial=0)))
            lengths.append(np.diff(offsets))
            learned.append(_learned(columns["labels"], offsets, limit))
        if largest >= vocabulary:
            raise OutlastError(
                f"{directory} has token {largest}, and the model knows {vocabulary}: they are another tokenizer's; prepare "
                "the records with the model's own"
            )
        every = np.concatenate(lengths)
        self._indices = np.flatnonzero(np.concatenate(learned))
        self.cut = int((every > limit).sum())  # truncated samples
        self.without = len(every) - len(self._indices)  # samples without a token to learn
        if not len(self._indices):
            raise OutlastError(
                f"none of the {len(every)} samples of {directory} has a token to learn within {limit} tokens; raise --seq-len, "
                "or give completions, texts, or an assistant's messages"
            )
        self.tokens = int(np.minimum(every, limit)[self._indices].sum())
        self.digest = hashlib.sha256(f"{self._shards.fingerprint} {limit}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        sample = self._shards[int(self._indices[index])]
        return sample["input_ids"][: self._limit], sample["labels"][: self._limit]


def _learned(labels: NDArray[np.int32], offsets: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return the number of learned tokens within the limit, for each sample."""
    begin, end = offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + limit)
    so_far = np.concatenate(([0], np.cumsum(labels != chat.NOT_LEARNED)))
    return np.where(end > begin, so_far[end] - so_far[np.minimum(begin + 1, end)], 0)


class Row(NamedTuple):
    """Input for one forward pass: either samples packed into one row, or one row per sample, padded at the end."""

    tokens: Tensor  # (b, t) int64
    positions: Tensor  # (b, t) int64, from 0 in every sample
    places: Tensor  # (n,) int64: which of the b * t positions predict a learned token
    targets: Tensor  # (n,) int64: the tokens to predict there
    groups: tuple[tuple[Tensor, Tensor], ...]
    """For attention, groups of samples of similar length. A group consists of the positions of its tokens in the row,
    (samples, longest), and the indices of those positions that are not padding."""
    order: Tensor  # (t,) int64: each row token's index among the tokens of all groups
    real: int  # tokens, not counting padding


def packed(samples: Sequence[Sample], size: int) -> list[Row]:
    """Pack samples, in order, into rows of at most `size` tokens. A longer sample gets its own row."""
    rows: list[list[Sample]] = []
    left = 0
    for sample in samples:
        if not rows or len(sample[0]) > left:
            rows.append([])
            left = size
        rows[-1].append(sample)
        left -= len(sample[0])
    return [_row(some) for some in rows]


def _row(samples: Sequence[Sample]) -> Row:
    lengths = [len(tokens) for tokens, _ in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    labels = torch.cat([labels for _, labels in samples])[None]
    labels[0, torch.from_numpy(starts)] = chat.NOT_LEARNED  # the last token of the previous sample predicts nothing
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    groups, order = _groups(lengths, starts)
    return Row(
        torch.cat([tokens for tokens, _ in samples])[None].long(), positions, *_learns(labels), groups, order, sum(lengths)
    )


def _learns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Row.places` and `Row.targets` for `labels`, (b, t), whose first column is not learned."""
    following = labels.flatten().roll(-1).long()
    places = (following != chat.NOT_LEARNED).nonzero().flatten()
    return places, following[places]


def _groups(lengths: Sequence[int], starts: NDArray[np.int64]) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """Return `Row.groups` and `Row.order`. Lengths in a group differ by less than a factor of 2, so less than half is padding."""
    if len(lengths) == 1:
        return (), torch.arange(lengths[0])
    groups, covered = [], []
    for size in sorted({length.bit_length() for length in lengths}):
        members = [i for i, length in enumerate(lengths) if length.bit_length() == size]
        length = np.array([lengths[i] for i in members])[:, None]
        at = np.arange(length.max())[None]
        where = starts[members][:, None] + np.minimum(at, length - 1)  # beyond the end: the last token again
        real = np.broadcast_to(at < length, where.shape)
        groups.append((torch.from_numpy(where), torch.from_numpy(np.flatnonzero(real))))
        covered.append(where[real])
    return tuple(groups), torch.from_numpy(np.argsort(np.concatenate(covered)))


def padded(samples: Sequence[Sample]) -> Row:
    """Return one row per sample, padded at the end, so that causal attention needs no mask."""
    tokens = pad_sequence([tokens for tokens, _ in samples], batch_first=True).long()
    labels = pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=chat.NOT_LEARNED)
    labels[:, 0] = chat.NOT_LEARNED  # nothing predicts the first token
    order = torch.arange(tokens.shape[1])
    return Row(tokens, order.expand(len(samples), -1), *_learns(labels), (), order, sum(len(tokens) for tokens, _ in samples))
