"""Checkpoints on a disk, as a run commits them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outlast.job import contract
from outlast.storage import checkpoints

A = {"a": b"weights"}


def written(
    directory: Path,
    step: int,
    files: Mapping[str, bytes] = A,
    *,
    run: str = "r",
    generation: int = 1,
    metric: checkpoints.Metric | None = None,
    acquire: bool = True,
) -> checkpoints.Checkpoint:
    """Commit a checkpoint of two ranks, by default as the generation that owns the directory from now on."""
    if acquire:
        checkpoints.acquire(directory, run, generation)
    draft = checkpoints.saving(directory, step, generation)
    draft.mkdir(parents=True)
    for name, content in files.items():
        (draft / name).write_bytes(content)
    said = {name: {"size": len(content), "crc32": checkpoints.checksum(draft / name)} for name, content in files.items()}
    path = directory / contract.checkpoint_name(step)
    return checkpoints.commit(draft, checkpoints.Checkpoint(step, path, run, generation, 2, 5.0, metric=metric), said)
