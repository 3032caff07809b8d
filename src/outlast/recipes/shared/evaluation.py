"""Selects the checkpoint that a recipe evaluates, and writes `evaluation.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from outlast.base.errors import NotFound
from outlast.job import contract
from outlast.recipes.shared import results
from outlast.storage import checkpoints


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


def write(name: str, model: nn.Module, **values: Any) -> None:
    """Write `evaluation.json` with the name and checksum of the measured weights, and with `values`."""
    results.write_json(results.output() / "evaluation.json", {"weights": name, "weights_sha256": results.sha256(model), **values})
