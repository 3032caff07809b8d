"""A model's weights as a plain file, which `torch.load(path, weights_only=True)` or safetensors can read without Outlast.

A file is either complete or absent, even after a power failure.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.storage import checkpoints
from outlast.training.collective_calls import place
from outlast.training.samples import stream as streams
from outlast.training.state import background_save, checkpoint

Weights = dict[str, torch.Tensor]

SAFE = ".safetensors"


def check(path: Path, model: Any = None) -> None:
    """Raise OutlastError if `model` is not a module, or if the package for `path`'s format is missing."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise OutlastError(f"run.export() got {streams.kind(model)} and needs a module ({place()}); write run.export(net)")
    if path.suffix == SAFE and importlib.util.find_spec("safetensors") is None:
        raise OutlastError(f"{path.name} needs the package safetensors: pip install safetensors, or name it {path.stem}.pt")


def trained(model: torch.nn.Module) -> torch.nn.Module:
    """Return a module with only the trainable parameters and persistent buffers of `model`, under the same names. The script
    loads frozen weights itself, such as the base model of an adapter."""
    root, saved = torch.nn.Module(), set(model.state_dict(keep_vars=True))
    parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    for name, tensor in [*parameters, *((name, each) for name, each in model.named_buffers() if name in saved)]:
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = cast(torch.nn.Module, at._modules[part])
        if isinstance(tensor, torch.nn.Parameter):
            at.register_parameter(leaf, tensor)
        else:
            at.register_buffer(leaf, tensor)
    return root


def export(model: torch.nn.Module, path: Path, gather: Callable[[Any], list[Any]]) -> None:
    """Write `model`'s weights to `path` on rank 0, which needs memory for the whole model. Raises OutlastError on all ranks. All
    ranks must call this."""
    problem = ""
    weights = whole(model, keep=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        try:
            write(path, weights)
        except OutlastError as error:
            problem = str(error)
    if problem := gather(problem)[0]:
        raise OutlastError(problem)


@torch.no_grad()
def whole(model: torch.nn.Module, *, keep: bool = True) -> Weights:
    """Return a model's parameters and buffers on the CPU, keyed by name without DDP's prefix. Shards are gathered. Tied tensors
    become one tensor. Without `keep`, the result is empty. All ranks must call this if the model is sharded."""
    weights: Weights = {}
    tied: dict[Any, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in get_model_state_dict(model).items():
        if not isinstance(tensor, torch.Tensor):
            raise OutlastError(
                f"the model has {streams.kind(tensor)} as {name!r}, which is no tensor; export the part without it"
            )
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Not data_ptr(): it is 0 for an empty shard, and all ranks must agree on which tensors are tied.
        key = (local.untyped_storage().data_ptr() or name, local.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in tied:
            if isinstance(tensor, DTensor):
                tensor = tensor.to(tensor.device_mesh.device_type)  # FSDP2 may have offloaded it
                tensor = cast(DTensor, tensor).full_tensor()
            tied[key] = _copied(tensor, storages) if keep else torch.empty(0)
        if keep:
            weights[name] = tied[key]
    return weights


def _copied(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """Return a CPU copy with a storage of its own, since torch saves the whole storage of a view."""
    copy = tensor.cpu()
    storage = copy.untyped_storage()
    if storage.nbytes() != copy.nbytes or storage.data_ptr() in storages:
        copy = copy.clone()
    storages.add(copy.untyped_storage().data_ptr())
    return copy


def write(path: Path, weights: Weights) -> None:
    """Write weights to `path`, as safetensors if its name ends in `.safetensors`. Raises OutlastError."""
    target = files.target(path)
    partial = target.with_name(f".{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # left by a killed process
        if path.suffix == SAFE:
            _write_safe(partial, weights)
        else:
            torch.save(weights, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        files.sync(target.parent)
    except Exception as error:  # torch and safetensors raise different exceptions on a full disk
        raise OutlastError(f"{path} cannot be written: {background_save.sentence(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_safe(path: Path, weights: Weights) -> None:
    """Write weights as safetensors' `save_model` does: tied tensors are written once, with their other names as metadata."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    for name in sorted(weights):
        first.setdefault(id(weights[name]), name)
    ties = {name: first[id(tensor)] for name, tensor in weights.items() if first[id(tensor)] != name}
    once = {name: tensor.contiguous() for name, tensor in weights.items() if name not in ties}
    save_file(once, path, metadata={"format": "pt", **ties})


def saved(path: Path, name: str = "") -> Weights:
    """Return a module's weights from a checkpoint, with tied tensors as separate tensors. `name` may be empty if there is only
    one module. Raises OutlastError for an unknown name, FileNotFoundError if the checkpoint has been removed."""
    with checkpoints.reading(path):
        modules = checkpoint.modules(path)
        name = name or (modules[0] if len(modules) == 1 else "")
        if name not in modules:
            raise OutlastError(f"{path.name} holds the modules {', '.join(modules) or 'none'}; name one of them with --key")
        return checkpoint.read(path, name)


def main(arguments: list[str]) -> None:
    """Write a checkpoint's weights to a file, for `outlast checkpoints export`. `arguments` are CHECKPOINT FILE [NAME]."""
    source, target = map(Path, arguments[:2])
    try:
        check(target)
        files.target(target)  # before the checkpoint is read, which may take minutes
        write(target, saved(source, *arguments[2:]))
    except (OutlastError, OSError) as error:
        sys.exit(f"outlast: {error}")
