"""What a recipe leaves behind beside its weights: small documents, whole or not at all, and a fingerprint to compare runs by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outlast import checkpoints, contract, files
from outlast.errors import NotFound, OutlastError


def into(directory: str, best: str = "") -> None:
    """Have a recipe without a job write to `directory` if one is named, and keep its best checkpoints: `2 min val_loss`.

    A job says both itself, for its store as well; then the log says that `directory` is ignored.
    """
    job = contract.Env.STATE in os.environ
    if directory:
        output = os.environ.setdefault(contract.Env.OUTPUT, directory)
        if job and os.environ.get("RANK", "0") == "0" and Path(output).absolute() != Path(directory).absolute():
            print(f"--output_dir {directory} is ignored: the job writes to {output}", flush=True)
    if best and not job:
        os.environ.setdefault(contract.Env.CHECKPOINT_BEST, best)


def sha256(model: nn.Module | Mapping[str, torch.Tensor]) -> str:
    """Fingerprint of a model's parameters and buffers: equal for two models exactly when they are equal bit for bit."""
    digest = hashlib.sha256()
    tensors: Mapping[str, torch.Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Resume in here: the optimizer keeps its hyper-parameters, though a checkpoint brings those it was saved with."""
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)


def checkpoint(output: Path, name: str = "") -> Path:
    """The directory of the checkpoint to evaluate: the newest valid one in `output`, or what `name` says: `best`, or a step.

    `outlast evaluate --best` and `--step` give a recipe that name as `--checkpoint`. Raises NotFound when there is none, or when
    the one that is named is damaged.
    """
    directory = output / contract.CHECKPOINTS
    run = checkpoints.owner(directory)
    found = [c for c in checkpoints.list_(directory) if not c.problem and run in ("", c.run)]
    if name:
        chosen = checkpoints.named(found, name)
        if problem := checkpoints.verify(chosen.path):
            raise NotFound(f"{chosen.path} is damaged: {problem}; name another one with --checkpoint, or leave it out")
        return chosen.path
    if valid := next((c for c in reversed(found) if checkpoints.verify(c.path) is None), None):
        return valid.path
    raise NotFound(f"{output} has no valid checkpoint; train first, or name the output directory of a run that has one")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document for people and programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, json.dumps(document, indent=2) + "\n", durable=True)


def writable(report: str, name: str) -> None:
    """Raise OutlastError, before training rather than after it, if the document that the flag `name` names cannot be written."""
    try:
        Path(report or ".").parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutlastError(f"{name} {report} cannot be written: {error.strerror}; name a file elsewhere") from error
    if report and Path(report).is_dir():
        raise OutlastError(f"{name} {report} is a directory; name a file")
