"""What the integrations of training libraries share (`outlast.hf`, `outlast.accelerate`, `outlast.lightning`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from outlast import order
from outlast.base.errors import OutlastError
from outlast.training.samples import seeded
from outlast.training.samples.stream import kind


def missing(owner: Any, hooks: dict[str, tuple[str, ...]]) -> str:
    """The first of an object's methods that is absent or has not the parameters that we rely on; empty if there is none."""
    for name, parameters in hooks.items():
        method = getattr(owner, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            return name
    return ""


def plan(batch: int, ranks: int, most: int | None) -> order.Plan:
    """The same as `order.plan`. Raises OutlastError."""
    try:
        return order.plan(batch, ranks, most)
    except ValueError as problem:
        raise OutlastError(f"{problem}; change batch, or the number of workers") from None


def unordered(dataset: Any) -> str:
    """The reason why a dataset has no order in which a run could continue, and the remedy; empty if it has one."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"the training data is {kind(dataset)} without an order to continue; give a dataset with __getitem__ and __len__"
    return ""


class Order(order.BatchSampler):
    """Micro-batches of `seeded.Key`s."""

    stopped = False
    """Whether training has ended already, so that no batch follows."""

    @property
    def num_processes(self) -> int:
        """The number of ranks, from which accelerate computes the size of a batch over all ranks."""
        return self.ranks

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.step = self.step, 0
        for step in range(first, 0 if self.stopped else self.steps_per_epoch):
            for indices in self.micro_batches(step):
                yield [(self.epoch, index) for index in indices]


class Loader(DataLoader[Any]):
    """A loader with the dataset, the collator and the workers of another one, but samples in our order and seeded."""

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
