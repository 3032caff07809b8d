"""Runs a recipe's `main`, writes its results atomically, selects the checkpoint to evaluate, and reads pretrained weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outlast.base import files
from outlast.base.errors import NotFound, OutlastError
from outlast.job import contract
from outlast.storage import checkpoints
from outlast.training import Session


def run(main: Callable[[], None]) -> None:
    """Run a recipe. If it raises OutlastError, print its message and exit with code 78, unless `outlast run` reports it."""
    if contract.EVALUATE in sys.argv:  # so that `outlast evaluate NAME | head` ends silently, as other programs do
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except OutlastError as error:
        if contract.Env.STATE in os.environ:
            raise
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(contract.Exit.MISCONFIGURED)


def into(directory: str, best: str = "") -> None:
    """Set the environment variables for the output and the best checkpoints (`2 min val_loss`), unless a job has set them."""
    warnings = []
    if (
        directory
        and (output := os.environ.setdefault(contract.Env.OUTPUT, directory))
        and Path(output).absolute() != Path(directory).absolute()
    ):
        warnings.append(f"--output_dir {directory} is ignored: the job writes to {output}")
    if best and contract.Env.STATE not in os.environ:
        os.environ.setdefault(contract.Env.CHECKPOINT_BEST, best)
    of_job, default = (
        checkpoints.Retention.parse({contract.Env.CHECKPOINT_BEST: each})
        for each in (os.environ.get(contract.Env.CHECKPOINT_BEST, ""), best)
    )
    if of_job.best and of_job.by == default.by and of_job.mode != default.mode:
        warnings.append(
            f"the job keeps the checkpoints of the worst {of_job.by}; write `mode: {default.mode}` beside checkpoint.best"
        )
    for sentence in warnings if os.environ.get("RANK", "0") == "0" else ():
        print(sentence, flush=True)


def output() -> Path:
    """Return the output directory of a run, for evaluation and sampling."""
    return Path(os.environ.get(contract.Env.OUTPUT, "out"))


@contextlib.contextmanager
def by_rank_0(run: Session) -> Iterator[bool]:
    """Yield whether this is rank 0, which then writes files. If rank 0 raises OutlastError, all ranks raise it. All ranks must
    call this."""
    problem = ""
    try:
        with run.alive():
            yield run.rank == 0
    except OutlastError as error:
        problem = str(error)
    if problem := run.gather(problem)[0]:
        raise OutlastError(problem)


def sha256(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return a checksum of all parameters and buffers, including their names, types and shapes."""
    digest = hashlib.sha256()
    tensors: Mapping[str, Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document as indented JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, json.dumps(document, indent=2) + "\n", durable=True)


def final(run: Session, weights: nn.Module | Mapping[str, Tensor], **values: Any) -> None:
    """Write `final.json` on rank 0, with the given values and the checksum of the weights."""
    if run.rank == 0:
        write_json(run.output / "final.json", {**values, "weights_sha256": sha256(weights)})


def evaluation(name: str, model: nn.Module, **values: Any) -> None:
    """Write `evaluation.json` with the name and checksum of the measured weights, and with `values`."""
    write_json(output() / "evaluation.json", {"weights": name, "weights_sha256": sha256(model), **values})


def checkpoint(output: Path, name: str = "") -> Path:
    """Return the path of the checkpoint `name` (best or a step), or of the newest valid one. Raises NotFound if there is none."""
    directory = output / contract.CHECKPOINTS
    run = checkpoints.owner(directory)
    usable = [c for c in checkpoints.list_(directory) if not c.problem and run in ("", c.run)]
    if name:
        chosen = checkpoints.named(usable, name)
        if problem := checkpoints.verify(chosen.path):
            raise NotFound(f"{chosen.path} is damaged: {problem}; name another one with --checkpoint, or leave it out")
        return chosen.path
    if valid := next((c for c in reversed(usable) if checkpoints.verify(c.path) is None), None):
        return valid.path
    raise NotFound(f"{output} has no valid checkpoint; train first, or name the output directory of a run that has one")


def writable(file: str, name: str) -> None:
    """Raise OutlastError if the file given by the flag `name` cannot be written. Call this before training, to fail early."""
    path = Path(file).absolute()
    parent = next(each for each in path.parents if each.exists())
    if file and (path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK)):
        reason = "is a directory" if path.is_dir() else f"cannot be written: {parent} is no directory that can be written to"
        raise OutlastError(f"{name} {file} {reason}; name a file elsewhere")


# Pretrained weights


def place(named: str) -> Path:
    """Return the path `named` if it exists, else that path below $OUTLAST_MODELS."""
    path = Path(named).expanduser()
    return path if path.exists() else Path(os.environ.get(contract.Env.MODELS, "."), named)


def read(path: Path) -> Any:
    """Read weights to the CPU from a file of torch.save or safetensors, or from a directory of Hugging Face.

    Code in a file is never run. Raises OutlastError.
    """
    if path.is_dir():
        names = [name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).exists()]
        if not names:
            raise OutlastError(f"{path} has neither model.safetensors nor pytorch_model.bin; copy the weights there")
        path = path / names[0]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)  # also weights saved on a GPU
    except ImportError:
        raise OutlastError(f"{path} needs the package safetensors: pip install 'outlast[data]'") from None
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist; give a file or a directory of weights (nothing is downloaded)") from error
    except Exception as error:  # torch raises various errors, and may advise running code from the file
        objects = "it is none, or it holds objects, which may run code"
        reason = objects if isinstance(error, pickle.UnpicklingError) else str(error).partition("\n")[0][:200]
        raise OutlastError(f"{path} cannot be read as weights: {reason}; give a file that torch.save has written") from error


def state_dict(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, or below its key `state_dict`, keyed by name without DDP's prefix. Raises OutlastError."""
    content = read(path)
    weights = content.get("state_dict", content) if isinstance(content, dict) else {}
    return {name.removeprefix("module."): tensor for name, tensor in weights.items()}


def fitted(weights: Mapping[str, Tensor], model: nn.Module, whose: str) -> dict[str, Tensor]:
    """Return the weights in the order of the model's own. Raises OutlastError, naming them as `whose`, if they do not fit."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            mismatch = f"has shape {tuple(weights[name].shape)}" if name in weights else "is missing"
            raise OutlastError(f"{whose} are not of this model: {name} {mismatch}, and {tuple(shape)} is needed")
    if surplus := sorted(weights.keys() - shapes.keys()):
        raise OutlastError(f"{whose} are not of this model: it has no {surplus[0]}")
    return {name: weights[name].contiguous() for name in shapes}
