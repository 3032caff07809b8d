"""Copies the state directly into the agent's memory, at every k-th step boundary.

A rank divides its state into two parts (`Layout`): `shared` has its share of the replicated tensors, and `unique` its shards, its
random numbers and, on rank 0, buffers and pickled objects. Tensors are cut into chunks as by torch.distributed.checkpoint, keyed
by their offsets in the whole tensor, so a snapshot fits a world of any size. Since `state_dict` is expensive, a layout is reused
as long as all tensors have the same identity and address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from outlast.job import differing_ranks
from outlast.storage.snapshots import part_format
from outlast.storage.snapshots.client import Room
from outlast.storage.snapshots.part_format import Item, Kind
from outlast.training import device
from outlast.training.state import checkpoint, memory_copies
from outlast.training.state.checkpoint import Collected, State

EXTRA = ".session"
"""Key of rank 0's additional data; no name in a state begins with a dot."""
_ROOM = 1 << 16
"""Sizes of rooms are rounded up to a multiple of at least this many bytes, since pickled objects vary in size and rooms are
reused."""
_ROOMS = 6
"""Maximum number of mapped and pinned rooms. Snapshots alternate between two rooms of each kind."""

Signature = tuple[object, ...]


@dataclasses.dataclass
class Content:
    """The contents of a part: chunks of tensors in a fixed order, followed by pickled objects."""

    kind: Kind
    chunks: list[tuple[str, torch.Tensor, torch.Size, torch.Size]]
    """Key, local tensor, size of the whole tensor, and the offsets of the local tensor in it."""
    index: list[Item] = dataclasses.field(default_factory=list)
    end: int = 0
    """Total size of the chunks in bytes."""
    share: int = 0
    """Index of this rank's share of the replicated state (`job.differing_ranks`)."""
    largest: int = 0
    """Size of the largest share in bytes: a room must hold any share."""

    def lay_out(self) -> None:
        places, self.end = part_format.laid_out(tensor.nbytes for _, tensor, _, _ in self.chunks)
        self.index = [
            Item(
                key,
                str(tensor.dtype).removeprefix("torch."),
                tuple(size),
                tuple(offsets),
                tuple(tensor.shape),
                place,
                tensor.nbytes,
            )
            for (key, tensor, size, offsets), place in zip(self.chunks, places, strict=True)
        ]


class Layout:
    """A state's parts on one rank."""

    def __init__(self, state: State, collected: Collected, rank: int, share: int, shares: int) -> None:
        """`share` is the index of this rank's share of the replicated state; a worker has one per rank."""
        whole = {key: value for key, value in collected.everybody.items() if not isinstance(value, DTensor)}
        dealt = [sorted(keys) for keys in checkpoint.dealt(whole, shares)]
        shards = {key: value for key, value in collected.everybody.items() if key not in whole}
        firsts = {key: value for key, value in collected.rank0.items() if isinstance(value, torch.Tensor)} if rank == 0 else {}
        ends = [part_format.laid_out(whole[key].nbytes for key in keys)[1] for keys in dealt]
        shared = Content("shared", chunks({key: whole[key] for key in dealt[share]}), share=share, largest=max(ends))
        unique = Content("unique", chunks({**shards, **firsts}), share=share)
        self.contents = shared, unique
        for content in self.contents:
            content.lay_out()
        self.signature = _signature(state)
        self.groups = {key: _groups(thing, collected.rank0[f"{key}/rest"]) for key, thing in _optimizers(state)}
        pointers = set(self.signature)
        tensors = [tensor for content in self.contents for _, tensor, _, _ in content.chunks]
        self.reusable = (
            all(tensor.data_ptr() in pointers for tensor in tensors)
            and all(self.groups.values())
            and not any(f"{name}/rest" in collected.rank0 for name, thing in state.items() if isinstance(thing, torch.nn.Module))
        )
        """True if the layout is valid while the signature stays the same: no tensor was created just for the state dict."""


def chunks(flat: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Size, torch.Size]]:
    """Cut tensors into this rank's chunks, as torch.distributed.checkpoint would. Returns them in the format of
    `Content.chunks`."""
    items: Sequence[WriteItem] = create_default_local_save_plan(dict(flat), True).items
    chunks = []
    for item in items:
        data = item.tensor_data
        assert data is not None
        key = item.index.fqn
        local = _local(flat[key])
        if local.nbytes or not isinstance(flat[key], DTensor):  # a shard is empty if the world has more ranks than rows
            chunks.append((key, local, data.size, data.chunk.offsets))
    return chunks


def _address(tensor: torch.Tensor) -> int:
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _optimizers(state: State) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    return ((name, thing) for name, thing in state.items() if isinstance(thing, torch.optim.Optimizer))


def _signature(state: State) -> Signature:
    """Return a value that changes with the identity, address or shape of the tensors and with the optimizers' parameter
    groups."""
    signature: list[object] = []
    for thing in state.values():
        tensors: list[Any] = []
        if isinstance(thing, torch.nn.Module):
            tensors = [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.optim.Optimizer):
            for group in thing.param_groups:
                signature.append("group")
                for parameter in group["params"]:
                    signature.append(id(parameter))
                    tensors += thing.state[parameter].values() if parameter in thing.state else ()
        for tensor in tensors:
            is_tensor = isinstance(tensor, torch.Tensor)
            signature += (id(tensor), _address(tensor), tensor.shape, tensor.stride()) if is_tensor else ("no tensor",)
    return tuple(signature)


def _groups(optimizer: torch.optim.Optimizer, rest: bytes) -> list[list[str]] | None:
    """Return the parameter names of each group, or None if they do not suffice to rebuild the optimizer's `rest`."""
    state = checkpoint.unpickled(rest, "optimizer")
    if state["others"] or [set(group) for group in state["groups"]] != [set(group) for group in optimizer.param_groups]:
        return None
    return [group["params"] for group in state["groups"]]


def _rest(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, Any]:
    """Return the part of an optimizer's state that has no tensors, in the format of `checkpoint.collected`."""
    groups = [{**group, "params": params} for group, params in zip(optimizer.param_groups, names, strict=True)]
    return {"kind": type(optimizer).__name__, "groups": groups, "others": {}}


class Capture:
    """Copies of one rank's state, and the rooms that hold them."""

    def __init__(self, state: State, rank: int, local: tuple[int, int], accelerator: device.Device | None = None) -> None:
        self._state, self._rank, self._local = state, rank, local
        self._accelerator = accelerator or device.find()
        self._layouts: dict[int, Layout] = {}
        """Layouts of the current state, keyed by share."""
        self._views: dict[tuple[Kind, int, int], list[torch.Tensor]] = {}
        """The tensors in a room, one per chunk, keyed by kind, room and share."""
        self._rooms: dict[int, tuple[torch.Tensor, bool]] = {}
        """The memory of each room, and whether it is pinned. The least recently used room comes first."""
        self._stream = self._accelerator.copy_stream()
        self.hooks: list[Any] = []
        if (stream := self._stream) is not None:
            for _, optimizer in _optimizers(state):
                self.hooks.append(optimizer.register_step_pre_hook(lambda *_: stream.before_changes()))

    @property
    def in_background(self) -> bool:
        """True if copies continue after `copy` has returned."""
        return self._stream is not None

    def prepare(self, extra: bytes, turn: int = 0) -> list[tuple[Content, dict[str, bytes]]]:
        """Return the current state's parts, each with its pickled objects. Nothing is copied yet. `turn`, the number of snapshots
        so far, determines this rank's share."""
        local_rank, local_ranks = self._local
        share = differing_ranks.share(local_rank, turn, local_ranks)
        layout, objects = self._layouts.get(share), None
        if layout is None or not layout.reusable or layout.signature != _signature(self._state):
            collected = checkpoint.collected(self._state, self._rank)
            layout = Layout(self._state, collected, self._rank, share, local_ranks)
            if not all(each.reusable and each.signature == layout.signature for each in self._layouts.values()):
                self._layouts.clear()
                self._views.clear()
            self._layouts[share] = layout
            objects = {key: value for key, value in collected.own.items() if isinstance(value, bytes)}
            if self._rank == 0:
                objects |= {key: value for key, value in collected.rank0.items() if isinstance(value, bytes)}
        if objects is None:
            objects = self._objects(layout)
        if self._rank == 0:
            objects[EXTRA] = extra
        shared, unique = layout.contents
        return [(shared, {}), (unique, objects)]

    def _objects(self, layout: Layout) -> dict[str, bytes]:
        """Return the state's pickled objects, as `checkpoint.collected` does, but without its checks, which they have already
        passed."""
        quickly = checkpoint.quickly_pickled
        objects = {f"rng/{self._rank}": quickly(checkpoint.generators())}
        for name, thing in self._state.items():
            if hasattr(thing, "loader_state"):
                objects[f"{name}/{self._rank}"] = quickly(thing.loader_state())
            if isinstance(thing, torch.optim.Optimizer):
                rest: dict[str, Any] | None = _rest(thing, layout.groups[name] or [])
                name = f"{name}/rest"
            else:  # every rank calls `state_dict`, since it may be a collective
                rest = None if isinstance(thing, torch.nn.Module) else thing.state_dict()
            if rest is not None and self._rank == 0:
                objects[name] = quickly(rest)
        return objects

    def copy(self, rooms: Sequence[tuple[Content, Room]]) -> Callable[[], None]:
        """Copy tensors into their rooms. Returns a function that waits for the copies; on the CPU they are already done. On an
        accelerator, tensors that only optimizers change are copied in parallel with the next step, up to its optimizer step.
        Other tensors are copied before the next forward pass, which may change them. Tensors on other devices are copied before
        the call returns."""
        self._make_room([room for _, room in rooms])
        pairs = [
            pair
            for content, room in rooms
            for pair in zip(self._into(content, room), (tensor for _, tensor, _, _ in content.chunks), strict=True)
        ]
        stream, accelerator = self._stream, self._accelerator
        accelerator.mark_step()
        if stream is None:
            memory_copies.copy(pairs)
            accelerator.synchronize()
            return lambda: None
        changed = _changed(self._state)
        memory_copies.copy([pair for pair in pairs if not stream.covers(pair[1])], background=False)
        covered = [pair for pair in pairs if stream.covers(pair[1])]
        stream.queue([pair for pair in covered if pair[1].data_ptr() not in changed])
        with stream.copying():
            stream.queue([pair for pair in covered if pair[1].data_ptr() in changed])

        def wait() -> None:
            stream.wait()
            pairs.clear()  # the references kept the memory of the copied tensors

        return wait

    def _make_room(self, rooms: Sequence[Room]) -> None:
        for room in rooms:
            entry = self._rooms.pop(room.id, None)
            if entry is None:
                memory = torch.frombuffer(room.whole, dtype=torch.uint8)
                entry = memory, self._accelerator.register(memory)
            self._rooms[room.id] = entry
        self._release(list(self._rooms)[:-_ROOMS])  # otherwise rooms that the agent has dropped would stay mapped

    def _release(self, rooms: Sequence[int]) -> None:
        for key in [key for key in self._views if key[1] in rooms]:
            del self._views[key]
        for id in rooms:
            memory, pinned = self._rooms.pop(id)
            if pinned:
                self._accelerator.unregister(memory)

    def close(self) -> None:
        """Wait for copies in progress, and release all memory."""
        if self._stream is not None:
            self._stream.wait()
        self._release(list(self._rooms))

    def _into(self, content: Content, room: Room) -> list[torch.Tensor]:
        views = self._views.pop((content.kind, room.id, content.share), None)
        if views is None:
            memory = self._rooms[room.id][0][part_format.PAGE :]
            views = [
                memory[item.place : item.place + item.nbytes].view(tensor.dtype).view(tensor.shape)
                for item, (_, tensor, _, _) in zip(content.index, content.chunks, strict=True)
            ]
        self._views[content.kind, room.id, content.share] = views
        return views


def _changed(state: State) -> set[int]:
    return {
        _address(tensor)
        for _, optimizer in _optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    }


def size(content: Content, objects: Mapping[str, bytes]) -> int:
    """Return the size of a part's room in bytes, including a reserve."""
    _, more = part_format.laid_out(map(len, objects.values()))
    unit = max(_ROOM, 1 << more.bit_length() >> 4)  # a finer unit would need many new rooms for objects that grow steadily
    return -(-(max(content.end, content.largest) + more + 1) // unit) * unit


def write_objects(content: Content, objects: Mapping[str, bytes], room: Room) -> tuple[list[Item], int]:
    """Write a part's objects into its room, after the tensors. Returns the part's index and its size in bytes."""
    places, end = part_format.laid_out(map(len, objects.values()))
    index = list(content.index)
    for (key, data), place in zip(objects.items(), places, strict=True):
        at = content.end + place
        room.view[at : at + len(data)] = data
        index.append(Item(key, "bytes", (), (), (), at, len(data)))
    return index, content.end + end
