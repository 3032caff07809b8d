"""Saves and restores everything that a run needs to continue as if it had never stopped.

A *state* is the argument of `Session.resume`: objects with `state_dict` and `load_state_dict`, keyed by name. A checkpoint's keys
are `<module>/<parameter or buffer>` and `<optimizer>/state/<parameter>/<name>` for tensors, and `<optimizer>/rest`,
`<module>/rest`, `<anything else>`, `<loader>/<rank>` and `rng/<rank>` for pickled objects. Each rank writes a share of the
replicated tensors. Buffers are rank 0's, since DDP broadcasts these in the next forward pass.

Reading a checkpoint runs no code that it contains. The permitted types are those of `torch.load(weights_only=True)`, numpy's
arrays, a few types from the standard library, and the classes that a script allows with `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import io
import pathlib
import pickle
import random
import warnings
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from outlast.base.errors import OutlastError
from outlast.training import device

State = Mapping[str, Any]
Flat = dict[str, Any]
"""One rank's part of a state: tensors, and pickled objects as bytes."""


def check(state: State) -> None:
    """Raise OutlastError if a name in the state cannot be a key, or if an object cannot be saved."""
    parameters = {parameter for thing in state.values() if isinstance(thing, torch.nn.Module) for parameter in thing.parameters()}
    for name, thing in state.items():
        if not isinstance(name, str) or not name.isidentifier() or name == "rng" or hasattr(torch.nn.Module, name):
            raise OutlastError(
                f"{name!r} cannot be a name in the state; use a plain word that is no attribute of torch.nn.Module"
            )
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            instead = "wrap it in an object that has them"
            if isinstance(thing, DataLoader):
                instead = "read its dataset with a Stream, which goes on where it was: Stream(loader.dataset, batch=...)"
            raise OutlastError(f"{name!r} is a {type(thing).__name__} without state_dict and load_state_dict; {instead}")
        if isinstance(thing, DataLoader) and dist.is_initialized() and dist.get_world_size() > 1:
            raise OutlastError(
                f"{name!r} is a {type(thing).__name__}, whose state differs between ranks; wrap it: Stateful(loader)"
            )
        if isinstance(thing, torch.optim.Optimizer) and not parameters.issuperset(_parameters(thing)):
            raise OutlastError(f"optimizer {name!r} holds a parameter of none of the modules; name the module it belongs to, too")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Collected(NamedTuple):
    """A state's tensors and objects, grouped by the ranks that save them."""

    everybody: Flat
    """Tensors replicated on every rank, and distributed tensors."""
    own: Flat
    rank0: Flat


def capture(state: State, rank: int, ranks: int) -> Flat:
    """Return this rank's part of `state`, including its random number generators. Tensors are not copied yet."""
    everybody, own, rank0 = collected(state, rank)
    whole = {key: tensor for key, tensor in everybody.items() if not isinstance(tensor, DTensor)}
    for key in whole.keys() - dealt(whole, ranks)[rank]:
        del everybody[key]
    return {**own, **everybody, **(rank0 if rank == 0 else {})}


def collected(state: State, rank: int) -> Collected:
    everybody: Flat = {}
    own: Flat = {f"rng/{rank}": pickled(generators(), "rng")}
    rank0: Flat = {}
    for name, thing in state.items():
        if isinstance(thing, torch.nn.Module):
            tensors, rest = _sorted_out(get_model_state_dict(thing))
            parameters = {_place(parameter) for parameter in thing.parameters()}
            for key, tensor in tensors.items():
                (everybody if _place(tensor) in parameters else rank0)[f"{name}/{key}"] = tensor
        elif isinstance(thing, torch.optim.Optimizer):
            tensors, rest = _optimizer_state(_modules(state), thing, name)
            everybody.update({f"{name}/state/{key}": tensor for key, tensor in tensors.items()})
        else:
            rank0[name] = pickled(thing.state_dict(), name)
            if hasattr(thing, "loader_state"):
                own[f"{name}/{rank}"] = pickled(thing.loader_state(), name)
            continue
        if rest:
            rank0[f"{name}/rest"] = pickled(rest, name)
    return Collected(everybody, own, rank0)


def _place(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's memory, or -1 for a distributed tensor. It tells parameters from buffers."""
    return -1 if isinstance(tensor, DTensor) else device.of(tensor.device).place(tensor)


def _sorted_out(values: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in values.items() if key not in tensors}


def _modules(state: State) -> torch.nn.Module:
    return torch.nn.ModuleDict({name: thing for name, thing in state.items() if isinstance(thing, torch.nn.Module)})


def _optimizer_state(
    root: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with _begun(optimizer):
        state: dict[str, Any] = get_optimizer_state_dict(root, optimizer)
    values = {(fqn, key): value for fqn, entry in state["state"].items() for key, value in entry.items()}
    tensors = {f"{fqn}/{key}": value for (fqn, key), value in values.items() if isinstance(value, torch.Tensor)}
    others = {place: value for place, value in values.items() if not isinstance(value, torch.Tensor)}
    return tensors, {"kind": type(optimizer).__name__, "groups": state["param_groups"], "others": others}


@contextlib.contextmanager
def _begun(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer without state an empty entry while the block runs. Otherwise torch would initialize the state by taking a
    step, which would call hooks, and would be wrong for optimizers with a special first step."""
    first = _parameters(optimizer)[0]
    if not optimizer.state:
        optimizer.state[first] = {}
    try:
        yield
    finally:
        if not optimizer.state.get(first):
            optimizer.state.pop(first, None)


def dealt(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[set[str]]:
    """Return for each rank the keys of the replicated tensors that it writes, balanced by size."""
    load = [0] * ranks
    parts = [set[str]() for _ in load]
    for key, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        to = load.index(min(load))
        load[to] += tensor.nbytes
        parts[to].add(key)
    return parts


def _safe() -> list[Any]:
    """Return the types allowed in a checkpoint besides torch's own. Unpickling these types runs only their constructors."""
    array: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64().__reduce__()[0]
    named = [(make, f"{package}.multiarray.{make.__name__}") for make in (array, scalar) for package in _NUMPY]
    dtypes = [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    dates = [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    others = [frozenset, range, slice, int, float, bool, str, list, dict, collections.defaultdict]
    return [*named, np.ndarray, np.dtype, *dtypes, *dates, *others, *_PATHS]


_NUMPY = ("numpy.core", "numpy._core")  # numpy 1 and 2
_PATHS = (pathlib.PurePosixPath, pathlib.PosixPath)


def quickly_pickled(value: Any) -> bytes:
    """Pickle an object without the checks of `pickled`, which a similar object must have passed before."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def pickled(value: Any, name: str) -> bytes:
    """Pickle an object. Raises OutlastError if the object could not be read back."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if foreign := _foreign(buffer.getvalue()):
        raise OutlastError(f"{name!r} holds a {foreign[0]}, which is not restored from a checkpoint unless you say so; {_ALLOW}")
    if name not in _READ_BACK:
        unpickled(buffer.getvalue(), name)
        _READ_BACK.add(name)
    return buffer.getvalue()


_READ_BACK: set[str] = set()
_ALLOW = (
    "call torch.serialization.add_safe_globals([...]) with that class where the script begins, or keep tensors, arrays, "
    "numbers and text there"
)


def _foreign(data: bytes) -> list[str]:
    with torch.serialization.safe_globals(_safe()):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))


def unpickled(data: bytes, name: str) -> Any:
    try:
        with torch.serialization.safe_globals(_safe()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = f"holds a {foreign[0]}" if (foreign := _foreign(data)) else f"cannot be read: {_reason(error)}"
        raise OutlastError(f"{name!r} of the checkpoint {why}; {_ALLOW}") from error


def _reason(error: Exception) -> str:
    return str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or str(error)


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        trusted = module == "torch" or module.startswith("torch.distributed.checkpoint.")
        value = super().find_class(module, name) if trusted else None
        described = module == "torch.distributed.checkpoint.metadata" and getattr(value, "__module__", "") == module
        if described or isinstance(value, torch.dtype) or (module, name) in _IN_METADATA:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise _no_metadata(f"{module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, which Python before 3.11.4 pickles as `getattr(kind, name)`."""
    if isinstance(kind, enum.EnumType) and name in kind.__members__:
        return kind[name]
    raise _no_metadata("builtins.getattr")


def _no_metadata(what: str) -> OutlastError:
    return OutlastError(f"the checkpoint's .metadata holds a {what}, which has no business there; it is damaged or forged")


_IN_METADATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (self.path / ".metadata").open("rb") as file:  # type: ignore[operator] # is a Path
            metadata: Metadata = _Metadata(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr] # has just been made
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load bytes, the only type saved besides tensors."""
        data: Any = None
        with contextlib.suppress(pickle.UnpicklingError):
            data = torch.load(value, weights_only=True)
        if not isinstance(data, bytes):
            raise OutlastError(f"{read_item.dest_index.fqn} of the checkpoint is not bytes; it is damaged or forged")
        super().load_bytes(read_item, io.BytesIO(quickly_pickled(data)))  # torch unpickles it unrestricted


def generators() -> dict[str, Any]:
    """Return the states of this rank's random number generators. Integers and arrays are converted to bytes, which pickle
    fast."""
    version, words, gauss = random.getstate()
    kind, keys, *drawn = np.random.get_state()
    states: dict[str, Any] = {
        "python": (version, array("I", words).tobytes(), gauss),
        "numpy": (kind, np.asarray(keys).tobytes(), *drawn),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    accelerator = device.find()
    return states | ({accelerator.type: accelerator.random_state()} if accelerator.type != "cpu" else {})


@contextlib.contextmanager
def kept_generators() -> Iterator[dict[str, Any]]:
    """Restore this rank's generators at the end of the block. Yields their states at its start."""
    states = generators()
    try:
        yield states
    finally:
        set_generators(states)


def set_generators(states: Mapping[str, Any]) -> None:
    """Set this rank's generators. Also accepts numbers and arrays instead of bytes, as in old checkpoints."""
    version, words, gauss = states["python"]
    kind, keys, *drawn = states["numpy"]
    random.setstate((version, tuple(_numbers(words, np.uint32).tolist()), gauss))
    np.random.set_state((kind, _numbers(keys, np.uint32), *drawn))
    torch.set_rng_state(torch.from_numpy(_numbers(states["torch"], np.uint8)))
    if (accelerator := device.find()).type in states:
        accelerator.set_random_state(states[accelerator.type])


def _numbers(values: Any, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(values), dtype) if isinstance(values, bytes) else np.asarray(values, dtype)


def restore(path: Path, state: State, rank: int | None = None) -> bool:
    """Load the checkpoint at `path` into the modules, optimizers and objects of `state`.

    `state` may be a part of the saved state. No session and no process group are needed: every rank reads its part. With `rank`,
    that rank's random number generators are restored, too. Returns whether the checkpoint had generators for the rank: it lacks
    them if fewer ranks saved it. Raises OutlastError if the checkpoint does not fit.
    """
    reader = _Reader(path)
    targets = targets_of(reader.read_metadata(), state, rank)
    load(reader, path.name, state, targets)
    return put(state, targets, path.name, rank)


# The three steps of `restore`, for any reader; error messages name the `source`


def targets_of(metadata: Metadata, state: State, rank: int | None) -> Flat:
    """Return what `rank` reads from a checkpoint to restore `state`: tensors to read into, and b"" in place of each object."""
    check(state)
    saved = metadata.state_dict_metadata
    targets: Flat = {}
    for name, thing in state.items():
        if isinstance(thing, torch.nn.Module):
            tensors, _ = _sorted_out(get_model_state_dict(thing))
            targets.update({f"{name}/{key}": tensor for key, tensor in tensors.items()})
        elif isinstance(thing, torch.optim.Optimizer):
            targets.update(_optimizer_room(metadata, _modules(state), thing, name))
            targets[f"{name}/rest"] = b""
        else:
            targets[name] = b""
        for key in (f"{name}/rest", f"{name}/{rank}"):
            if key in saved:
                targets[key] = b""
    if f"rng/{rank}" in saved:
        targets[f"rng/{rank}"] = b""
    return targets


def load(reader: StorageReader, source: str, state: State, targets: Flat) -> None:
    """Read a checkpoint into `targets`. Raises OutlastError if `state` does not fit the saved state."""
    _compare(source, state, targets, reader.read_metadata())
    _load(targets, reader)


def put(state: State, loaded: Flat, source: str, rank: int | None) -> bool:
    """Load a state's objects from the `loaded` targets. Returns whether the rank's random number generators were among them."""
    for name, thing in state.items():
        rest = unpickled(loaded[f"{name}/rest"], name) if f"{name}/rest" in loaded else {}
        if isinstance(thing, torch.nn.Module):
            set_model_state_dict(thing, {**_below(loaded, f"{name}/", but="rest"), **rest})
        elif isinstance(thing, torch.optim.Optimizer):
            if rest["kind"] != type(thing).__name__:
                raise OutlastError(
                    f"{source} holds the state of an {rest['kind']} as {name}, now it is an {type(thing).__name__}; "
                    "use the optimizer that was saved or start a new run"
                )
            entries: dict[str, dict[str, Any]] = {}
            for key, tensor in _below(loaded, f"{name}/state/").items():
                fqn, _, what = key.rpartition("/")
                entries.setdefault(fqn, {})[what] = tensor
            for (fqn, what), value in rest["others"].items():
                entries.setdefault(fqn, {})[what] = value
            # strict=False: a parameter that has never had a gradient has no optimizer state, and must not get any
            options = StateDictOptions(strict=False)
            saved_state: dict[str, Any] = {"state": entries, "param_groups": rest["groups"]}
            with _begun(thing):
                set_optimizer_state_dict(_modules(state), thing, saved_state, options=options)
        elif hasattr(thing, "loader_state"):
            own = loaded.get(f"{name}/{rank}")
            thing.load_state_dict(unpickled(loaded[name], name), own and unpickled(own, name))
        else:
            thing.load_state_dict(unpickled(loaded[name], name))
    if random_state := loaded.get(f"rng/{rank}"):
        set_generators(unpickled(random_state, "rng"))
    return bool(random_state)


def modules(path: Path) -> list[str]:
    return sorted({key.partition("/")[0] for key in _tensors(_Reader(path).read_metadata())})


def read(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers from a checkpoint, on the CPU. Needs no process group."""
    reader = _Reader(path)
    stored = _tensors(reader.read_metadata())
    targets: Flat = {
        key: torch.empty(it.size, dtype=it.properties.dtype) for key, it in stored.items() if key.startswith(f"{name}/")
    }
    _load(targets, reader)
    return _below(targets, f"{name}/")


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = metadata.state_dict_metadata.items()
    return {key: it for key, it in entries if isinstance(it, TensorStorageMetadata) and "/state/" not in key}


def _load(targets: Flat, reader: StorageReader) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            state_dict_loader.load(targets, storage_reader=reader, planner=_Planner(), no_dist=True)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, OutlastError):
                    raise failure from None
            raise


def _below(values: Mapping[str, Any], prefix: str, but: str = "") -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix) and key != prefix + but}


def _optimizer_room(
    metadata: Metadata, root: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> dict[str, torch.Tensor]:
    parameters = get_model_state_dict(root)
    room = {}
    for key, stored in metadata.state_dict_metadata.items():
        if key.startswith(f"{name}/state/") and isinstance(stored, TensorStorageMetadata):
            parameter = parameters.get(key.removeprefix(f"{name}/state/").rpartition("/")[0])
            dtype = stored.properties.dtype
            if isinstance(parameter, torch.Tensor) and parameter.shape == stored.size:
                # fused kernels rely on the parameter's memory format
                where = parameter.device if isinstance(parameter, DTensor) else "cpu"
                room[key] = torch.empty_like(parameter, dtype=dtype, device=where)
            else:
                room[key] = torch.empty(stored.size, dtype=dtype)
    return room


def _compare(source: str, state: State, targets: Flat, metadata: Metadata) -> None:
    saved = metadata.state_dict_metadata
    modules = [name for name, thing in state.items() if isinstance(thing, torch.nn.Module)]
    missing = sorted(key for key in targets if key not in saved)
    surplus = sorted(key for key in saved if any(key.startswith(f"{name}/") for name in modules) and key not in targets)
    for key, value in targets.items():
        stored = saved.get(key)
        if isinstance(value, torch.Tensor) and isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            raise OutlastError(
                f"{source} holds {key} of shape {tuple(stored.size)}, the model now has {tuple(value.shape)}; "
                "use the model that was saved or start a new run"
            )
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"holds {surplus[0]}, which the model no longer has"
        more = len(missing) + len(surplus) - 1
        raise OutlastError(
            f"{source} {what}{f' (and {more} more)' if more else ''}; "
            "resume with the model and optimizer that were saved or start a new run"
        )
