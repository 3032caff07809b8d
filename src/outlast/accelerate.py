"""Exact, elastic resume for training loops that use Hugging Face's Accelerate.

    import outlast.accelerate
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    run = outlast.accelerate.attach(accelerator, batch=64, epochs=3)
    for epoch in run.epochs():
        for inputs in loader:
            with accelerator.accumulate(model):
                ...
                run.step()

A killed run continues from its newest state with the same samples and the same global batch. With the same number of ranks, the
results are bit-identical. Design: docs/decisions/0060.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast.base.errors import OutlastError
from outlast.training import Session, ddp, libraries, mistakes, session
from outlast.training.state import weights

TESTED = "1.0 and 1.15"
_PRIVATE = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "gradient_state")


def attach(
    accelerator: accelerate.Accelerator, batch: int, epochs: int, *, loader: Any = None, seed: int = 0, output: str | Path = "out"
) -> Run:
    """Restore the newest state of this run, and return the `Run`. Call this on all ranks, after `accelerator.prepare`.

    `batch` is the number of samples per optimizer step, over all ranks; micro-batches have at most the loader's `batch_size`, and
    `accelerator.gradient_accumulation_steps` is set accordingly. `loader` may be omitted if only one loader is prepared. The
    order of samples depends only on `seed`. Unless the loader has `drop_last`, an epoch's last batch is filled up with the
    epoch's first samples. Outside a job, `output` is the checkpoint directory. Objects passed to `register_for_checkpointing` are
    restored, too. Schedules step once per optimizer step in every world. Raises OutlastError if training cannot resume exactly.
    """
    if problem := _unsupported(accelerator):
        raise OutlastError(f"outlast.accelerate.attach: {problem}")
    return Run(accelerator, _training_loader(accelerator, loader), batch, epochs, seed, Path(output))


def _unsupported(accelerator: Any) -> str:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    absent = next((name for name in _PRIVATE if not hasattr(accelerator, name)), "")
    split = libraries.split(accelerator)
    cases = {
        f"accelerate {accelerate.__version__} has no Accelerator.{absent}, which Outlast relies on; tested: {TESTED}": absent,
        "this accelerator is attached already; remove the second call": hasattr(accelerator, "_outlast"),
        f"{ranks} processes train models of their own; without GPUs write Accelerator(cpu=True)": ranks > 1
        and not dist.is_initialized(),
        "DeepSpeed keeps checkpoints of its own, which only it can load; use DDP or FSDP2": str(
            accelerator.distributed_type
        ).endswith("DEEPSPEED"),
        split: split,
    }
    if sentence := next((sentence for sentence, holds in cases.items() if holds), ""):
        return sentence
    if not accelerator._models or not accelerator._optimizers:
        return "nothing is prepared yet; call attach after accelerator.prepare(model, optimizer, loader)"
    if any(isinstance(each, DistributedDataParallel) and each.static_graph for each in accelerator._models):
        return libraries.STATIC_GRAPH
    return ""


def _training_loader(accelerator: Any, loader: Any) -> Any:
    prepared = accelerator._dataloaders
    if loader is None and len(prepared) != 1:
        raise OutlastError(
            f"outlast.accelerate.attach: {len(prepared)} loaders are prepared; name the one of training samples: loader=loader"
        )
    loader = prepared[0] if loader is None else loader
    if not any(loader is each for each in prepared):
        raise OutlastError("outlast.accelerate.attach: loader is not prepared; give what accelerator.prepare has returned for it")
    if not hasattr(loader, "base_dataloader") or type(loader).__name__ != "DataLoaderShard":
        raise OutlastError(
            f"outlast.accelerate.attach: the loader is a {type(loader).__name__}, which reads on one rank for all; "
            "use DataLoaderConfiguration(dispatch_batches=False)"
        )
    if problem := libraries.unordered(loader.dataset):
        raise OutlastError(f"outlast.accelerate.attach: {problem}")
    return loader


class Run:
    """A run in progress, as returned by `attach`."""

    session: Session

    def __init__(self, accelerator: Any, loader: Any, batch: int, epochs: int, seed: int, output: Path) -> None:
        base = loader.base_dataloader
        ranks, rank = accelerator.num_processes, accelerator.process_index
        shuffle = not isinstance(_innermost(base), torch.utils.data.SequentialSampler)
        most = base.batch_sampler.batch_size // (ranks if getattr(base.batch_sampler, "split_batches", False) else 1)
        self.session = session.attach(seed, output=output, quiet=True, batch=batch)
        self._order = libraries.Order(
            len(loader.dataset), batch, rank=rank, ranks=ranks, most=most, seed=seed, shuffle=shuffle, drop_last=loader._drop_last
        )
        self._accelerator, self._loader, self._epochs = accelerator, loader, epochs
        self._position = _Position(epochs * self._order.steps_per_epoch)
        self._pending = False
        """True if `boundary` is due once the script has ended its work for the epoch."""
        self._adopt(ranks)
        loader.base_dataloader = libraries.Loader(base, self._order, seed)
        accelerator._outlast, accelerator.load_state = self, _refuse
        self.session.__enter__()
        for model in accelerator._models:
            ddp.settle(model)
        self.session.resume(self._state())
        self._order.seek(self._position.step)

    @property
    def steps(self) -> int:
        """Number of optimizer steps completed."""
        return self._position.step

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps over all epochs, the same in every world."""
        return self._position.total_steps

    def epochs(self) -> Iterator[int]:
        """Iterate over the remaining epochs, the first of which may be partly done. At the end, save the last step and close the
        session."""
        try:
            for epoch in range(self._position.step // self._order.steps_per_epoch, self._epochs):
                self._loader.iteration = epoch
                self._order.set_epoch(epoch)  # early versions of accelerate do not do this
                yield epoch
                self._end()
        except BaseException:
            self.session.__exit__(*sys.exc_info())
            raise
        self.session.__exit__(None, None, None)

    def step(self, **values: Any) -> None:
        """Report the end of a micro-batch. After an optimizer step, log `values` and take a snapshot or checkpoint if one is due.

        If any rank is interrupted, raises SystemExit(75) once the step is saved. All ranks must call this.
        """
        if not self._accelerator.sync_gradients:
            return
        self._end()
        self._position.step += 1
        self.session.log(self._position.step, **values)
        self._pending = True
        if self._position.step % self._order.steps_per_epoch:
            self._end()

    def _end(self) -> None:
        if self._pending:
            self._pending = False
            self.session.boundary(self._position.step)

    def _adopt(self, ranks: int) -> None:
        """Adapt gradient accumulation and schedules to this world. Raises OutlastError if a schedule's length depends on the
        world."""
        self._accelerator.gradient_accumulation_steps = self._order.accumulate
        for schedule in self._accelerator._schedulers:
            schedule.split_batches = True  # one schedule step per optimizer step
            lengths = mistakes.lengths({"schedule": schedule.scheduler}).get("schedule", {})
            length = next(iter(lengths.values()), None)
            if ranks > 1 and length == self._position.total_steps * ranks:
                raise OutlastError(
                    f"outlast.accelerate.attach: the schedule has {length} steps, {ranks} for each of the run's "
                    f"{self._position.total_steps}; make it for {self._position.total_steps} steps, without num_processes"
                )

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        groups = {
            "model": [weights.trained(accelerator.unwrap_model(model)) for model in accelerator._models],
            "optimizer": [getattr(each, "optimizer", each) for each in accelerator._optimizers],
            "schedule": [getattr(each, "scheduler", each) for each in accelerator._schedulers],
            "custom": accelerator._custom_objects,
            "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        }
        things = {f"{name}_{n}" if n else name: thing for name, group in groups.items() for n, thing in enumerate(group)}
        return {**things, "position": self._position}


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise OutlastError("accelerator.load_state() would undo what outlast.accelerate.attach has restored; remove the call")


def _innermost(loader: Any) -> Any:
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", sampler)


class _Position:
    """The number of optimizer steps completed, with `state_dict` and `load_state_dict`."""

    def __init__(self, total_steps: int) -> None:
        self.step, self.total_steps = 0, total_steps

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = state["step"]
