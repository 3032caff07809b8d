"""Reads a snapshot from workers' memory as torch.distributed.checkpoint reads a checkpoint.

A rank needs its own unique part, one worker's set of shared parts, and rank 0's unique part, which has objects and buffers. Rank
0 broadcasts its part with the indices of the set. Only if a rank then lacks its chunk of a tensor, because the world has another
size, do the ranks exchange the indices of all parts. Every item is verified. A damaged copy is not read again; an unreachable
copy is retried, alternating with other copies. The ranks begin with different holders, so that the load is spread.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from outlast.base import backoff
from outlast.storage.snapshots import part_format
from outlast.storage.snapshots.client import Client, Source
from outlast.storage.snapshots.newest_snapshot import Candidate, Holders
from outlast.storage.snapshots.part_format import Damaged, Item, OutOfReach, Part
from outlast.training.state import checkpoint, snapshot_capture
from outlast.training.state.checkpoint import Flat
from outlast.worker.hangs import deadlocks

PATIENCE_S = 20.0
"""Seconds of retries for a part without a reachable copy. Another state would cost minutes of training, and the holders have just
joined our world, so their network worked a moment ago."""
_PAUSE_S = 0.1, 2.0
"""First and longest pause between attempts, in seconds."""
_SMALL = 1 << 20
"""Maximum size in bytes of a tensor that rank 0 broadcasts; arbitrary, since buffers are smaller."""

Key = tuple[str, int, str]
"""A part's kind, local rank and digest. Parts with equal keys have equal bytes."""
Targets = list[tuple[int, memoryview]]
"""Item numbers, and the memory to read each item into."""
Broadcast = tuple[dict[Key, bytes], dict[int, bytes]]
"""Data that rank 0 reads for all ranks: tails of parts, and items of its unique part, keyed by number."""


class _Part:
    def __init__(self, reader: Reader, holders: Holders, turn: int, *, tail: bytes | None = None, small: bool = False) -> None:
        """Unless `tail` is given, read the part's tail, which has the index, and, with `small`, the small items. Our own agent is
        asked first, then the others, beginning with number `turn`. Raises Damaged, OutOfReach."""
        own = reader.client.address
        far = [each for each in holders if each.address != own]
        turn %= len(far) or 1
        self._reader, self._holders = reader, [*(each for each in holders if each.address == own), *far[turn:], *far[:turn]]
        self.part = holders[0].part
        self.small: dict[int, bytes] = {}
        self.own_bytes = self.peer_bytes = 0

        def first(source: Source) -> Targets:
            self.tail = source.tail
            return [(n, memoryview(bytearray(item.nbytes))) for n, item in enumerate(source.index) if small and _small(item)]

        if tail is None:
            self.small = {n: bytes(into) for n, into in self._read(first)}
        else:
            self.tail = tail
        self.index, _ = part_format.read_tail(self.part, self.tail)

    def fetch(self, targets: Targets) -> None:
        """Read items into memory. Raises Damaged if no valid copy is left, OutOfReach if no copy can be reached."""
        rest = []
        for number, into in targets:
            if number in self.small:
                into[:] = self.small[number]
            else:
                rest.append((number, into))
        if rest:
            self._read(lambda _: rest)

    def _read(self, chosen: Callable[[Source], Targets]) -> Targets:
        """Read the chosen items from the first readable copy. Raises Damaged, OutOfReach."""
        since = None
        with deadlocks.watch().alive():
            for attempt in itertools.count():
                for holder in sorted(self._holders, key=lambda each: each.address in self._reader.unreachable):
                    where = f"(in the memory of worker {holder.part.worker}, at {holder.address})"
                    try:
                        with self._reader.client.open(holder.part, holder.address) as source:
                            source.fetch(targets := chosen(source))
                    except Damaged as problem:
                        self._holders.remove(holder)
                        if not self._holders:
                            raise
                        self._reader.warn(f"{problem} {where}; another copy is read")
                    except OutOfReach as problem:
                        since = since or time.monotonic()
                        if time.monotonic() - since > PATIENCE_S:
                            raise
                        if holder.address not in self._reader.unreachable:
                            self._reader.warn(f"{problem} {where}; it is tried again, as are other copies")
                        self._reader.unreachable.add(holder.address)
                    else:
                        size, near = sum(into.nbytes for _, into in targets), holder.address == self._reader.client.address
                        self.own_bytes, self.peer_bytes = self.own_bytes + size * near, self.peer_bytes + size * (not near)
                        self._reader.unreachable.discard(holder.address)
                        return targets
                time.sleep(backoff.jittered(backoff.exponential(attempt, *_PAUSE_S)))
        raise AssertionError


class Reader(StorageReader):
    """Reads one snapshot. Call `read_indices` first."""

    def __init__(self, candidate: Candidate, client: Client, rank: int, warn: Callable[[str], None]) -> None:
        """`warn` gets a sentence for each copy that could not be used."""
        self.client, self.warn = client, warn
        self.unreachable: set[str] = set()
        self._candidate, self._rank = candidate, rank
        self._unique: dict[int, _Part] = {}
        """The unique parts, keyed by rank in the snapshot's world."""
        self._shared: list[_Part] = []
        self._parts: list[_Part] = []
        self._places: dict[MetadataIndex, tuple[int, int]] = {}
        """The number of an item's part, and the item's number in that part, keyed by the item's index in the checkpoint."""

    def read_indices(self, broadcast: Broadcast | None = None) -> Broadcast:
        """Read the indices and small items that are not in rank 0's `broadcast`, and return the whole broadcast. Raises Damaged,
        OutOfReach."""
        tails, items = broadcast or ({}, {})
        unique = self._candidate.unique
        if not self._parts:
            numbers = [self._rank, 0] if self._rank < len(unique) else [0]
            for number in dict.fromkeys(numbers):  # our own part first, since several parts may have the same chunk
                tail = tails.get(_key(unique[number][0].part)) if number == 0 else None
                self._unique[number] = _Part(self, unique[number], self._rank + number, tail=tail, small=True)
            self._unique[0].small |= items
            self._shared = self._set(tails)
            self._describe()
        return {_key(each.part): each.tail for each in (self._unique[0], *self._shared)}, self._unique[0].small

    def covers(self, targets: Flat) -> bool:
        """Return whether the parts have this rank's chunk of every tensor, as this rank would save it."""
        tensors = {key: value for key, value in targets.items() if isinstance(value, torch.Tensor)}
        for key, local, _, offsets in snapshot_capture.chunks(tensors):
            number, place = self._places.get(MetadataIndex(key, offsets), (-1, 0))
            if number < 0 or self._parts[number].index[place].chunk != tuple(local.shape):
                return False
        return True

    def add(self, tails: Mapping[int, bytes]) -> None:
        """Add all ranks' unique parts, and read indices that are not in `tails`. Raises Damaged, OutOfReach."""
        for number, holders in enumerate(self._candidate.unique):
            if number not in self._unique:
                tail = zlib.decompress(tails[number]) if number in tails else None
                self._unique[number] = _Part(self, holders, self._rank + number, tail=tail)
        self._describe()

    def _set(self, tails: Mapping[Key, bytes]) -> list[_Part]:
        """Read the set of shared parts that most workers have, so that all ranks have the same bits again. Raises Damaged,
        OutOfReach."""
        sets = self._candidate.shared
        for each in sets:
            try:
                return [_Part(self, holders, self._rank, tail=tails.get(_key(holders[0].part))) for holders in each]
            except Damaged as problem:
                if each is sets[-1]:
                    raise
                self.warn(f"{problem}; what every rank had is read from another worker")
        raise AssertionError

    @property
    def own_bytes(self) -> int:
        return sum(part.own_bytes for part in self._parts)

    @property
    def peer_bytes(self) -> int:
        return sum(part.peer_bytes for part in self._parts)

    def extra(self) -> bytes:
        """Return the data that rank 0's session added, as JSON."""
        rank0 = self._unique[0]
        return next((rank0.small[n] for n, item in enumerate(rank0.index) if item.key == snapshot_capture.EXTRA), b"{}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _describe(self) -> None:
        """Build the metadata from the indices. Raises Damaged for unknown types and inconsistent shapes."""
        self._parts, self._places = [*self._unique.values(), *self._shared], {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for number, part in enumerate(self._parts):
            for place, item in enumerate(part.index):
                offsets = torch.Size(item.offsets) if item.dtype != "bytes" else None
                index = MetadataIndex(item.key, offsets)
                if index in self._places:  # a shard that several ranks have
                    continue
                self._places[index] = number, place
                if offsets is None:
                    entries[item.key] = BytesStorageMetadata()
                    continue
                chunk = ChunkStorageMetadata(offsets, torch.Size(item.chunk))
                tensor = entries.setdefault(
                    item.key, TensorStorageMetadata(TensorProperties(dtype=_dtype(item)), torch.Size(item.size), [])
                )
                if not isinstance(tensor, TensorStorageMetadata) or tensor.size != torch.Size(item.size):
                    raise Damaged(f"{item.key:.80} has two shapes in a snapshot")
                tensor.chunks.append(chunk)
        self._metadata = Metadata(entries, storage_data=self._places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No-op: `read_metadata` needs no preparation."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No-op: a reader reads one snapshot."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items, part by part. Raises Damaged, OutOfReach."""
        by_part: dict[int, list[tuple[int, ReadItem]]] = {}
        for request in plan.items:
            number, place = self._places[MetadataIndex(request.storage_index.fqn, request.storage_index.offset)]
            by_part.setdefault(number, []).append((place, request))
        for number, requests in by_part.items():
            _read(self._parts[number], requests, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def tails(candidate: Candidate, client: Client, share: tuple[int, int]) -> dict[int, bytes]:
    """Return the compressed tails of the readable unique parts whose first holder is this worker. The worker's ranks divide the
    parts by `share`."""
    compressed = {}
    for number, holders in enumerate(candidate.unique):
        if holders[0].address == client.address and number % share[1] == share[0]:
            with contextlib.suppress(Damaged, OutOfReach), client.open(holders[0].part) as source:
                compressed[number] = zlib.compress(source.tail, 1)
    return compressed


def _key(part: Part) -> Key:
    return part.kind, part.local_rank, part.digest


def _small(item: Item) -> bool:
    return item.dtype == "bytes" or (item.chunk == item.size and item.nbytes <= _SMALL)


def _dtype(item: Item) -> torch.dtype:
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"{item.key:.80} of a snapshot has no type of torch's: {item.dtype:.40}")
    return dtype


def _read(part: _Part, requests: Sequence[tuple[int, ReadItem]], planner: LoadPlanner) -> None:
    """Read items from one part, into their tensors if possible, otherwise into buffers that are then copied."""
    into: dict[int, memoryview] = {}
    direct: list[tuple[int, memoryview]] = []
    finish: list[Callable[[], None]] = []
    for place, request in requests:
        item = part.index[place]
        if request.type == LoadItemType.BYTE_IO:
            data = into.setdefault(place, memoryview(bytearray(item.nbytes)))
            finish.append(lambda request=request, data=data: planner.load_bytes(request, _stored(data)))  # type: ignore[misc]
            continue
        target = planner.resolve_tensor(request).detach()
        whole = tuple(request.lengths) == item.chunk and target.dtype == _dtype(item)
        if whole and target.is_contiguous() and target.device.type == "cpu":
            direct.append((place, _memory(target)))
            finish.append(lambda request=request, target=target: planner.commit_tensor(request, target))  # type: ignore[misc]
            continue
        if place not in into:
            into[place] = _memory(torch.empty(item.chunk, dtype=_dtype(item)))
        read = torch.frombuffer(into[place], dtype=_dtype(item)).view(item.chunk)
        for dimension, (start, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
            read = read.narrow(dimension, start, length)

        def copy(request: ReadItem = request, target: torch.Tensor = target, read: torch.Tensor = read) -> None:
            target.copy_(read)
            planner.commit_tensor(request, target)

        finish.append(copy)
    part.fetch([*direct, *into.items()])
    for each in finish:
        each()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, which are writable."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _stored(data: memoryview) -> io.BytesIO:
    return io.BytesIO(checkpoint.quickly_pickled(bytes(data)))
