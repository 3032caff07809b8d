"""Runs the training loop that the recipes share, from the newest checkpoint to the last step.

Read `train` first. A recipe is a class with its model, its step and its measurement:

    class Mine(loop.Recipe):
        def __init__(self, s: Settings, run: Session) -> None:
            super().__init__(s, run)
            self.model = network().to(run.device)
            self.net, self.optimizer, self.stream = run.ddp(self.model), ..., Stream(...)

        def update(self, step: int, batch: Batch) -> None: ...      # gradients, optimizer
        def report(self, step: int, batch: Batch) -> None: ...      # run.log, a line
        def measure(self, step: int) -> float: ...                  # after each epoch
        def finish(self, step: int) -> None: ...                    # results

    loop.train(Mine, settings)
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import math
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.base.errors import OutlastError
from outlast.training import Session, Stream, session
from outlast.training.samples.stream import Batch
from outlast.training.state import checkpoint


def train(recipe: Callable[[Any, Session], Recipe], s: Any, *, tf32: bool = True) -> None:
    """Train a recipe from its newest checkpoint to the last step. Raises OutlastError at the end if the recipe sets `problem`."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if getattr(s, "deterministic", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with session.open(seed=s.seed, quiet=True) as run:
        if run.device.type == "cpu":
            retain_freed_memory()
        r = recipe(s, run)
        with hyperparameters(r.optimizer):
            step = run.resume(r.state())
        run.parameters(dataclasses.asdict(s) | r.used)
        r.begin(step)
        r.log.clock()
        if r.record.owed:
            measure(r, step)
        for batch in r.batches():
            for group in r.optimizer.param_groups:
                group["lr"] = r.rate(step, batch)
            r.update(step, batch)
            step += 1
            r.report(step, batch)
            leaving = run.interrupted()
            r.record.owed = r.due(step, batch)  # a run that must leave now measures at its next start
            if r.record.owed and not leaving:
                measure(r, step)
            elif leaving or run.due(step):
                r.remember()
                run.save(step, metric=r.unmeasured)
        r.finish(step)
    if r.problem:
        raise OutlastError(r.problem)


def measure(r: Recipe, step: int) -> None:
    """Measure the model, and save a checkpoint with the metric unless that is None."""
    metric = r.measure(step)
    r.log.clock()
    r.record.owed = False
    if metric is not None:
        r.remember()
        r.run.save(step, metric=metric)


class Recipe:
    """The part of a training run that differs between recipes. A subclass sets `net`, `optimizer` and `stream`."""

    net: nn.Module  # the model, wrapped for training on all ranks by `parallel`
    optimizer: torch.optim.Optimizer
    stream: Stream
    unmeasured: float | None = math.nan
    """Metric of checkpoints saved without a measurement. NaN is never the best; None stands for the logged metric."""

    problem = ""
    """Error message with which the run fails after writing its results, or "" if it succeeds."""

    def __init__(self, s: Any, run: Session) -> None:
        self.s, self.run, self.log = s, run, Log(run)
        self.record = Record()
        self.used: dict[str, Any] = {}
        """Values to record beside the settings or instead of them, such as the data type chosen for `auto`."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint contains. The record is first, because its errors explain a mismatch best."""
        return {"record": self.record, "model": self.net, "optimizer": self.optimizer, "stream": self.stream}

    def begin(self, step: int) -> None:
        """Prepare for the first step, after resuming; most recipes log the sizes of model and data."""

    def batches(self) -> Iterator[Batch]:
        """Return an iterator over this rank's batches for the remaining steps."""
        return iter(self.stream)

    def rate(self, step: int, batch: Batch) -> float:
        """Return the learning rate of a step, counted from 0."""
        raise NotImplementedError

    def update(self, step: int, batch: Batch) -> None:
        """Do one step: compute the gradients of all micro-batches, then call the optimizer."""
        raise NotImplementedError

    def report(self, step: int, batch: Batch) -> None:
        """Log a finished step."""
        raise NotImplementedError

    def due(self, step: int, batch: Batch) -> bool:
        """Return whether to measure the model after this step."""
        return batch.ends_epoch or step == self.stream.total_steps

    def measure(self, step: int) -> float | None:
        """Measure the model on all ranks. Returns the metric to save with the model, or None to skip the save."""
        raise NotImplementedError

    def remember(self) -> None:
        """Update the record before it is saved."""

    def finish(self, step: int) -> None:
        """Write the results."""
        raise NotImplementedError


class Record(types.SimpleNamespace):
    """A run's state besides its weights, in plain values that are equal on every rank.

    The keys of `fixed` name the values that must not change when a run is resumed, and the values of `fixed` are phrases for the
    error message, such as "other clips". A value is compared only if it is known both then and now.
    """

    def __init__(self, fixed: Mapping[str, str] | None = None, **values: Any) -> None:
        super().__init__(**({"owed": False, "losses": {}} | values))
        self._fixed = dict(fixed or {})

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all values."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "_fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises OutlastError if a fixed value differs."""
        current = {name: value for name in self._fixed if (value := getattr(self, name)) not in _UNKNOWN}
        for name, value in current.items():
            saved = state.get(name)
            pairs = [(name, saved, value)]
            if isinstance(value, Mapping):
                pairs = [(each, (saved or {}).get(each), part) for each, part in value.items()]
            for each, then, now in pairs:
                if then not in _UNKNOWN and then != now:
                    raise OutlastError(
                        f"the checkpoint belongs to {self._fixed[name]} ({_short(each, then, now)}) than the one here "
                        f"({_short(each, now, then)}); resume with what the run began with, or begin a new run in another output"
                    )
        vars(self).update({**state, **current})

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the record in the checkpoint at `path`."""
        record = cls()
        checkpoint.restore(path, {"record": record})
        return record


_UNKNOWN: tuple[Any, ...] = (None, "", [], {})


def _short(name: str, value: Any, other: Any) -> str:
    """Return a value as text; for a list, only the items that differ from `other`."""
    if isinstance(value, list):
        value = ", ".join(sorted(map(str, {*value} - {*other}))[:3]) or "another order"
    return f"{name} {value}"


class Log:
    """Rank 0's log, printed and also written to a file if one is given, and a clock that measures training time."""

    def __init__(self, run: Session, file: str = "") -> None:
        self._run, self._file = run, file
        self.done = 0
        """Number of samples or tokens that all ranks have processed since the last call of `speed` or `clock`."""
        self._counted_s, self._since = 0.0, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds that this process has trained, not counting measurements."""
        return self._counted_s + time.monotonic() - self._since

    def line(self, text: str) -> None:
        """Print a line on rank 0, and append it to the log file."""
        if self._run.rank:
            return
        print(text, flush=True)
        try:
            if self._file:
                with (self._run.output / self._file).open("a") as file:
                    file.write(text + "\n")
        except OSError as error:  # a full disk must not end the training
            print(f"{self._file} cannot be written: {error.strerror}; training goes on", flush=True)
            self._file = ""

    def clock(self) -> None:
        """Restart the clock, without counting the time since the last call of `speed` as training."""
        self._since, self.done = time.monotonic(), 0

    def speed(self) -> float:
        """Return the samples or tokens per second since the last call of `speed` or `clock`."""
        now = time.monotonic()
        seconds, done = max(1e-9, now - self._since), self.done
        self._since, self.done, self._counted_s = now, 0, self._counted_s + seconds
        return done / seconds


def rate(highest: float, step: int, steps: int, warmup: int, *, lowest: float = 0.0, falls: bool = True) -> float:
    """Return a step's learning rate: a linear warm-up, then constant or, if `falls` is True, a cosine to `lowest`."""
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    if not falls:
        return highest
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2


def parallel(how: str, run: Session, model: nn.Module, layers: Sequence[nn.Module] = (), *, compiled: bool = False) -> nn.Module:
    """Wrap a model for training on all ranks, with DDP or FSDP2 (`fsdp`). FSDP2 gathers one of the `layers` at a time."""
    if how == "fsdp":
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        for layer in layers:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    net = run.ddp(model) if run.world_size > 1 else model
    if compiled:
        model.compile()
    return net


def groups(model: nn.Module, decay: float, others: float = 0.0) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, with weight decay `decay` for matrices and `others` for norms and biases."""
    every = list(model.parameters())
    parts = (([p for p in every if p.dim() > 1], decay), ([p for p in every if p.dim() <= 1], others))
    return [{"params": some, "weight_decay": each} for some, each in parts if some]


def plain(norm: Any) -> Tensor:
    """Return a norm as a plain tensor, gathered if the gradients are sharded."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


@contextlib.contextmanager
def hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the optimizer's hyper-parameters at the end of the context, in which a checkpoint may load other ones."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def retain_freed_memory() -> None:
    """Make glibc keep large freed blocks, because clearing new pages would take a tenth of the time of a small model's step."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (mallopt(3))
            mallopt(parameter, 1 << 30)
