"""The order of samples, as pure functions of (seed, epoch, position), and the order in which gradients are added (`ddp`).

`permuted` shuffles all samples of an epoch. `Windows` shuffles the shards, groups them into windows of a few shards, and shuffles
the samples of each window, so that few shards are read at a time. Neither depends on the number of ranks, on a machine's cache,
or on any library's generator.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

Indices = NDArray[np.int64]

_ROUNDS = 8
VERSION = 1
"""Version of the permutation, a part of every key. A change of the permutation without a new version would repeat some samples in
resumed runs and skip others."""


def permuted(positions: Indices, samples: int, seed: int, epoch: int) -> Indices:
    """Return the samples at `positions` of a shuffled epoch: a bijection of 0 ... samples-1, computed without a table.

    This is a Feistel network over Z_rows x Z_columns, a near-square that just holds `samples`, with cycle walking (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). It uses no library's generator, so the order never changes.
    """
    return _permuted(positions, samples, f"outlast stream {VERSION} {seed} {epoch}")


def _permuted(positions: Indices, samples: int, key: str) -> Indices:
    rows = math.isqrt(samples - 1) + 1
    columns = -(-samples // rows)
    digest = hashlib.shake_256(key.encode()).digest(8 * _ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = positions.astype(np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        row, column = np.divmod(values[walking], np.uint64(columns))
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _mixed(column ^ even) % np.uint64(rows)) % np.uint64(rows)
            column = (column + _mixed(row ^ odd) % np.uint64(columns)) % np.uint64(columns)
        values[walking] = row * np.uint64(columns) + column
        walking = walking[values[walking] >= samples]
    return values.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finalizer: every bit of the input affects every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Windows:
    """The order of samples in shards of `sizes` samples, shuffled in windows of `window` shards."""

    def __init__(self, sizes: Sequence[int], window: int, seed: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._window, self._seed = window, seed
        self._layout = functools.lru_cache(maxsize=2)(self._laid_out)  # this epoch's and the next one's

    def at(self, positions: Indices, epoch: int) -> Indices:
        """Return the samples at `positions` of an epoch, numbered in the order of the shards: a bijection of 0 ... samples-1."""
        shards, ends, lasts = self._layout(epoch)
        windows = np.searchsorted(lasts, positions, side="right")
        samples = np.empty_like(positions)
        for window in np.unique(windows):
            here = windows == window
            first = int(lasts[window - 1]) if window else 0
            key = f"outlast window {VERSION} {self._seed} {epoch} {window}"
            places = first + _permuted(positions[here] - first, int(lasts[window]) - first, key)
            slots = np.searchsorted(ends, places, side="right")
            chosen = shards[slots]
            samples[here] = self._starts[chosen] + places - (ends[slots] - self._sizes[chosen])
        return samples

    def ahead(self, position: int, epoch: int, windows: int) -> list[int]:
        """Return the shards of `windows` windows in the order of their use, beginning with the window that holds `position`.

        The windows of the next epoch follow the last window.
        """
        shards, _, lasts = self._layout(epoch)
        first = self.window(position, epoch)
        ahead = shards[first * self._window : (first + windows) * self._window].tolist()
        if (missing := windows - (len(lasts) - first)) > 0:
            ahead += self._layout(epoch + 1)[0][: missing * self._window].tolist()
        return list(dict.fromkeys(ahead))

    def window(self, position: int, epoch: int) -> int:
        """Return the number of the window that holds `position`."""
        return int(np.searchsorted(self._layout(epoch)[2], position, side="right"))

    def _laid_out(self, epoch: int) -> tuple[Indices, Indices, Indices]:
        """Return the shards of an epoch in order, and the end positions of the shards and of the windows."""
        count = len(self._sizes)
        shards = _permuted(np.arange(count), count, f"outlast shards {VERSION} {self._seed} {epoch}")
        ends = np.cumsum(self._sizes[shards])
        last = np.minimum(np.arange(self._window - 1, count + self._window - 1, self._window), count - 1)
        return shards, ends, ends[last]


def ddp(model: torch.nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Return `DistributedDataParallel(model, **options)` with its final gradient buckets from the first step on.

    An empty backward pass makes DDP rebuild its buckets, and leaves the model unchanged. A collective.
    """
    net = DistributedDataParallel(model, device_ids=None if device.index is None else [device.index], **options)
    if options.get("find_unused_parameters"):
        return net  # DDP does not rebuild its buckets then
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = vars(model).pop("forward", None)
    vars(model)["forward"] = lambda: sum(parameter.sum().abs().float().to(device) * 0 for parameter in parameters)
    try:
        net().backward()
    finally:
        del vars(model)["forward"]
        if hidden is not None:
            vars(model)["forward"] = hidden
    for parameter in parameters:
        parameter.grad = None
    return net
