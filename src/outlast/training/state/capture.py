"""Copies the state of one step boundary into memory of the agent, straight and fast, at every k-th step of a training.

A state is sorted into two parts (`Layout`): what every rank has is dealt over the ranks of the worker (`shared`), what this rank
alone has is `unique`: its shards, its random numbers, and on rank 0 buffers and pickled objects. Chunks of tensors are those of
torch.distributed.checkpoint, keyed by their place in the whole tensor, so a snapshot fits into a world of any size.

To ask modules and optimizers for their state costs more than to copy a small one. So the layout is kept as long as all tensors
are the same (by identity and address), and only pickled objects are made anew.
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
"""Key of what rank 0's session adds; no name in a state begins with a dot."""
_ROOM = 1 << 16
"""Rooms are multiples of this at least: pickled objects vary in size, and a room is to be used again."""
_ROOMS = 6
"""Rooms that stay mapped and pinned, of both kinds together; two of each are used in turn."""

Signature = tuple[object, ...]


@dataclasses.dataclass
class Content:
    """One part, before it has a place: chunks of tensors first, in an order that does not change, then bytes."""

    kind: Kind
    chunks: list[tuple[str, torch.Tensor, torch.Size, torch.Size]]
    """Key, local tensor, size of the whole tensor, and offsets in it."""
    index: list[Item] = dataclasses.field(default_factory=list)
    """Of the chunks."""
    end: int = 0
    """Bytes that they take."""

    def lay_out(self) -> None:
        """Give each chunk its place."""
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

    def __init__(self, state: State, found: Collected, rank: int, local: tuple[int, int]) -> None:
        """`local`: this rank's number among how many of its worker."""
        whole = {key: value for key, value in found.everybody.items() if not isinstance(value, DTensor)}
        ours = checkpoint.dealt(whole, *local)
        shards = {key: value for key, value in found.everybody.items() if key not in whole}
        firsts = {key: value for key, value in found.firsts.items() if isinstance(value, torch.Tensor)} if rank == 0 else {}
        shared = Content("shared", chunks({key: whole[key] for key in sorted(ours)}))
        unique = Content("unique", chunks({**shards, **firsts}))
        self.contents = shared, unique
        for content in self.contents:
            content.lay_out()
        self.signature = _signature(state)
        self.groups = {key: _groups(thing, found.firsts[f"{key}/rest"]) for key, thing in _optimizers(state)}
        pointers = set(self.signature)
        tensors = [tensor for content in self.contents for _, tensor, _, _ in content.chunks]
        self.lasting = (
            all(tensor.data_ptr() in pointers for tensor in tensors)
            and all(self.groups.values())
            and not any(f"{name}/rest" in found.firsts for name, thing in state.items() if isinstance(thing, torch.nn.Module))
        )
        """Whether it holds as long as the signature does: every tensor is one that we can see, not made for the state dict."""


def chunks(flat: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Size, torch.Size]]:
    """What this rank has of these tensors, as torch.distributed.checkpoint would write it."""
    items: Sequence[WriteItem] = create_default_local_save_plan(dict(flat), True).items
    found = []
    for item in items:
        data = item.tensor_data
        assert data is not None
        key = item.index.fqn
        local = _local(flat[key])
        if local.nbytes or not isinstance(flat[key], DTensor):  # there are more ranks than rows
            found.append((key, local, data.size, data.chunk.offsets))
    return found


def _address(tensor: torch.Tensor) -> int:
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _optimizers(state: State) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    return ((name, thing) for name, thing in state.items() if isinstance(thing, torch.optim.Optimizer))


def _signature(state: State) -> Signature:
    """Equal as long as the tensors of modules and optimizers are the same objects in the same memory, of the same shape, and the
    groups of optimizers have the same parameters."""
    found: list[object] = []
    for thing in state.values():
        tensors: list[Any] = []
        if isinstance(thing, torch.nn.Module):
            tensors = [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.optim.Optimizer):
            for group in thing.param_groups:
                found.append("group")
                for parameter in group["params"]:
                    found.append(id(parameter))
                    tensors += thing.state[parameter].values() if parameter in thing.state else ()
        for tensor in tensors:
            known = isinstance(tensor, torch.Tensor)
            found += (id(tensor), _address(tensor), tensor.shape, tensor.stride()) if known else ("no tensor",)
    return tuple(found)


def _groups(optimizer: torch.optim.Optimizer, rest: bytes) -> list[list[str]] | None:
    """The names of the parameters of each group, if that is all that has to be known to write the optimizer's `rest` again."""
    said = checkpoint.unpickled(rest, "optimizer")
    if said["others"] or [set(group) for group in said["groups"]] != [set(group) for group in optimizer.param_groups]:
        return None
    return [group["params"] for group in said["groups"]]


def _rest(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, Any]:
    """What `checkpoint.collected` finds of an optimizer beside tensors."""
    groups = [{**group, "params": known} for group, known in zip(optimizer.param_groups, names, strict=True)]
    return {"kind": type(optimizer).__name__, "groups": groups, "others": {}}


class Capture:
    """Captures one state on one rank, again and again."""

    def __init__(self, state: State, rank: int, local: tuple[int, int], accelerator: device.Device | None = None) -> None:
        """`accelerator`: this machine's, unless it is given."""
        self._state, self._rank, self._local = state, rank, local
        self._accelerator = accelerator or device.find()
        self._layout: Layout | None = None
        self._views: dict[tuple[Kind, int], list[torch.Tensor]] = {}
        """By kind and room: a tensor in it for each chunk."""
        self._rooms: dict[int, tuple[torch.Tensor, bool]] = {}
        """By room, the one used last at the end: all its memory, and whether it is pinned."""
        self._beside = self._accelerator.beside()
        if (beside := self._beside) is not None:
            for _, optimizer in _optimizers(state):
                optimizer.register_step_pre_hook(lambda *_: beside.before_changes())

    @property
    def beside(self) -> bool:
        """Whether copies go on after `copy` has returned."""
        return self._beside is not None

    def prepare(self, extra: bytes) -> list[tuple[Content, dict[str, bytes]]]:
        """The parts of the state as it is now, and the bytes that go with their tensors; nothing is copied yet."""
        layout, objects = self._layout, None
        if layout is None or not layout.lasting or layout.signature != _signature(self._state):
            found = checkpoint.collected(self._state, self._rank)
            layout = self._layout = Layout(self._state, found, self._rank, self._local)
            self._views.clear()
            objects = {key: value for key, value in found.mine.items() if isinstance(value, bytes)}
            if self._rank == 0:
                objects |= {key: value for key, value in found.firsts.items() if isinstance(value, bytes)}
        if objects is None:
            objects = self._objects(layout)
        if self._rank == 0:
            objects[EXTRA] = extra
        shared, unique = layout.contents
        return [(shared, {}), (unique, objects)]

    def _objects(self, layout: Layout) -> dict[str, bytes]:
        """Everything but tensors, as `checkpoint.collected` finds it, without the checks that it has passed before."""
        quickly = checkpoint.quickly_pickled
        found = {f"rng/{self._rank}": quickly(checkpoint.generators())}
        for name, thing in self._state.items():
            if isinstance(thing, Stateful):
                found[f"{name}/{self._rank}"] = quickly(thing.loader_state())
            if isinstance(thing, torch.optim.Optimizer):
                said: dict[str, Any] | None = _rest(thing, layout.groups[name] or [])
                name = f"{name}/rest"
            else:  # on every rank: it may be a collective
                said = None if isinstance(thing, torch.nn.Module) else thing.state_dict()
            if said is not None and self._rank == 0:
                found[name] = quickly(said)
        return found

    def copy(self, rooms: Sequence[tuple[Content, Room]]) -> Callable[[], None]:
        """Copy tensors into their rooms. Returns what waits for the copies; on the CPU they are there.

        On an accelerator what optimizers change is copied beside the next step, up to its optimizer; all else may be changed by
        the next forward pass, so it is copied in the order of the computation. What lies elsewhere has been copied on return.
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
            pairs.clear()  # until now nobody else could be given the memory of these tensors

        return wait

    def _make_room(self, rooms: Sequence[Room]) -> None:
        """Pin the memory of rooms, and let go of those that were not used for longest."""
        for room in rooms:
            known = self._rooms.pop(room.id, None)
            if known is None:
                memory = torch.frombuffer(room.whole, dtype=torch.uint8)
                known = memory, self._accelerator.register(memory)
            self._rooms[room.id] = known
        self._let_go(list(self._rooms)[:-_ROOMS])  # else a room that the agent has given up stays mapped

    def _let_go(self, rooms: Sequence[int]) -> None:
        for key in [key for key in self._views if key[1] in rooms]:
            del self._views[key]
        for id in rooms:
            memory, pinned = self._rooms.pop(id)
            if pinned:
                self._accelerator.unregister(memory)

    def close(self) -> None:
        """End copies, and let go of all memory."""
        if self._beside is not None:
            self._beside.wait()
        self._let_go(list(self._rooms))

    def _into(self, content: Content, room: Room) -> list[torch.Tensor]:
        """A tensor in the room for each chunk."""
        known = self._views.pop((content.kind, room.id), None)
        if known is None:
            memory = self._rooms[room.id][0][parts.PAGE :]
            known = [
                memory[item.place : item.place + item.nbytes].view(tensor.dtype).view(tensor.shape)
                for item, (_, tensor, _, _) in zip(content.index, content.chunks, strict=True)
            ]
        self._views[content.kind, room.id] = known
        return known


def _changed(state: State) -> set[int]:
    """Addresses of what the optimizers of a state change."""
    return {
        _address(tensor)
        for _, optimizer in _optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    }


def size(content: Content, objects: Mapping[str, bytes]) -> int:
    """Bytes of the room for a part, with some to spare."""
    _, more = parts.laid_out(map(len, objects.values()))
    unit = max(_ROOM, 1 << more.bit_length() >> 4)  # objects that grow steadily need another room after an eighth at the most
    return -(-(content.end + more + 1) // unit) * unit


def placed(content: Content, objects: Mapping[str, bytes], room: Room) -> tuple[list[Item], int]:
    """Write the objects of a part into its room, behind the tensors. Returns its index and its size in bytes."""
    places, end = parts.laid_out(map(len, objects.values()))
    index = list(content.index)
    for (key, data), place in zip(objects.items(), places, strict=True):
        at = content.end + place
        room.view[at : at + len(data)] = data
        index.append(Item(key, "bytes", (), (), (), at, len(data)))
    return index, content.end + end
