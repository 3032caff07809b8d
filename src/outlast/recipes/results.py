"""What a recipe leaves behind: weights and small documents, whole or not at all, and the fingerprint to compare runs by."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


def sha256(model: nn.Module) -> str:
    """Fingerprint of a model's parameters and buffers: equal for two models exactly when they are equal bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write_weights(path: Path, model: nn.Module) -> None:
    """Write a model's state dict, on the CPU, for `torch.load(path, weights_only=True)`."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, file)
    _replace(path, file.getvalue())


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document for people and programs."""
    _replace(path, (json.dumps(document, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    """A reader finds the old file or the new one, also after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
