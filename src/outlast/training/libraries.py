"""Shared parts of `outlast.hf`, `outlast.accelerate`, `outlast.lightning` and `outlast.torchtitan`: they put the samples of other
libraries' training loops into Outlast's order, and refuse what cannot resume exactly."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from outlast import order
from outlast.base.errors import OutlastError
from outlast.training.samples import seeded
from outlast.training.samples.stream import kind

if TYPE_CHECKING:
    from outlast.training.session import Session


def missing(owner: Any, hooks: dict[str, tuple[str, ...]]) -> str:
    """Return the first of `hooks` that `owner` lacks or has with other parameters, or an empty string."""
    for name, parameters in hooks.items():
        method = getattr(owner, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            return name
    return ""


SPLIT = "the model is split over ranks (tensor, context or pipeline parallelism), which is not supported"
STATIC_GRAPH = "static_graph lays out gradients after the first step and cannot resume exactly; leave it out"
RESERVED = ("step", "reduce")
"""Names that a logged value cannot have, since they are parameters of `Session.log`."""


def split(accelerator: Any) -> str:
    """Return why a rank of Accelerate's `accelerator` does not have a whole model, or an empty string if it does."""
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is None or mesh.non_data_parallel_size == 1:
        return ""
    return SPLIT


def boundary(run: Session, step: int, *, measured_later: bool) -> bool:
    """End a step, on all ranks. With `measured_later`, return whether the caller must save after the step's evaluation."""
    if not measured_later:
        run.boundary(step)
    elif run.interrupted():
        run.save(step, metric=math.nan)
    else:
        return run.due(step)
    return False


def plan(batch: int, ranks: int, most: int | None) -> order.Plan:
    """Call `order.plan`, but raise OutlastError instead of ValueError."""
    try:
        return order.plan(batch, ranks, most)
    except ValueError as problem:
        raise OutlastError(f"{problem}; change batch, or the number of workers") from None


def unordered(dataset: Any) -> str:
    """Return why a run could not resume in this dataset's order, and what to do, or an empty string if it could."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"the training data is {kind(dataset)} without an order to continue; give a dataset with __getitem__ and __len__"
    return ""


def unordered_loader(loader: Any) -> str:
    """Return why a run could not resume in the order of this loader's sampler, and what to do, or an empty string if it could."""
    if not isinstance(loader, DataLoader):
        return (
            f"the training loader is {kind(loader)}, whose samples have no order to continue; give a torch.utils.data.DataLoader"
        )
    dataset: Any = loader.dataset
    if problem := unordered(dataset):
        return problem
    sampler = loader.sampler
    drawn = isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != len(dataset))
    if drawn or not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler):
        return (
            f"the loader's {type(sampler).__name__} chooses the samples itself; remove it, or make the order part of the dataset"
        )
    return "the loader's batch_sampler chooses the batches itself; give batch_size instead" if loader.batch_size is None else ""


def shuffled(loader: DataLoader[Any]) -> bool:
    return bool(getattr(loader.sampler, "shuffle", isinstance(loader.sampler, RandomSampler)))


class Order(order.BatchSampler):
    """Yields micro-batches of `seeded.Key`s. Raises OutlastError if `ranks` cannot share the batch."""

    def __init__(self, samples: int, batch: int, *, ranks: int, most: int | None, **options: Any) -> None:
        plan(batch, ranks, most)
        super().__init__(samples, batch, ranks=ranks, most=most, **options)

    @property
    def num_processes(self) -> int:
        """The number of ranks, which accelerate needs to compute the size of a global batch."""
        return self.ranks

    def micro_batches(self, step: int) -> Iterator[list[Any]]:
        return ([(self.epoch, index) for index in indices] for indices in super().micro_batches(step))


class Loader(DataLoader[Any]):
    """A loader that reads another loader's dataset with the same settings, but in our order, and with seeded samples."""

    def __init__(self, other: DataLoader[Any], order: Order, seed: int) -> None:
        super().__init__(
            seeded.Batches(other.dataset, cast(Any, other.collate_fn), seed),
            batch_sampler=cast(Any, order),
            collate_fn=seeded.only,
            generator=torch.Generator(),  # without one, each iteration draws a number from the default generator
            num_workers=other.num_workers,
            pin_memory=other.pin_memory,
            prefetch_factor=other.prefetch_factor,
            persistent_workers=other.persistent_workers,
            multiprocessing_context=other.multiprocessing_context,
            worker_init_fn=other.worker_init_fn,
        )

    def set_epoch(self, epoch: int) -> None:
        cast(Order, self.batch_sampler).set_epoch(epoch)
