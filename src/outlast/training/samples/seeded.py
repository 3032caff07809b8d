"""Samples whose random numbers are a function of (seed, epoch, index), so that augmentation resumes exactly, too."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from outlast.order import VERSION
from outlast.training import device

Key = tuple[int, int]


class Seeded(Dataset[Any]):
    """A dataset indexed by `Key`s, i.e. (epoch, index). A sample's random numbers depend only on the seed and its key."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed = _hashed(f"outlast sample {VERSION} {self._seed} {epoch} {index}")
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        return self._dataset[index]


class Batches(Dataset[Any]):
    """A dataset for a DataLoader whose batch sampler yields lists of `Key`s, with `collate_fn=only`. It joins a whole micro-batch
    at once, so `collate` continues with the random numbers of the last sample and is reproducible, too."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._seeded, self._collate = dataset, Seeded(dataset, seed), collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with preserved_generators():
            return [self._collate([self._seeded[key] for key in keys])]


def only(batches: list[Any]) -> Any:
    """Return the only batch in the list from `Batches.__getitems__`."""
    [batch] = batches
    return batch


def generators() -> tuple[Any, ...]:
    """Return the states of the default generators of Python, numpy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the default generators at the end of the block."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)


def seed_all(seed: int, rank: int | None = None, step: int = 0) -> None:
    """Seed all generators as a function of (seed, rank, step), or identically on every rank if only `seed` is given."""
    if rank is not None:
        seed = _hashed(f"outlast rank {seed} {rank} {step}")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    device.find().seed(seed)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.shake_256(text.encode()).digest(8), "little")
