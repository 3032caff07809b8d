"""Writes checkpoints while training goes on: copy, write in a thread, commit on rank 0, tell every rank how it ended.

What stays true: at most one save is under way; a checkpoint exists for all ranks or for none; a save that fails, a full disk for
instance, leaves nothing behind and stops nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from outlast import checkpoints, contract
from outlast.errors import OutlastError, Superseded
from outlast.training.checkpoint import Flat

log = logging.getLogger("outlast")


class Copies:
    """Copies tensors into memory that it keeps for the next time: fresh pages are the expensive part of a copy.

    torch's DefaultStager does the same, but fails on parameters in torch 2.11.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def of(self, flat: Flat) -> Flat:
        """The same as it is now, on the CPU, valid until the next call. The first is a collective when GPUs hold shards."""
        copies = {key: self._copy(key, value) if isinstance(value, torch.Tensor) else value for key, value in flat.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # GPUs copy in the background
        return copies

    def _copy(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in self._meshes:
                self._meshes[mesh] = mesh if mesh.device_type == "cpu" else DeviceMesh("cpu", mesh.mesh)
            copy, size = self._copy(key, tensor.to_local()), tensor.size()
            return DTensor.from_local(
                copy, self._meshes[mesh], tensor.placements, run_check=False, shape=size, stride=tensor.stride()
            )
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._kept[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return kept.copy_(tensor.detach(), non_blocking=True)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank."""

    step: int
    committed: bool
    reason: str = ""
    """Why it was not committed."""
    superseded: bool = False


class Saver:
    """Writes captured states as checkpoints, one at a time, in a thread of its own.

    Every rank has one and calls `begin` for the same steps. A save that fails on any rank fails on all, leaves nothing behind,
    and is no reason to stop. `report(kind, **fields)` is told what becomes of it, in the thread: `committed`, `save_failed`.
    """

    def __init__(self, directory: Path, run: str, generation: int, keep: int, report: Callable[..., None]) -> None:
        self._directory, self._run, self._generation, self._keep = directory, run, generation, keep
        self._report = report
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        self._copies = Copies()
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, flat: Flat) -> None:
        """Copy `flat` and start saving it; the previous save must have ended (`wait`). A collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._outcome = None
        copy = self._copies.of(flat)
        self._thread = threading.Thread(target=self._save, args=(step, copy), name="outlast-save", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """How the save begun last ended, once it has; None when that is known already, or takes longer than `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        """Let go of the group; no save may be under way."""
        self._group = None

    def _save(self, step: int, flat: Flat) -> None:
        try:
            self._outcome = self._together(step, flat)
        except Exception as error:  # the group broke, so a rank is gone
            self._outcome = Outcome(step, False, f"the ranks lost each other ({_sentence(error)})")
            self._report("save_failed", step=step, reason=self._outcome.reason)

    def _together(self, step: int, flat: Flat) -> Outcome:
        """Write, gather, commit on rank 0, tell everybody."""
        begun = time.monotonic()
        target = checkpoints.saving(self._directory, step, self._generation)
        files, problem = {}, ""
        try:
            state_dict_saver.save(flat, storage_writer=FileSystemWriter(target, sync_files=True), process_group=self._group)
            files = {path.name: _measured(path) for path in sorted(target.glob(f"__{self._rank}_*"))}
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            problem = _sentence(error)
        answers: list[Any] = [None] * self._ranks
        dist.all_gather_object(answers, (problem, files), group=self._group)
        outcome = [Outcome(step, False)]
        if self._rank == 0:
            outcome = [self._commit(step, target, answers, begun)]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return outcome[0]

    def _commit(self, step: int, target: Path, answers: list[tuple[str, dict[str, dict[str, int]]]], begun: float) -> Outcome:
        try:
            problem = next((problem for problem, _ in answers if problem), "")
            if problem:
                raise OutlastError(problem)
            files = {name: file for _, part in answers for name, file in part.items()}
            files[".metadata"] = _measured(target / ".metadata")
            path = self._directory / contract.checkpoint_name(step)
            new = checkpoints.Checkpoint(step, path, self._run, self._generation, self._ranks, time.time())
            done = checkpoints.commit(target, new, files)
        except Exception as error:  # whatever it is, the other ranks wait for the answer
            shutil.rmtree(target, ignore_errors=True)  # what cannot be removed now is swept later
            reason = _sentence(error)
            self._report("save_failed", step=step, reason=reason)
            return Outcome(step, False, reason, isinstance(error, Superseded))
        seconds = round(time.monotonic() - begun, 6)
        self._report("committed", step=step, path=str(done.path), bytes=done.bytes, seconds=seconds)
        try:
            checkpoints.sweep(self._directory, done, self._keep)
        except OSError as error:
            log.warning("outlast: old checkpoints could not be removed: %s", _sentence(error))
        return Outcome(step, True)


def _measured(path: Path) -> dict[str, int]:
    return {"size": path.stat().st_size, "crc32": checkpoints.checksum(path)}


def _sentence(error: BaseException) -> str:
    """What went wrong, without the story of who called whom."""
    if isinstance(error, CheckpointException):
        rank, (failure, _) = min(error.failures.items())
        return f"rank {rank}: {_sentence(failure)}"
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) if isinstance(error, OutlastError) else f"{type(error).__name__}: {error}"
