"""What Outlast can continue exactly: the reason why not is one sentence with the remedy."""

# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Mapping
from typing import Any

import lightning
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from outlast.lightning.position import LOGGED
from outlast.training import libraries
from outlast.training.samples.stream import kind

TESTED = "2.6"
"""Versions of lightning that the tests have run with."""
_ATTRIBUTES = (
    *(f"_logger_connector.{name}" for name in LOGGED),
    "fit_loop._data_fetcher",
    "fit_loop.epoch_progress",
    "fit_loop.epoch_loop.batch_progress",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress",
    "fit_loop.on_iteration_done",
)
"""Private attributes of a Trainer that are read or set."""
_CHANGING = (
    callbacks.WeightAveraging, callbacks.StochasticWeightAveraging, callbacks.ModelPruning, callbacks.BaseFinetuning,
    callbacks.GradientAccumulationScheduler, callbacks.BatchSizeFinder, callbacks.LearningRateFinder,
)  # fmt: skip
"""Callbacks that keep weights of their own, or change the batch or which weights train."""


def at(trainer: Any, path: str) -> Any:
    """A part of a trainer by its path of attributes; the trainer itself if that is empty."""
    return operator.attrgetter(path)(trainer) if path else trainer


def problem(trainer: Any, hooks: Mapping[str, type]) -> str:
    """The reason why a trainer cannot continue exactly, and the remedy; empty if it can."""
    made = type(trainer)
    if not issubclass(made, Trainer):
        package = made.__module__.partition(".")[0]
        return f"a {made.__name__} of {package} is no Trainer of lightning; write `import lightning.pytorch as pl`"
    if hasattr(trainer, "_outlast"):
        return "this trainer is attached already; remove the second call"
    if name := _missing(trainer, hooks):
        return f"lightning {lightning.__version__} has another Trainer.{name} than this Outlast knows; tested: {TESTED}"
    if trainer.training or trainer.fit_loop.epoch_loop.batch_progress.total.ready:
        return "training has begun already; attach before trainer.fit()"
    strategy, ranks = trainer.strategy, int(os.environ.get("WORLD_SIZE", "1"))
    processes, limit = trainer.num_devices * trainer.num_nodes, trainer.limit_train_batches
    options, hook = getattr(strategy, "_ddp_kwargs", {}), getattr(strategy, "_ddp_comm_state", None)
    deepspeed, known = isinstance(strategy, DeepSpeedStrategy), isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
    forks = getattr(strategy, "_start_method", "popen") != "popen"
    cases = {
        "DeepSpeed keeps checkpoints of its own, which only it can load; use strategy='ddp'": deepspeed,
        f"{type(strategy).__name__} is not supported; use strategy='ddp'": not known or forks,
        f"the Trainer is made for {processes} processes, and there are {ranks}; "
        "write L.Trainer(..., **outlast.lightning.world()), and start with outlast run or torchrun": processes != ranks,
        "static_graph lays out gradients after the first step and cannot resume exactly; leave it out": options.get(
            "static_graph"
        ),
        "a communication hook of DDP keeps gradients of its own; leave ddp_comm_state out": hook is not None,
        "limit_train_batches, overfit_batches and fast_dev_run count batches of a rank; leave them out, or give the loader a "
        "torch.utils.data.Subset": isinstance(limit, int) or limit != 1.0,
        "reload_dataloaders_every_n_epochs changes the data; leave it out": trainer.reload_dataloaders_every_n_epochs,
    }
    return next((sentence for sentence, holds in cases.items() if holds), "") or callback_problem(trainer)


def _missing(trainer: Any, hooks: Mapping[str, type]) -> str:
    """The first method that we override, or attribute that we use, which this Lightning lacks or has with other parameters."""
    for path, mixin in hooks.items():
        methods = {name: method for name, method in vars(mixin).items() if inspect.isfunction(method)}
        parameters = {name: tuple(inspect.signature(method).parameters)[1:] for name, method in methods.items()}
        if name := libraries.missing(at(trainer, path), parameters):
            return f"{path}.{name}".lstrip(".")
    paths = (name.rpartition(".") for name in _ATTRIBUTES)
    return next((f"{path}.{name}" for path, _, name in paths if not hasattr(at(trainer, path), name)), "")


def callback_problem(trainer: Any) -> str:
    """The same for the callbacks, of which a module may add some in `fit`."""
    names = [type(each).__name__ for each in trainer.callbacks if isinstance(each, _CHANGING)]
    return f"{names[0]} changes weights or batches in ways that no state holds; leave it out" if names else ""


def loader_problem(loader: Any) -> str:
    """The same for the loader of training samples."""
    if not isinstance(loader, DataLoader):
        return (
            f"the training loader is {kind(loader)}, whose samples have no order to continue; give a torch.utils.data.DataLoader"
        )
    dataset: Any = loader.dataset
    if unordered := libraries.unordered(dataset):
        return unordered
    sampler = loader.sampler
    drawn = isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != len(dataset))
    if drawn or not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler):
        return (
            f"the loader's {type(sampler).__name__} chooses the samples itself; remove it, or make the order part of the dataset"
        )
    return "the loader's batch_sampler chooses the batches itself; give batch_size instead" if loader.batch_size is None else ""
