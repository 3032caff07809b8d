"""Reads a snapshot from the memory of workers as torch.distributed.checkpoint reads a checkpoint.

Parts in this worker's own memory come from there, the others straight from the agents that hold them, into the tensors
themselves where these are contiguous. Every item is verified. If one cannot be read or is damaged, the next worker that holds
the part is asked; the ranks of a world begin with different ones.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
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

from outlast.snapshots.client import Client, Source
from outlast.snapshots.election import Candidate, Holders
from outlast.snapshots.parts import Damaged, Item
from outlast.training import capture

Say = Callable[[str], None]


class _Part:
    """One part, at the first of its holders that can be read."""

    def __init__(self, client: Client, holders: Holders, turn: int, say: Say) -> None:
        """`turn`: which of the others is first asked if our own agent does not have it. Raises Damaged."""
        near = [each for each in holders if each.address == client.address]
        far = [each for each in holders if each.address != client.address]
        turn %= len(far) or 1
        self._left = [*near, *far[turn:], *far[:turn]]
        self._client, self._say = client, say
        self.near = self.far = 0
        """Bytes read from our own agent, and from others."""
        self._source = self._opened()
        self.index = self._source.index

    def _opened(self) -> Source:
        """The part at the next holder. Raises Damaged when there is none."""
        while True:
            holder = self._left[0]
            try:
                return self._client.open(holder.part, holder.address)
            except Damaged as problem:
                self._next(problem)

    def _next(self, problem: Damaged) -> None:
        holder = self._left.pop(0)
        if not self._left:
            raise problem
        self._say(f"{problem} (in the memory of worker {holder.part.worker}, at {holder.address}); another copy is read")

    def fetch(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Read items into memory. Raises Damaged when no holder has them whole."""
        while True:
            try:
                self._source.fetch(wanted)
            except Damaged as problem:
                self._source.close()
                self._next(problem)
                self._source = self._opened()
            else:
                size = sum(into.nbytes for _, into in wanted)
                if self._left[0].address == self._client.address:
                    self.near += size
                else:
                    self.far += size
                return

    def close(self) -> None:
        self._source.close()


class Reader(StorageReader):
    """A snapshot, for torch.distributed.checkpoint. Close it."""

    def __init__(self, candidate: Candidate, client: Client, rank: int, say: Say) -> None:
        """`say` is called with a sentence for each copy that could not be used. Raises Damaged."""
        self._parts: list[_Part] = []
        self._places: dict[MetadataIndex, tuple[int, int]] = {}
        """The part and the number of the item, by where it belongs."""
        with contextlib.ExitStack() as stack:
            for number, holders in enumerate(candidate.unique):
                self._parts.append(_Part(client, holders, rank + number, say))
                stack.callback(self._parts[-1].close)
            self._add_shared(stack, candidate, client, rank, say)
            self._metadata = self._described()
            self._stack = stack.pop_all()

    def _add_shared(self, stack: contextlib.ExitStack, candidate: Candidate, client: Client, rank: int, say: Say) -> None:
        """Add one whole set of shared parts: our own worker's, if it has one."""
        near = [each for each in candidate.shared if all(client.address in {h.address for h in holders} for holders in each)]
        far = [each for each in candidate.shared if each not in near]
        turn = rank % (len(far) or 1)
        sets = [*near, *far[turn:], *far[:turn]]
        for number, those in enumerate(sets):
            try:
                with contextlib.ExitStack() as inner:
                    opened = []
                    for local in range(len(those)):
                        opened.append(_Part(client, self._everywhere(local, sets[number:]), rank, say))
                        inner.callback(opened[-1].close)
                    stack.push(inner.pop_all())
                self._parts += opened
                return
            except Damaged as problem:
                if number + 1 == len(sets):
                    raise
                say(f"{problem}; what every rank had is read from another worker")

    @staticmethod
    def _everywhere(local: int, sets: Sequence[tuple[Holders, ...]]) -> Holders:
        """Who has this part of the first set, byte for byte: other workers may have dealt it in the same way."""
        first = sets[0][local][0].part
        same = [h for each in sets if len(each) == len(sets[0]) for h in each[local] if h.part.digest == first.digest]
        return tuple(same)

    @property
    def near(self) -> int:
        """Bytes read from our own agent."""
        return sum(part.near for part in self._parts)

    @property
    def far(self) -> int:
        """Bytes read from others."""
        return sum(part.far for part in self._parts)

    def close(self) -> None:
        self._stack.close()

    def extra(self) -> bytes:
        """What rank 0's session added."""
        for part in self._parts:
            for number, item in enumerate(part.index):
                if item.key == capture.EXTRA:
                    data = bytearray(item.nbytes)
                    part.fetch([(number, memoryview(data))])
                    return bytes(data)
        return b"{}"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is."""
        return self._metadata

    def _described(self) -> Metadata:
        """Which keys there are, of which shape, in which chunks. Raises Damaged for what is no tensor of torch's."""
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
        return Metadata(known, storage_data=self._places, storage_meta=StorageMeta())

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
        """Read what the plan asks for, part by part. Raises Damaged."""
        wanted: dict[int, list[tuple[int, ReadItem]]] = {}
        for request in plan.items:
            number, place = self._places[_index(request)]
            wanted.setdefault(number, []).append((place, request))
        for number, requests in wanted.items():
            _read(self._parts[number], requests, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


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
