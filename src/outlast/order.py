"""The order of samples, which depends only on (seed, epoch, position). This module needs only numpy, not the rest of Outlast.

    sampler = BatchSampler(len(dataset), batch=64, rank=rank, ranks=ranks, most=8, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)     # sampler.accumulate micro-batches make one optimizer step
    sampler.seek(step)                                      # after a restart, with any number of ranks

All ranks together see the same global batches in every world. `permuted` shuffles all samples of an epoch. `Windows` shuffles the
shards, groups them into windows, and shuffles the samples within each window, so only a few shards are read at a time.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
"""Sample numbers, or positions in an epoch, of shape (n,)."""

_ROUNDS = 8
_AT_A_TIME = 4096
"""Number of positions that are permuted at a time."""
VERSION = 1
"""This number is part of every key. It must change with the permutation, or resumed runs would repeat and skip samples."""


def permuted(positions: Indices, samples: int, seed: int, epoch: int) -> Indices:
    """Return the samples at `positions` in a shuffled epoch: a bijection on 0 to samples-1, computed without a table.

    This is a Feistel network over a near-square just large enough for `samples`, with cycle walking (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002). No library's random generator is used, so the order never changes.
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
    """Apply splitmix64's finalizer, with which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Windows:
    """The order of samples in shards of `sizes` samples, shuffled in windows of `window` shards."""

    def __init__(self, sizes: Sequence[int], window: int, seed: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._window, self._seed = window, seed
        self._layout = functools.lru_cache(maxsize=2)(self._laid_out)  # for this epoch and the next

    def at(self, positions: Indices, epoch: int) -> Indices:
        """Return the samples at `positions` in an epoch, numbered in the order of the shards: a bijection on 0 to samples-1."""
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
        """Return the shards of `windows` windows in order of use, beginning with the window that holds `position`, and continuing
        into the next epoch."""
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
        """Return an epoch's shards in order, and the positions at which each shard and each window ends."""
        count = len(self._sizes)
        shards = _permuted(np.arange(count), count, f"outlast shards {VERSION} {self._seed} {epoch}")
        ends = np.cumsum(self._sizes[shards])
        last = np.minimum(np.arange(self._window - 1, count + self._window - 1, self._window), count - 1)
        return shards, ends, ends[last]


class Plan(NamedTuple):
    """How a rank computes its share of a global batch."""

    microbatch: int
    """Number of samples per forward and backward pass."""
    accumulate: int
    """Number of micro-batches per optimizer step on one rank."""


def worlds(batch: int) -> list[int]:
    """Return the numbers of ranks that can share a batch equally."""
    return [ranks for ranks in range(1, batch + 1) if batch % ranks == 0]


def plan(batch: int, ranks: int, most: int | None = None) -> Plan:
    """Share `batch` samples equally among `ranks`, in the largest possible micro-batches of at most `most` samples.

    If `ranks` cannot share the batch, raises ValueError with the numbers of ranks that can.
    """
    for name, value in (("batch", batch), ("ranks", ranks), ("most", most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} ({value!r}) must be a whole number of 1 or more")
    share, rest = divmod(batch, ranks)
    if rest or not share:
        divisors = worlds(batch)
        listed = ", ".join(map(str, divisors if len(divisors) <= 10 else [*divisors[:9], "...", divisors[-1]]))
        raise ValueError(f"a global batch of {batch} samples cannot be shared equally among {ranks} ranks; {listed} ranks can")
    microbatch = max(size for size in worlds(share) if most is None or size <= most)
    return Plan(microbatch, share // microbatch)


class BatchSampler:
    """One rank's micro-batches, as lists of sample numbers for `DataLoader(dataset, batch_sampler=...)`.

    `samples` is the length of the dataset, and `batch` the number of samples per optimizer step over all ranks. Each rank gets an
    equal share of every batch, in micro-batches of at most `most` samples. An epoch's last batch is filled up with the epoch's
    first samples unless `drop_last` is set. An iteration yields the rest of an epoch; call `set_epoch` or `seek` before the next
    one. Raises ValueError if `ranks` cannot share the batch.
    """

    def __init__(  # noqa: PLR0913 # keywords, as of the DataLoader
        self,
        samples: int,
        batch: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        most: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.batch_size, self.accumulate = plan(batch, ranks, most)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks, which are counted from 0")
        self.steps_per_epoch = samples // batch if drop_last else -(-samples // batch)
        if samples < 1 or not self.steps_per_epoch:
            raise ValueError(f"a dataset of {samples} samples has no batch of {batch}")
        self.samples, self.batch, self.rank, self.ranks = samples, batch, rank, ranks
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self.step = 0
        """Number of steps of this epoch that the next iteration skips."""
        self._computed: tuple[object, Indices] = None, np.empty((0, 0), np.int64)
        """A key, and this rank's samples in the steps of that key, of shape (steps, share)."""

    def set_epoch(self, epoch: int) -> None:
        """Start with the first batch of `epoch`, unless `seek` has chosen a step in that epoch."""
        if epoch != self.epoch:
            self.epoch, self.step = epoch, 0

    def seek(self, step: int) -> None:
        """Continue after `step` optimizer steps, counted from the beginning of the run."""
        self.epoch, self.step = divmod(step, self.steps_per_epoch)

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch."""
        return self.steps_per_epoch * self.accumulate

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.step = self.step, 0
        for step in range(first, self.steps_per_epoch):
            yield from self.micro_batches(step)

    def micro_batches(self, step: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches for one step of the epoch."""
        for piece in self._share(step).reshape(self.accumulate, self.batch_size):
            yield piece.tolist()

    def _share(self, step: int) -> Indices:
        """Return this rank's samples in one step, of shape (share,). Computing many steps at once costs little more."""
        share = self.batch_size * self.accumulate
        count = max(1, _AT_A_TIME // share)
        block, row = divmod(step, count)
        key = self.epoch, self.seed, self.shuffle, block
        if self._computed[0] != key:
            steps = step - row + np.arange(count)[:, np.newaxis]
            positions = (steps * self.batch + self.rank * share + np.arange(share)).reshape(-1) % self.samples
            samples = permuted(positions, self.samples, self.seed, self.epoch) if self.shuffle else positions
            self._computed = key, samples.reshape(-1, share)
        here: Indices = self._computed[1][row]
        return here


class Loader:
    """Endless micro-batches of a map-style dataset, with torchtitan's loader interface. The state fits any number of ranks.

    `collate` joins a list of samples. The state is the number of optimizer steps done. Call `state_dict` between two steps.
    """

    def __init__(self, dataset: Any, sampler: BatchSampler, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.sampler, self.collate = dataset, sampler, collate
        self._handed_out = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            steps, begun = divmod(self._handed_out, self.sampler.accumulate)
            self.sampler.seek(steps)
            for number, indices in enumerate(self.sampler.micro_batches(self.sampler.step)):
                if number >= begun:
                    self._handed_out += 1
                    yield self.collate([self.dataset[index] for index in indices])

    def state_dict(self) -> dict[str, int]:
        """Return the position. Raises ValueError in the middle of a step."""
        steps, begun = divmod(self._handed_out, self.sampler.accumulate)
        if begun:
            raise ValueError(f"the loader is {begun} of {self.sampler.accumulate} micro-batches into a step; save between steps")
        return {"version": VERSION, "steps": steps, "batch": self.sampler.batch, "samples": self.sampler.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position in `state`. Raises ValueError if the batch or the number of samples has changed."""
        for name in ("batch", "samples"):
            if state[name] != getattr(self.sampler, name):
                raise ValueError(f"the position was saved with {name}={state[name]}, and it is {getattr(self.sampler, name)} now")
        self._handed_out = state["steps"] * self.sampler.accumulate
