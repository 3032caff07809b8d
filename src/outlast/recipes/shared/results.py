"""What a recipe reads and writes beside its checkpoints: weights, small documents that are whole or not there, checksums."""

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
    """Run a recipe. A mistake that its user can correct (no data, a wrong flag) ends it with one sentence and exit code 78.

    Under `outlast run`, `launch.rank` does that, and keeps the sentence for `outlast status`.
    """
    if contract.EVALUATE in sys.argv:  # `outlast evaluate NAME | head` ends it in silence, as other programs
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except OutlastError as error:
        if contract.Env.STATE in os.environ:
            raise
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(contract.Exit.MISCONFIGURED)


def into(directory: str, best: str = "") -> None:
    """Have a recipe without a job write to `directory` if one is named, and keep its best checkpoints: `2 min val_loss`.

    A job says both itself, for its store as well; where that is something else, rank 0 says so.
    """
    said = []
    if directory and (output := os.environ.setdefault(contract.Env.OUTPUT, directory)) and not _same(output, directory):
        said.append(f"--output_dir {directory} is ignored: the job writes to {output}")
    if best and contract.Env.STATE not in os.environ:
        os.environ.setdefault(contract.Env.CHECKPOINT_BEST, best)
    kept, wanted = (
        checkpoints.Retention.parse({contract.Env.CHECKPOINT_BEST: each})
        for each in (os.environ.get(contract.Env.CHECKPOINT_BEST, ""), best)
    )
    if kept.best and kept.by == wanted.by and kept.mode != wanted.mode:
        said.append(f"the job keeps the checkpoints of the worst {kept.by}; write `mode: {wanted.mode}` beside checkpoint.best")
    for sentence in said if os.environ.get("RANK", "0") == "0" else ():
        print(sentence, flush=True)


def _same(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def output() -> Path:
    """The directory of a run, for those that do not train."""
    return Path(os.environ.get(contract.Env.OUTPUT, "out"))


@contextlib.contextmanager
def by_rank_0(run: Session) -> Iterator[bool]:
    """Rank 0, for which this is true, writes something; a mistake of its is raised on all ranks. A collective."""
    problem = ""
    try:
        with run.alive():
            yield run.rank == 0
    except OutlastError as error:
        problem = str(error)
    if problem := run.gather(problem)[0]:
        raise OutlastError(problem)


def sha256(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Fingerprint of a model's parameters and buffers: equal for two models exactly when they are equal bit for bit."""
    digest = hashlib.sha256()
    tensors: Mapping[str, Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def writable(file: str, name: str) -> None:
    """Raise OutlastError, before training rather than after it, if the file that the flag `name` names cannot be written."""
    path = Path(file).absolute()
    there = next(each for each in path.parents if each.exists())
    if file and (path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK)):
        reason = "is a directory" if path.is_dir() else f"cannot be written: {there} is no directory that can be written to"
        raise OutlastError(f"{name} {file} {reason}; name a file elsewhere")


# Weights that others have trained


def place(named: str) -> Path:
    """A path, or else what is there below $OUTLAST_MODELS."""
    path = Path(named).expanduser()
    return path if path.exists() else Path(os.environ.get(contract.Env.MODELS, "."), named)


def read(path: Path) -> Any:
    """What torch.save or safetensors has written, on the CPU; of a directory of Hugging Face its weights. Runs no code of it."""
    if path.is_dir():
        names = [name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).exists()]
        if not names:
            raise OutlastError(f"{path} has neither model.safetensors nor pytorch_model.bin; copy the weights there")
        path = path / names[0]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)  # a GPU's weights as well
    except ImportError:
        raise OutlastError(f"{path} needs the package safetensors: pip install 'outlast[data]'") from None
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist; give a file or a directory of weights (nothing is downloaded)") from error
    except Exception as error:  # whatever bytes that are no weights make torch do; its advice is to run the code in them
        objects = "it is none, or it holds objects, which may run code"
        reason = objects if isinstance(error, pickle.UnpicklingError) else str(error).partition("\n")[0][:200]
        raise OutlastError(f"{path} cannot be read as weights: {reason}; give a file that torch.save has written") from error


def fitted(found: Mapping[str, Tensor], model: nn.Module, whose: str) -> dict[str, Tensor]:
    """Weights in the order of a model's. Raises OutlastError when they are those of another model."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in wanted.items():
        if name not in found or found[name].shape != shape:
            there = f"has shape {tuple(found[name].shape)}" if name in found else "is missing"
            raise OutlastError(f"{whose} are not of this model: {name} {there}, and {tuple(shape)} is needed")
    if surplus := sorted(found.keys() - wanted.keys()):
        raise OutlastError(f"{whose} are not of this model: it has no {surplus[0]}")
    return {name: found[name].contiguous() for name in wanted}
