"""Samples in columns: each unit of work is one shard, which one process writes as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from outlast.data import shards
from outlast.data.prepare import plan, work

T = TypeVar("T")
SHARD = 64 << 20
"""Size in bytes of the samples in a shard. Arbitrary: large enough for one request to a store, small enough for a process's
memory."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """The items that become one shard of a part."""

    number: int
    part: str
    shard: int
    """Index of the shard within its part."""
    items: tuple[T, ...]
    bytes: int
    """Total size of the items' files in bytes."""


def batches(items: Mapping[str, Sequence[T]], sizes: Mapping[str, Sequence[tuple[int, int]]], limit: int) -> list[Batch[T]]:
    """The items of each part in batches of at most `limit` bytes of samples. `sizes`: size of the sample and of its file in
    bytes, per item."""
    made: list[Batch[T]] = []
    for part, some in items.items():
        numbered = list(range(len(some)))
        for shard, group in enumerate(plan.grouped(numbered, [size for size, _ in sizes[part]], limit)):
            read = sum(sizes[part][i][1] for i in group)
            made.append(Batch(len(made), part, shard, tuple(some[i] for i in group), read))
    return made


def name(part: str, shard: int) -> str:
    """File name of a shard."""
    return f"{part}-{shard:05d}.safetensors"


def write(to: Path, part: str, shard: int, columns: Mapping[str, NDArray[Any]]) -> work.Note:
    """Write a shard and return its note. No file is written for a shard without samples."""
    if not shards.samples(columns):
        return {}
    return dataclasses.asdict(shards.write_columns(to / name(part, shard), columns, work.check_attempt))


def parts(notes: Sequence[Mapping[str, work.Note]], names: Sequence[str]) -> dict[str, shards.Part]:
    """The parts of a dataset, from the notes of the shards."""
    return {part: shards.Part(tuple(shards.Shard(**note[part]) for note in notes if note.get(part))) for part in names}
