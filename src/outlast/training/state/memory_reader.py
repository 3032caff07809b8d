"""Reads a snapshot from the memory of workers as torch.distributed.checkpoint reads a checkpoint.

A rank needs what it has saved itself, one worker's set of what every rank had, and what rank 0 alone had: objects and buffers.
Rank 0 reads that and tells all others, with the indices of the set. Only where a rank then lacks its chunk of a tensor, because
the world has another size, the indices of all parts are exchanged (`tails`, `Reader.add`).

Parts in this worker's own memory are read there, the others straight from the agents that hold them, into the tensors themselves
where these are contiguous; a connection exists only while it is read from. Every item is verified. A copy that is wrong is not
read again; what is out of reach is tried again, with all holders in turn, and the ranks of a world begin with different ones.
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
from outlast.storage.snapshots import parts
from outlast.storage.snapshots.client import Client, Source
from outlast.storage.snapshots.election import Candidate, Holders
from outlast.storage.snapshots.parts import Damaged, Item, OutOfReach, Part
from outlast.training.state import capture
from outlast.training.state.checkpoint import Flat
from outlast.worker.hangs import stall

PATIENCE_S = 20.0
"""How long a part of which no copy can be reached is tried again. Whatever else there is to load costs minutes of training or a
new start; and whoever holds it is in our world, so its network is one that has just worked."""
_PAUSE_S = 0.1, 2.0
"""The first and the longest pause between two tries."""
_SMALL = 1 << 20
"""Bytes of a whole tensor of rank 0 that all ranks are told. Arbitrary: buffers are smaller, and the others each rank reads."""

Key = tuple[str, int, str]
"""Kind, local rank and digest of a part: what is read of two that have the same is the same."""
Wanted = list[tuple[int, memoryview]]
"""Numbers of items, and where each is to come."""
Told = tuple[dict[Key, bytes], dict[int, bytes]]
"""What rank 0 has read for all: tails of parts, and items of what the rank 0 of then alone had, by number."""


class _Part:
    """One part, and who has it."""

    def __init__(self, of: Reader, holders: Holders, turn: int, *, tail: bytes | None = None, small: bool = False) -> None:
        """`turn`: which of the others is first asked if our own agent does not have it. Without its `tail` the index is read, and
        with it what is `small`. Raises Damaged, OutOfReach."""
        own = of.client.address
        far = [each for each in holders if each.address != own]
        turn %= len(far) or 1
        self._of, self._left = of, [*(each for each in holders if each.address == own), *far[turn:], *far[:turn]]
        self.part = holders[0].part
        self.small: dict[int, bytes] = {}
        self.near = self.far = 0
        """Bytes read from our own agent, and from others."""

        def first(source: Source) -> Wanted:
            self.tail = source.tail
            return [(n, memoryview(bytearray(item.nbytes))) for n, item in enumerate(source.index) if small and _small(item)]

        if tail is None:
            self.small = {n: bytes(into) for n, into in self._read(first)}
        else:
            self.tail = tail
        self.index, _ = parts.read_tail(self.part, self.tail)

    def fetch(self, wanted: Wanted) -> None:
        """Read items into memory. Raises Damaged when no holder has them whole, OutOfReach when none can be reached."""
        rest = []
        for number, into in wanted:
            if number in self.small:
                into[:] = self.small[number]
            else:
                rest.append((number, into))
        if rest:
            self._read(lambda _: rest)

    def _read(self, chosen: Callable[[Source], Wanted]) -> Wanted:
        """Read what is chosen of the first copy that can be read. Raises Damaged when none is left, OutOfReach."""
        since = None
        with stall.watch().alive():
            for attempt in itertools.count():
                for holder in sorted(self._left, key=lambda each: each.address in self._of.away):
                    where = f"(in the memory of worker {holder.part.worker}, at {holder.address})"
                    try:
                        with self._of.client.open(holder.part, holder.address) as source:
                            source.fetch(wanted := chosen(source))
                    except Damaged as problem:
                        self._left.remove(holder)
                        if not self._left:
                            raise
                        self._of.say(f"{problem} {where}; another copy is read")
                    except OutOfReach as problem:
                        since = since or time.monotonic()
                        if time.monotonic() - since > PATIENCE_S:
                            raise
                        if holder.address not in self._of.away:
                            self._of.say(f"{problem} {where}; it is tried again, as are other copies")
                        self._of.away.add(holder.address)
                    else:
                        size, near = sum(into.nbytes for _, into in wanted), holder.address == self._of.client.address
                        self.near, self.far = self.near + size * near, self.far + size * (not near)
                        self._of.away.discard(holder.address)
                        return wanted
                time.sleep(backoff.jittered(backoff.exponential(attempt, *_PAUSE_S)))
        raise AssertionError


class Reader(StorageReader):
    """A snapshot, for torch.distributed.checkpoint: `learn` comes first."""

    def __init__(self, candidate: Candidate, client: Client, rank: int, say: Callable[[str], None]) -> None:
        """`say` is called with a sentence for each copy that could not be used."""
        self.client, self.say = client, say
        self.away: set[str] = set()
        """Holders that could not be reached when they were last tried."""
        self._candidate, self._rank = candidate, rank
        self._unique: dict[int, _Part] = {}
        """By rank of the world that made the snapshot."""
        self._shared: list[_Part] = []
        self._parts: list[_Part] = []
        self._places: dict[MetadataIndex, tuple[int, int]] = {}
        """The part and the number of the item, by where it belongs."""

    def learn(self, told: Told | None = None) -> Told:
        """Read which items there are, except for what was `told`. Returns what rank 0 is to tell. Raises Damaged, OutOfReach."""
        tails, items = told or ({}, {})
        unique = self._candidate.unique
        if not self._parts:
            for number in dict.fromkeys((self._rank, 0) if self._rank < len(unique) else (0,)):  # ours first: some have the same
                tail = tails.get(_key(unique[number][0].part)) if number == 0 else None
                self._unique[number] = _Part(self, unique[number], self._rank + number, tail=tail, small=True)
            self._unique[0].small |= items
            self._shared = self._set(tails)
            self._describe()
        known = {_key(each.part): each.tail for each in (self._unique[0], *self._shared)}
        return known, self._unique[0].small

    def covers(self, wanted: Flat) -> bool:
        """Whether the parts that are known hold this rank's chunk of every tensor, as this rank would save it."""
        tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
        for key, local, _, offsets in capture.chunks(tensors):
            number, place = self._places.get(MetadataIndex(key, offsets), (-1, 0))
            if number < 0 or self._parts[number].index[place].chunk != tuple(local.shape):
                return False
        return True

    def add(self, tails: Mapping[int, bytes]) -> None:
        """Know what every rank alone had, by the `tails` of these ranks' parts. Raises Damaged, OutOfReach."""
        for number, holders in enumerate(self._candidate.unique):
            if number not in self._unique:
                tail = zlib.decompress(tails[number]) if number in tails else None
                self._unique[number] = _Part(self, holders, self._rank + number, tail=tail)
        self._describe()

    def _set(self, tails: Mapping[Key, bytes]) -> list[_Part]:
        """One whole set of shared parts: our own worker's, if it has one."""
        own = self.client.address
        sets = sorted(self._candidate.shared, key=lambda each: own not in {holder.address for holder in each[0]})
        for those in sets:
            try:
                return [_Part(self, holders, self._rank, tail=tails.get(_key(holders[0].part))) for holders in those]
            except Damaged as problem:
                if those is sets[-1]:
                    raise
                self.say(f"{problem}; what every rank had is read from another worker")
        raise AssertionError

    @property
    def near(self) -> int:
        """Bytes read from our own agent."""
        return sum(part.near for part in self._parts)

    @property
    def far(self) -> int:
        """Bytes read from others."""
        return sum(part.far for part in self._parts)

    def extra(self) -> bytes:
        """What rank 0's session added."""
        rank0 = self._unique[0]
        return next((rank0.small[n] for n, item in enumerate(rank0.index) if item.key == capture.EXTRA), b"{}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is."""
        return self._metadata

    def _describe(self) -> None:
        """Say which keys there are, of which shape, in which chunks. Raises Damaged for what is no tensor of torch's."""
        self._parts, self._places = [*self._unique.values(), *self._shared], {}
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for number, part in enumerate(self._parts):
            for place, item in enumerate(part.index):
                offsets = torch.Size(item.offsets) if item.dtype != "bytes" else None
                index = MetadataIndex(item.key, offsets)
                if index in self._places:  # of a shard that several ranks have
                    continue
                self._places[index] = number, place
                if offsets is None:
                    known[item.key] = BytesStorageMetadata()
                    continue
                chunk = ChunkStorageMetadata(offsets, torch.Size(item.chunk))
                tensor = known.setdefault(
                    item.key, TensorStorageMetadata(TensorProperties(dtype=_dtype(item)), torch.Size(item.size), [])
                )
                if not isinstance(tensor, TensorStorageMetadata) or tensor.size != torch.Size(item.size):
                    raise Damaged(f"{item.key:.80} has two shapes in a snapshot")
                tensor.chunks.append(chunk)
        self._metadata = Metadata(known, storage_data=self._places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `read_metadata` has."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: it reads one snapshot."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, part by part. Raises Damaged, OutOfReach."""
        wanted: dict[int, list[tuple[int, ReadItem]]] = {}
        for request in plan.items:
            number, place = self._places[_index(request)]
            wanted.setdefault(number, []).append((place, request))
        for number, requests in wanted.items():
            _read(self._parts[number], requests, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def tails(candidate: Candidate, client: Client, share: tuple[int, int]) -> dict[int, bytes]:
    """The tails of what ranks alone had and this worker is the first to hold, compressed; its ranks divide them by `share`.

    What cannot be read is left out: then each rank reads that index itself.
    """
    found = {}
    for number, holders in enumerate(candidate.unique):
        if holders[0].address == client.address and number % share[1] == share[0]:
            with contextlib.suppress(Damaged, OutOfReach), client.open(holders[0].part) as source:
                found[number] = zlib.compress(source.tail, 1)
    return found


def _key(part: Part) -> Key:
    return part.kind, part.local_rank, part.digest


def _small(item: Item) -> bool:
    return item.dtype == "bytes" or (item.chunk == item.size and item.nbytes <= _SMALL)


def _index(request: ReadItem) -> MetadataIndex:
    return MetadataIndex(request.storage_index.fqn, request.storage_index.offset)


def _dtype(item: Item) -> torch.dtype:
    found = getattr(torch, item.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(f"{item.key:.80} of a snapshot has no type of torch's: {item.dtype:.40}")
    return found


def _read(part: _Part, requests: Sequence[tuple[int, ReadItem]], planner: LoadPlanner) -> None:
    """Read some items of one part: into the tensors themselves, or into memory of which a slice is copied."""
    into: dict[int, memoryview] = {}
    direct: list[tuple[int, memoryview]] = []
    finish: list[Callable[[], None]] = []
    for place, request in requests:
        item = part.index[place]
        if request.type == LoadItemType.BYTE_IO:
            data = into.setdefault(place, memoryview(bytearray(item.nbytes)))
            finish.append(lambda request=request, data=data: planner.load_bytes(request, _boxed(data)))  # type: ignore[misc]
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
    """The bytes of a contiguous tensor on the CPU, to be written."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _boxed(data: memoryview) -> io.BytesIO:
    """Bytes as torch.distributed.checkpoint stores them."""
    box = io.BytesIO()
    torch.save(bytes(data), box, _use_new_zipfile_serialization=False)
    box.seek(0)
    return box
