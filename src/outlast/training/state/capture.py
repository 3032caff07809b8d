"""Copies the state of a step boundary directly into the agent's memory, at every k-th step of training.

A state is sorted into two parts (`Layout`): replicated tensors are sharded over the worker's ranks (`shared`); `unique` is the
state that this rank alone has: its shards, its random numbers, and on rank 0 buffers and pickled objects. Tensors are cut into
chunks as by torch.distributed.checkpoint, keyed by their offsets in the whole tensor, so a snapshot fits a world of any size.

Calling `state_dict` of modules and optimizers costs more than copying a small state. So the layout is reused as long as all
tensors are the same (by identity and address), and only objects are pickled again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from outlast.storage.snapshots import parts
from outlast.storage.snapshots.client import Room
from outlast.storage.snapshots.parts import Item, Kind
from outlast.training import device
from outlast.training.state import checkpoint, copying
from outlast.training.state.checkpoint import Collected, State
from outlast.training.state.stateful import Stateful

EXTRA = ".session"
"""Key of rank 0's additional data; no name in a state begins with a dot."""
_ROOM = 1 << 16
"""Minimum granularity of room sizes: pickled objects vary in size, and rooms are reused."""
_ROOMS = 6
"""Maximum number of rooms that stay mapped and pinned, of both kinds together; two of each kind are used in turn."""

Signature = tuple[object, ...]


@dataclasses.dataclass
class Content:
    """A part that has no room yet: chunks of tensors first, in a fixed order, then bytes."""

    kind: Kind
    chunks: list[tuple[str, torch.Tensor, torch.Size, torch.Size]]
    """Key, local tensor, size of the whole tensor, and the offsets of the local tensor in it."""
    index: list[Item] = dataclasses.field(default_factory=list)
    """An item for each chunk."""
    end: int = 0
    """Total bytes of the chunks."""

    def lay_out(self) -> None:
        places, self.end = parts.laid_out(tensor.nbytes for _, tensor, _, _ in self.chunks)
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
    """The parts of a state on one rank."""

    def __init__(self, state: State, collected: Collected, rank: int, local: tuple[int, int]) -> None:
        """`local` is the local rank and the number of ranks of this worker."""
        whole = {key: value for key, value in collected.everybody.items() if not isinstance(value, DTensor)}
        assigned = checkpoint.assigned_keys(whole, *local)
        shards = {key: value for key, value in collected.everybody.items() if key not in whole}
        firsts = {key: value for key, value in collected.rank0.items() if isinstance(value, torch.Tensor)} if rank == 0 else {}
        shared = Content("shared", chunks({key: whole[key] for key in sorted(assigned)}))
        unique = Content("unique", chunks({**shards, **firsts}))
        self.contents = shared, unique
        for content in self.contents:
            content.lay_out()
        self.signature = _signature(state)
        self.groups = {key: _groups(thing, collected.rank0[f"{key}/rest"]) for key, thing in _optimizers(state)}
        pointers = set(self.signature)
        tensors = [tensor for content in self.contents for _, tensor, _, _ in content.chunks]
        self.lasting = (
            all(tensor.data_ptr() in pointers for tensor in tensors)
            and all(self.groups.values())
            and not any(f"{name}/rest" in collected.rank0 for name, thing in state.items() if isinstance(thing, torch.nn.Module))
        )
        """Whether the layout is valid as long as the signature is: no tensor was created just for the state dict."""


def chunks(flat: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Size, torch.Size]]:
    """This rank's chunks of these tensors, as torch.distributed.checkpoint would write them."""
    items: Sequence[WriteItem] = create_default_local_save_plan(dict(flat), True).items
    chunks = []
    for item in items:
        data = item.tensor_data
        assert data is not None
        key = item.index.fqn
        local = _local(flat[key])
        if local.nbytes or not isinstance(flat[key], DTensor):  # empty if there are more ranks than rows
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
    """A value that stays equal while the tensors of modules and optimizers are the same objects in the same memory, of the same
    shape, and the groups of optimizers have the same parameters."""
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
    """The parameter names of each group, if these suffice to write the optimizer's `rest` again; otherwise None."""
    state = checkpoint.unpickled(rest, "optimizer")
    if state["others"] or [set(group) for group in state["groups"]] != [set(group) for group in optimizer.param_groups]:
        return None
    return [group["params"] for group in state["groups"]]


def _rest(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state without tensors, as `checkpoint.collected` returns it."""
    groups = [{**group, "params": params} for group, params in zip(optimizer.param_groups, names, strict=True)]
    return {"kind": type(optimizer).__name__, "groups": groups, "others": {}}


class Capture:
    def __init__(self, state: State, rank: int, local: tuple[int, int], accelerator: device.Device | None = None) -> None:
        """`accelerator` defaults to the one of this machine."""
        self._state, self._rank, self._local = state, rank, local
        self._accelerator = accelerator or device.find()
        self._layout: Layout | None = None
        self._views: dict[tuple[Kind, int], list[torch.Tensor]] = {}
        """A tensor in the room for each chunk, by kind and room."""
        self._rooms: dict[int, tuple[torch.Tensor, bool]] = {}
        """All memory of each room, and whether it is pinned; the least recently used room first."""
        self._beside = self._accelerator.beside()
        if (beside := self._beside) is not None:
            for _, optimizer in _optimizers(state):
                optimizer.register_step_pre_hook(lambda *_: beside.before_changes())

    @property
    def beside(self) -> bool:
        """Whether copies continue after `copy` has returned."""
        return self._beside is not None

    def prepare(self, extra: bytes) -> list[tuple[Content, dict[str, bytes]]]:
        """The parts of the present state, and the pickled objects that belong to them; nothing is copied yet."""
        layout, objects = self._layout, None
        if layout is None or not layout.lasting or layout.signature != _signature(self._state):
            collected = checkpoint.collected(self._state, self._rank)
            layout = self._layout = Layout(self._state, collected, self._rank, self._local)
            self._views.clear()
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
        """Everything but tensors, as `checkpoint.collected` returns it, without its checks, which have already passed."""
        quickly = checkpoint.quickly_pickled
        objects = {f"rng/{self._rank}": quickly(checkpoint.generators())}
        for name, thing in self._state.items():
            if isinstance(thing, Stateful):
                objects[f"{name}/{self._rank}"] = quickly(thing.loader_state())
            if isinstance(thing, torch.optim.Optimizer):
                rest: dict[str, Any] | None = _rest(thing, layout.groups[name] or [])
                name = f"{name}/rest"
            else:  # on every rank: it may be a collective
                rest = None if isinstance(thing, torch.nn.Module) else thing.state_dict()
            if rest is not None and self._rank == 0:
                objects[name] = quickly(rest)
        return objects

    def copy(self, rooms: Sequence[tuple[Content, Room]]) -> Callable[[], None]:
        """Copy tensors into their rooms. Returns a function that waits for the copies; on the CPU they are already done.

        On an accelerator, tensors that only optimizers change are copied in parallel with the next step, until its optimizer
        step; other tensors may be changed by the next forward pass, so they are copied in the order of the computation. Tensors
        on other devices have been copied when this returns.
        """
        self._make_room([room for _, room in rooms])
        pairs = [
            pair
            for content, room in rooms
            for pair in zip(self._into(content, room), (tensor for _, tensor, _, _ in content.chunks), strict=True)
        ]
        beside, accelerator = self._beside, self._accelerator
        accelerator.mark_step()
        if beside is None:
            copying.copy(pairs)
            accelerator.synchronize()
            return lambda: None
        changed = _changed(self._state)
        copying.copy([pair for pair in pairs if not beside.covers(pair[1])], background=False)
        covered = [pair for pair in pairs if beside.covers(pair[1])]
        beside.queue([pair for pair in covered if pair[1].data_ptr() not in changed])
        with beside.copying():
            beside.queue([pair for pair in covered if pair[1].data_ptr() in changed])

        def wait() -> None:
            beside.wait()
            pairs.clear()  # until now the references kept the memory of these tensors

        return wait

    def _make_room(self, rooms: Sequence[Room]) -> None:
        """Pin the memory of rooms, and release the least recently used ones."""
        for room in rooms:
            entry = self._rooms.pop(room.id, None)
            if entry is None:
                memory = torch.frombuffer(room.whole, dtype=torch.uint8)
                entry = memory, self._accelerator.register(memory)
            self._rooms[room.id] = entry
        self._let_go(list(self._rooms)[:-_ROOMS])  # else rooms that the agent has given up stay mapped

    def _let_go(self, rooms: Sequence[int]) -> None:
        for key in [key for key in self._views if key[1] in rooms]:
            del self._views[key]
        for id in rooms:
            memory, pinned = self._rooms.pop(id)
            if pinned:
                self._accelerator.unregister(memory)

    def close(self) -> None:
        """Wait for copies in progress, and release all memory."""
        if self._beside is not None:
            self._beside.wait()
        self._let_go(list(self._rooms))

    def _into(self, content: Content, room: Room) -> list[torch.Tensor]:
        """Tensors in the room, one for each chunk."""
        views = self._views.pop((content.kind, room.id), None)
        if views is None:
            memory = self._rooms[room.id][0][parts.PAGE :]
            views = [
                memory[item.place : item.place + item.nbytes].view(tensor.dtype).view(tensor.shape)
                for item, (_, tensor, _, _) in zip(content.index, content.chunks, strict=True)
            ]
        self._views[content.kind, room.id] = views
        return views


def _changed(state: State) -> set[int]:
    """Addresses of the tensors that the optimizers of a state change."""
    return {
        _address(tensor)
        for _, optimizer in _optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    }


def size(content: Content, objects: Mapping[str, bytes]) -> int:
    """Bytes of the room for a part, with a reserve."""
    _, more = parts.laid_out(map(len, objects.values()))
    unit = max(_ROOM, 1 << more.bit_length() >> 4)  # objects that grow steadily need a new room after an eighth at most
    return -(-(content.end + more + 1) // unit) * unit


def placed(content: Content, objects: Mapping[str, bytes], room: Room) -> tuple[list[Item], int]:
    """Write the objects of a part into its room, after the tensors. Returns the part's index and its size in bytes."""
    places, end = parts.laid_out(map(len, objects.values()))
    index = list(content.index)
    for (key, data), place in zip(objects.items(), places, strict=True):
        at = content.end + place
        room.view[at : at + len(data)] = data
        index.append(Item(key, "bytes", (), (), (), at, len(data)))
    return index, content.end + end
