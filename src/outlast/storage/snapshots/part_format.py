"""The format of a part, which is one rank's share of a snapshot, in an in-memory file. Pure.

    header page     magic, length and crc32 of a JSON document, and this document: the part and its tail's length; written last
    data            the items, at the offsets in the index
    tail            number of blocks, crc32 of each (little-endian), the index (JSON)

A part is valid once its header is written. Its digest is the crc32 of the tail, which contains the crc32 of every block, so parts
with equal digests have equal data. All input comes from other processes or machines and is validated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from outlast.base import crc32
from outlast.base.errors import OutlastError
from outlast.base.typed_json import decode, is_count
from outlast.job import contract

PAGE = 4096
"""Size in bytes of the header page."""
BLOCK = 4 << 20
"""Number of bytes per checksum, small enough that threads can share the verification of one item."""
_PIECE = 256 << 10
"""Number of bytes processed at a time, which fit into a core's cache."""
ALIGNED = 64
"""Alignment of items in bytes: a cache line is enough for any dtype."""
LONGEST_TAIL = 256 << 20
"""Maximum size of a tail in bytes. The value is arbitrary; an index has about 150 bytes per tensor."""
_MAGIC = b"outlast1"
_HEAD = struct.Struct("<8sII")

Kind = Literal["shared", "unique"]
"""`shared` is state that every worker has, sharded over its ranks; `unique` is state that only one rank has."""


class Damaged(OutlastError):
    """A copy of a part is incomplete, corrupt or gone. Another copy may be valid."""


class OutOfReach(OutlastError):
    """A copy of a part cannot be read now. A retry may succeed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's share of a snapshot. The field names are JSON keys that other agents read."""

    run: Annotated[str, lambda run: 0 < len(run) <= 256]
    generation: int
    step: int
    world: int
    rank: int
    worker: Annotated[int, lambda id: id < contract.MOST_WORKERS]
    """The worker whose rank wrote the part."""
    local_rank: int
    local_ranks: int
    kind: Kind
    bytes: int = 0
    items: int = 0
    digest: Annotated[str, lambda digest: len(digest) in (0, 8)] = ""
    """Checksum of the content, in 8 hex digits."""
    replica: bool = False
    session: Annotated[str, lambda session: len(session) <= 64] = ""
    """A nonce that is new at each start of the world's processes, so that parts of two attempts are never combined."""

    @property
    def at(self) -> tuple[int, int]:
        """(generation, step), which orders snapshots."""
        return self.generation, self.step

    @property
    def name(self) -> tuple[object, ...]:
        """The identity of a part, which only its replicas share."""
        return self.run, self.generation, self.step, self.kind, self.rank, self.worker, self.digest, self.session

    def __str__(self) -> str:
        return f"the {self.kind} part of rank {self.rank} of step {self.step} (generation {self.generation})"

    def json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of(cls, document: object) -> Self:
        """Parse a part from untrusted JSON, ignoring fields of newer versions. Raises Damaged."""
        try:
            part = decode(cls, document, "a part of a snapshot")
        except ValueError as error:
            raise Damaged(str(error)) from None
        if part.rank >= part.world or part.local_rank >= part.local_ranks:
            raise Damaged(f"a world of {part.world} has no rank {part.rank}, or {part.local_ranks} none of {part.local_rank}")
        return part


def catalog(documents: Iterable[object]) -> list[Part]:
    """Parse parts from untrusted JSON, and skip those that this version does not support."""
    parts = []
    for each in documents:
        with contextlib.suppress(Damaged):
            parts.append(Part.of(each))
    return parts


@dataclasses.dataclass(frozen=True)
class Item:
    """One chunk of a tensor, or bytes that are not a tensor."""

    key: str
    dtype: str
    """Name of the dtype in torch, such as `float32`; `bytes` if the item is no tensor."""
    size: tuple[int, ...]
    """Shape of the whole tensor; () for bytes and scalars."""
    offsets: tuple[int, ...]
    """Index of the chunk's first element in the tensor."""
    chunk: tuple[int, ...]
    place: int
    """Offset in the part's data, in bytes."""
    nbytes: int

    def blocks(self) -> list[tuple[int, int]]:
        """Return the offset and the size of each block, in bytes."""
        return [(self.place + at, min(BLOCK, self.nbytes - at)) for at in range(0, self.nbytes, BLOCK)]

    @classmethod
    def of(cls, row: object) -> Self:
        """Parse an item from untrusted JSON. Raises Damaged."""
        if not (isinstance(row, Sequence) and len(row) == 7):
            raise Damaged(f"{row!r:.80} is no item of a snapshot")
        key, dtype, size, offsets, chunk, place, nbytes = row
        shapes = (size, offsets, chunk)
        fits = (
            isinstance(key, str) and 0 < len(key) <= 4096,
            isinstance(dtype, str) and 0 < len(dtype) <= 64,
            all(isinstance(shape, list) and len(shape) <= 64 and all(map(is_count, shape)) for shape in shapes),
            is_count(place) and is_count(nbytes),
        )
        if not all(fits) or len({len(shape) for shape in shapes}) != 1:
            raise Damaged(f"{row!r:.80} is no item of a snapshot")
        if any(offset + length > whole for whole, offset, length in zip(size, offsets, chunk, strict=True)):
            raise Damaged(f"the chunk of {key:.80} lies outside of its tensor")
        return cls(key, dtype, tuple(size), tuple(offsets), tuple(chunk), place, nbytes)


def laid_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return each item's offset, and the total size with padding, all in bytes."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return places, end


def checksums(index: Sequence[Item], data: memoryview) -> list[int]:
    """Return the crc32 of each block, in the order of the index."""
    return [crc32.update(data[place : place + nbytes]) for item in index for place, nbytes in item.blocks()]


def filled(into: memoryview, fill: Callable[[int, memoryview], object]) -> int:
    """Fill memory with `fill(offset, piece)`, and return its crc32, computed while each piece is in the CPU's cache."""
    crc = 0
    for start in range(0, len(into), _PIECE):
        piece = into[start : start + _PIECE]
        fill(start, piece)
        crc = crc32.update(piece, crc)
    return crc


def checked(index: Iterable[Item], part: Part) -> list[Item]:
    """Return a part's items. Raises Damaged if an item ends beyond the part's data."""
    items = list(index)
    for item in items:
        if item.place + item.nbytes > part.bytes:
            raise Damaged(f"{item.key:.80} of {part} ends at byte {item.place + item.nbytes} of {part.bytes}")
    return items


def rows(index: Sequence[Item]) -> list[list[object]]:
    return [[item.key, item.dtype, item.size, item.offsets, item.chunk, item.place, item.nbytes] for item in index]


def encoded(rows: Sequence[object]) -> bytes:
    return json.dumps(rows, separators=(",", ":")).encode()


def tail(index: Sequence[Item], crcs: Sequence[int], encoded_index: bytes = b"") -> bytes:
    """Return the part's tail. Pass `encoded_index` to avoid encoding the index again."""
    return struct.pack(f"<{1 + len(crcs)}I", len(crcs), *crcs) + (encoded_index or encoded(rows(index)))


def finished(part: Part, index: Sequence[Item], tail: bytes) -> Part:
    """Return the part with its number of items and its digest."""
    return dataclasses.replace(part, items=len(index), digest=f"{crc32.update(tail):08x}")


def read_tail(part: Part, tail: bytes) -> tuple[list[Item], list[list[int]]]:
    """Return the index, and the crc32 of each item's blocks. Raises Damaged."""
    if f"{crc32.update(tail):08x}" != part.digest:
        raise Damaged(f"the index of {part} has digest {crc32.update(tail):08x} instead of {part.digest}")
    try:
        (count,) = struct.unpack_from("<I", tail)
        crcs = iter(struct.unpack_from(f"<{count}I", tail, 4))
        index = checked(map(Item.of, json.loads(tail[4 + 4 * count :])), part)
    except (ValueError, struct.error, RecursionError, TypeError) as error:
        raise Damaged(f"the index of {part} cannot be read: {error}") from None
    if len(index) != part.items or count != sum(-(-item.nbytes // BLOCK) for item in index):
        raise Damaged(f"the index of {part} does not have its {part.items} items")
    return index, [[next(crcs) for _ in range(0, item.nbytes, BLOCK)] for item in index]


def header(part: Part, tail: int) -> bytes:
    """Return the header page of a part whose tail has `tail` bytes. Raises Damaged if the page is too small."""
    document = json.dumps({"part": part.json(), "tail": tail}).encode()
    if len(document) > PAGE - _HEAD.size:
        raise Damaged(f"the header of {part} has {len(document)} bytes; {PAGE - _HEAD.size} are possible")
    return (_HEAD.pack(_MAGIC, len(document), crc32.update(document)) + document).ljust(PAGE, b"\0")


def read_header(page: bytes) -> tuple[Part, int]:
    """Return the part that a header page describes, and the length of its tail in bytes. Raises Damaged."""
    if len(page) < _HEAD.size:
        raise Damaged("a part of a snapshot has no header")
    magic, length, crc = _HEAD.unpack_from(page)
    document = page[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(document) != length or crc32.update(document) != crc:
        raise Damaged("a part of a snapshot has no header: its writer has not finished")
    return described(json.loads(document))


def described(document: object) -> tuple[Part, int]:
    """Return the part and the length of its tail from a header's JSON. Raises Damaged."""
    tail = document.get("tail") if isinstance(document, Mapping) else None
    if not (isinstance(document, Mapping) and is_count(tail) and tail <= LONGEST_TAIL):
        raise Damaged(f"{document!r:.80} is no header of a part of a snapshot")
    return Part.of(document.get("part")), tail
