"""Writes checkpoints in a thread while training continues, commits them on rank 0, and tells every rank the outcome.

At most one save is in progress, and a checkpoint exists for all ranks or for none. A failed save leaves no files, and training
continues. If workers have separate disks, every disk gets the whole checkpoint; failures of disks other than rank 0's are only
reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from outlast.base.errors import OutlastError, Superseded, causes
from outlast.job import contract
from outlast.storage import checkpoints
from outlast.training import device, metrics
from outlast.training.state import checkpoint_file, memory_copies
from outlast.training.state.checkpoint import Flat
from outlast.training.state.shared_disks import Disks, Part
from outlast.worker.hangs import deadlocks

log = logging.getLogger("outlast")

_METADATA = ".metadata"
THREAD = "outlast-save"


class Copies:
    """CPU memory for copies of a state. It is reused, since page faults are the expensive part of a copy. torch's DefaultStager
    does the same, but fails on parameters in torch 2.11."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def of(self, flat: Flat) -> Flat:
        """Return a copy of `flat` on the CPU, which is valid until the next call. The first call is a collective if GPUs hold
        shards."""
        accelerator = device.find()
        accelerator.mark_step()
        pairs: list[memory_copies.Pair] = []
        copies = {key: self._room(key, value, pairs) if isinstance(value, torch.Tensor) else value for key, value in flat.items()}
        memory_copies.copy(pairs)
        accelerator.synchronize()  # its copies run in the background
        return copies

    def _room(self, key: str, tensor: torch.Tensor, pairs: list[memory_copies.Pair]) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in self._meshes:
                self._meshes[mesh] = mesh if mesh.device_type == "cpu" else DeviceMesh("cpu", mesh.mesh)
            copy, size = self._room(key, tensor.to_local(), pairs), tensor.size()
            return DTensor.from_local(
                copy, self._meshes[mesh], tensor.placements, run_check=False, shape=size, stride=tensor.stride()
            )
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = device.of(tensor.device).room(tensor)
        pairs.append((buffer, tensor.detach()))
        return buffer


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A save's outcome, the same on every rank."""

    step: int
    committed: bool
    reason: str = ""
    superseded: bool = False
    elsewhere: str = ""
    """The disks that lack the checkpoint, with the reasons; empty if all disks have it."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A rank's report after writing its part."""

    problem: str
    files: Mapping[str, Mapping[str, int]]
    same: int
    """Number of leading bytes of `metrics.jsonl` on the rank's disk that equal those on rank 0's disk."""
    metric: checkpoints.Metric | None = None
    """Only rank 0's metric counts."""
    aside: tuple[Path, str] | None = None
    """The file that holds the rank's part if the rank's disk accepts no files, and the disk's error."""


class Saver:
    """Writes captured states as checkpoints, one at a time, in its own thread. Every rank has a saver and calls `begin` for the
    same steps. A save that fails on one rank fails on all. The thread calls `report(kind, **fields)` with the outcome:
    `committed`, `save_failed` or `not_copied`."""

    def __init__(
        self,
        directory: Path,
        run: str,
        generation: int,
        retention: checkpoints.Retention,
        report: Callable[..., None],
        disks: Disks | None = None,
        copy: metrics.Copy | None = None,
    ) -> None:
        self.directory, self._run, self._generation, self.retention = directory, run, generation, retention
        self._report = report
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._disks = disks or Disks([0] * self._ranks, self._rank, None)
        self.copy = copy or metrics.Copy(directory.parent / contract.METRICS)
        self.fenced = True
        """If False, the next commit first fences earlier generations on this disk."""
        self._initial_owner = ""
        """The run that owned this disk when the session began: a delayed fence must not take the disk from a later run."""
        with contextlib.suppress(OSError):  # each save reports the error
            self._initial_owner = checkpoints.owner(directory)
        self.broken = False
        """True if a save has failed because the ranks lost their connections."""
        self._group: dist.ProcessGroup | None = None
        self._copies = Copies()
        self._hurry = threading.Event()
        self.least_s: float | None = None
        """Lower bound in seconds for the last save's duration without pauses; None before the first save."""
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def rest_s(self) -> float:
        """Estimated seconds until the save in progress ends; 0 if none is in progress."""
        return max(0.0, (self.least_s or 0.0) - (time.monotonic() - self._began)) if self.busy else 0.0

    def begin(self, step: int, flat: Flat, metric: checkpoints.Metric | None = None) -> None:
        """Copy `flat` and start saving it. The previous save must have ended (`wait`). Only rank 0's `metric` counts. All ranks
        must call this."""
        if self._group is None:
            self._group = deadlocks.watch().own(dist.new_group(backend="gloo"))
        self._outcome = None
        self._hurry.clear()
        self._began = time.monotonic()
        copy, released = self._copies.of(flat), threading.Event()
        self._thread = threading.Thread(target=self._save, args=(step, copy, metric, released), name=THREAD, daemon=True)
        self._thread.start()  # hold the thread back until start() returns, or it would keep the GIL for some ms
        released.set()

    def connect_again(self) -> None:
        """Let the next save open new connections. No save may be in progress. All ranks must call this."""
        self._group, self.broken = None, False
        self._disks.connect()

    def hurry(self) -> None:
        """Finish the save in progress without pauses."""
        self._hurry.set()

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the last save and return its outcome, or None if it takes longer than `timeout_s` or its outcome was returned
        before."""
        if self._thread is not None:
            self.hurry()
            self._thread.join(timeout_s)
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        self._group = None

    def _save(self, step: int, flat: Flat, metric: checkpoints.Metric | None, released: threading.Event) -> None:
        released.wait()
        try:
            outcome = self._together(step, flat, metric)
            if outcome.committed:
                self.least_s = (time.monotonic() - self._began) / checkpoint_file.UNHURRIED
            self._outcome = outcome
        except Exception as error:  # the process group failed: a rank is gone, or a connection was reset
            self.broken = True
            self._outcome = Outcome(step, False, f"the ranks lost each other ({sentence(error)})")
            self._report("save_failed", step=step, reason=self._outcome.reason)

    def _together(self, step: int, flat: Flat, metric: checkpoints.Metric | None) -> Outcome:
        """Write this rank's part, gather all ranks' reports, commit on every disk, and broadcast the outcome."""
        begun = time.monotonic()
        target = checkpoints.saving(self.directory, step, self._generation)
        files: dict[str, Mapping[str, int]] = {}
        aside, problem = self._aside(target), ""
        try:
            writer = checkpoint_file.Writer(aside[0].parent if aside else target, self._hurry, aside[0] if aside else None)
            state_dict_saver.save(flat, storage_writer=writer, process_group=self._group)
            files = {**writer.files}
            if self._rank == 0:
                files[_METADATA] = _measured(target / _METADATA)
        except (Exception, CheckpointException) as error:  # CheckpointException does not derive from Exception
            problem = sentence(error)
        answers: list[Any] = [None] * self._ranks
        dist.all_gather_object(answers, Written(problem, files, self.copy.same, metric, aside), group=self._group)
        outcome = [Outcome(step, False)]
        if self._disks.leader:
            outcome = [self._commit(step, target, answers, begun)]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if aside:
            os.close(int(aside[0].name))
        return outcome[0]

    def _aside(self, target: Path) -> tuple[Path, str] | None:
        """If this disk accepts no files, return an unnamed temporary file for this rank's part, which other disks still need, and
        the disk's error. Otherwise, or on rank 0's disk, whose errors make the save fail, return None."""
        if self._disks.here:
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:  # on an error the save fails on all ranks
                    return Path(f"/proc/{os.getpid()}/fd/{os.dup(file.fileno())}"), sentence(error)
        return None

    def _commit(self, step: int, target: Path, answers: list[Written], begun: float) -> Outcome:
        """Commit the checkpoint on every disk, beginning with rank 0's. Never raises, since other ranks wait for the result. All
        leaders must call this."""
        disks, first = self._disks, self._rank == 0
        problem = next((written.problem for written in answers if written.problem), "")
        files = {name: file for written in answers for name, file in written.files.items()}
        if not problem:
            files[_METADATA] = files.pop(_METADATA)  # it was written last
        path, metric = self.directory / contract.checkpoint_name(step), answers[0].metric
        new = checkpoints.Checkpoint(step, path, self._run, self._generation, self._ranks, time.time(), metric=metric)
        if not disks.several:
            outcome = self._put(target, new, files, problem)
        else:
            if not problem:
                parts = [
                    Part(name, file["size"], file["crc32"], disks.by_rank[rank])
                    for rank, written in enumerate(answers)
                    for name, file in written.files.items()
                ]
                local = [written for written, disk in zip(answers, disks.by_rank, strict=True) if disk == disks.here]
                places = {name: written.aside[0] for written in local if written.aside for name in written.files}
                problem = disks.exchange(parts, lambda name: places.get(name, target / name), disks.savers)
                problem = next((written.aside[1] for written in local if written.aside), problem)
            decision = None
            if first:
                new = dataclasses.replace(new, time=time.time())
                decision = self._put(target, new, files, problem), new.time, self._news(answers)
            outcome, now, news = disks.broadcast(decision, disks.savers)
            if not first:
                new = dataclasses.replace(new, time=now)
                outcome = self._put(target, new, files, problem or outcome.reason, news)
            outcome = self._summed_up(disks.each(outcome, disks.savers))
        if first and outcome.committed:
            seconds, size = round(time.monotonic() - begun, 6), sum(file["size"] for file in files.values())
            self._report("committed", step=step, path=str(new.path), bytes=size, seconds=seconds)
            if outcome.elsewhere:
                self._report("not_copied", step=step, reason=outcome.elsewhere)
        elif first:
            self._report("save_failed", step=step, reason=outcome.reason)
        if outcome.committed:
            try:
                checkpoints.sweep(self.directory, new, self.retention)
            except OSError as error:
                log.warning("outlast: old checkpoints could not be removed: %s", sentence(error))
        return outcome

    def _put(
        self,
        target: Path,
        new: checkpoints.Checkpoint,
        files: Mapping[str, Mapping[str, int]],
        problem: str,
        news: metrics.News | None = None,
    ) -> Outcome:
        try:
            if problem:
                raise OutlastError(problem)
            if news:
                self.copy.take(news)
            if not self.fenced:
                if (owner := checkpoints.owner(self.directory)) not in (self._initial_owner, self._run):
                    raise Superseded(f"run {owner} has taken over {self.directory}; this process must stop")
                checkpoints.acquire(self.directory, self._run, self._generation, first=self._rank == 0)
                self.fenced = True
            checkpoints.commit(target, new, files)
        except Exception as error:
            shutil.rmtree(target, ignore_errors=True)  # `sweep` removes leftovers later
            return Outcome(new.step, False, sentence(error), isinstance(error, Superseded))
        return Outcome(new.step, True)

    def _news(self, answers: list[Written]) -> metrics.News | None:
        try:
            return self.copy.news(min(answers[rank].same for rank in self._disks.leading[1:]))
        except OSError as error:
            log.warning("outlast: %s cannot be copied to other disks: %s", contract.METRICS, sentence(error))
            return None

    def _summed_up(self, outcomes: list[Outcome]) -> Outcome:
        failed = {rank: outcome for rank, outcome in zip(self._disks.leading, outcomes, strict=True) if not outcome.committed}
        if 0 in failed:
            return outcomes[0]
        elsewhere = "; ".join(f"rank {rank}: {outcome.reason}" for rank, outcome in failed.items())
        replaced = next((outcome for outcome in failed.values() if outcome.superseded), None)
        if replaced:  # a later generation owns one of our disks
            return dataclasses.replace(outcomes[0], reason=replaced.reason, superseded=True)
        return dataclasses.replace(outcomes[0], elsewhere=elsewhere)


def _measured(path: Path) -> dict[str, int]:
    return {"size": path.stat().st_size, "crc32": checkpoints.checksum(path)}


def sentence(error: BaseException) -> str:
    """Describe an error in one sentence, without its traceback."""
    if isinstance(error, CheckpointException):
        rank, (failure, _) = min(error.failures.items())
        return f"rank {rank}: {sentence(failure)}"
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(error) if isinstance(error, OutlastError) else f"{type(error).__name__}: {error}"
