"""Writes samples as columns. Each unit of work is one shard, which one process writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from outlast.data import shard_format
from outlast.data.prepare import source_files, work_units

T = TypeVar("T")
SHARD = 64 << 20
"""Total size of a shard's samples in bytes. Arbitrary."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """The items that become one shard of a part."""

    number: int
    part: str
    shard: int
    items: tuple[T, ...]
    bytes: int
    """Total size of the items' files in bytes."""


def batches(items: Mapping[str, Sequence[T]], sizes: Mapping[str, Sequence[tuple[int, int]]], limit: int) -> list[Batch[T]]:
    """Divide each part's items into batches of at most `limit` bytes of samples. `sizes` has, for each item, the sample's size
    and the file's size, in bytes."""
    made: list[Batch[T]] = []
    for part, some in items.items():
        numbered = list(range(len(some)))
        for shard, group in enumerate(source_files.grouped(numbered, [size for size, _ in sizes[part]], limit)):
            read = sum(sizes[part][i][1] for i in group)
            made.append(Batch(len(made), part, shard, tuple(some[i] for i in group), read))
    return made


def write(to: Path, part: str, shard: int, columns: Mapping[str, NDArray[Any]]) -> work_units.Note:
    """Write a shard and return its note. A shard without samples is not written, and its note is empty."""
    if not shard_format.samples(columns):
        return {}
    return dataclasses.asdict(shard_format.write_columns(to / f"{part}-{shard:05d}.safetensors", columns))


def parts(notes: Sequence[Mapping[str, work_units.Note]], names: Sequence[str]) -> dict[str, shard_format.Part]:
    """Return a dataset's parts, given the notes on its shards."""
    return {
        part: shard_format.Part(tuple(shard_format.Shard(**note[part]) for note in notes if note.get(part))) for part in names
    }
