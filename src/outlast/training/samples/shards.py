"""Reads prepared data for a `Stream`: shards in a directory or, through this machine's cache, in a store.

    stream = Stream(Shards(run.data, block=1024), batch=480)             # tokens: `outlast data prepare text`, nanoGPT's *.bin
    stream = Stream(Shards("s3://bucket/pictures"), batch=256)           # columns: prepare images, jsonl, video

`outlast.data.shard_format` defines the format. Shards are mapped into memory, so nothing is copied before a batch is made.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.shard_format import Manifest, Shard
from outlast.order import Indices, Windows

WINDOW = 8
"""Default number of shards that are shuffled together if they are in a store (an arbitrary value)."""
AHEAD = 3
"""Number of windows whose shards are announced: the current window and the next two."""
_MAPPED = 1024
"""Maximum number of local shards that are mapped at a time. Linux allows a process 65,530 mappings."""
_LARGE = 4096
"""Samples of this many bytes or more are copied into a batch one by one, since fancy indexing would copy them twice."""
Columns = dict[str, NDArray[Any]]


class Place(Protocol):
    """A directory or a store that has shards."""

    name: str
    keeps: int
    remote: bool

    def manifest(self) -> Manifest:
        """Read the manifest. Raises OutlastError."""

    def hold(self, shard: Shard) -> tuple[Path, object]:
        """Download a shard if necessary. Returns the shard's path, and an object that protects the shard from removal while the
        object is referenced."""

    def file(self, name: str) -> Path:
        """Return the path of a small file beside the shards. Raises OutlastError if the file does not exist."""

    def announce(self, shards: Sequence[Shard], now: int) -> None:
        """Announce the shards that are read next, in order. The first `now` shards are needed at once."""


class Directory:
    keeps = _MAPPED
    remote = False

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    def manifest(self) -> Manifest:
        return shard_format.read(self._path)

    def hold(self, shard: Shard) -> tuple[Path, object]:
        return self._path / shard.file, None

    def file(self, name: str) -> Path:
        path = self._path / name
        if not path.is_file():
            raise OutlastError(f"{self.name} has no {name}; prepare the data again, or copy it there")
        return path

    def announce(self, shards: Sequence[Shard], now: int) -> None:
        """No-op: the kernel reads ahead."""


class Shards:
    """Prepared samples, to be read through a `Stream` or by index.

    `place` is a directory written by `outlast data prepare`, a nanoGPT directory with `train.bin` and `val.bin`, or the URL of
    such a directory in a store (`s3://bucket/data`). Shards in a store are fetched through this machine's cache as needed. `part`
    is `train` or `val`.

    A sample of text is an int64 tensor of `block` + 1 consecutive tokens that begin at a multiple of `block` in a shard; for a
    sample `s`, `s[:-1]` is the input and `s[1:]` the target. A batch has shape (n, `block` + 1). Any other sample is a dict of
    the prepared columns. In a batch, a column whose tensors all have one shape is stacked along a new first dimension, and any
    other column is a list of n tensors. `transform` is applied to each sample, in the Stream's `workers` if it has any; its
    random numbers are a function of (seed, epoch, index).

    `window` is the number of shards shuffled together. By default, these are all shards of a directory, but only 8 of a store, so
    that a machine needs few shards at a time. `patience` is the number of seconds to wait for an unreachable store. Raises
    OutlastError if the place does not have the part, or if its data do not fit the arguments.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        part: str = "train",
        *,
        block: int | None = None,
        window: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        patience: float = 1800.0,
    ) -> None:
        if window is not None and window < 1:
            raise OutlastError(f"window ({window}) must be a number of shards, 1 or more")
        self.part, self.block, self.transform = part, block, transform
        self._place = _opened(os.fspath(place), window or WINDOW, patience)
        self.manifest: Manifest = self._place.manifest()
        """Description of the prepared data: `kind`, `vocab_size`, `dtype`, `settings`, ..."""
        self._shards = self.manifest.part(part).shards
        self._sizes = np.array([self._samples(shard) for shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(self._sizes)
        if not len(self):
            raise OutlastError(
                f"no shard of {part} in {self._place.name} has the {(block or 0) + 1} tokens of a block and the next one; "
                "use a smaller block, or prepare more data"
            )
        self.remote: bool = self._place.remote
        self.window: int = window or (WINDOW if self.remote else len(self._shards))
        """Number of shards shuffled together."""
        self._forget()

    def _samples(self, shard: Shard) -> int:
        text = self.manifest.kind == "text"
        if text != (self.block is not None) or (self.block is not None and self.block < 1):
            if text:
                raise OutlastError(
                    f"{self._place.name} holds text, which needs a block of 1 token or more: block is {self.block}"
                )
            raise OutlastError(
                f"{self._place.name} holds {self.manifest.kind}, and a block (here {self.block}) is for text; "
                "leave block out, or name prepared text"
            )
        if self.block is None:
            return shard.samples
        tokens = shard_format.token_count(shard.bytes, self.manifest.dtype, f"{self._place.name}/{shard.file}")
        return max(0, tokens - 1) // self.block

    def _forget(self) -> None:
        """Drop all open shards. Called at the start, and after a fork or unpickling."""
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._held: OrderedDict[int, tuple[Columns, object]] = OrderedDict()
        self._announced: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.take(np.array([index % len(self)]))
        sample = {name: rows[0] for name, rows in batch.items()} if isinstance(batch, dict) else batch[0]
        return self.transform(sample) if self.transform else sample

    def file(self, name: str) -> Path:
        """Return the path of a small file beside the shards, e.g. `tokenizer.json`. Raises OutlastError if it does not exist."""
        return self._place.file(name)

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' checksums, which identifies the data; empty if the checksums are unknown."""
        if not all(shard.sha256 for shard in self._shards):
            return ""
        return hashlib.sha256(" ".join(shard.sha256 for shard in self._shards).encode()).hexdigest()[:16]

    def windows(self, window: int, seed: int) -> Windows | None:
        """Return an order in which `window` shards at a time are shuffled, or None if `window` is 0 or covers all shards."""
        return Windows(self._sizes.tolist(), window, seed) if 0 < window < len(self._shards) else None

    def reading(self, windows: Windows | None, position: int, epoch: int, shuffled: bool) -> None:
        """Announce the shards that are read next, from `position` in an epoch on. The order is that of `windows`; without
        windows, it is random over all shards if `shuffled`, and otherwise sequential."""
        count = len(self._shards)
        if windows:
            at = windows.window(position, epoch)
        else:
            at = 0 if shuffled else int(np.searchsorted(self._ends, position, side="right"))
        if not self.remote or (epoch, at) == self._announced:
            return
        self._announced = epoch, at
        if windows:
            ahead, now = windows.ahead(position, epoch, AHEAD), len(windows.ahead(position, epoch, 1))
        elif shuffled:  # with more shards than a window, the next one is unpredictable
            ahead, now = (list(range(count)), count) if count <= self.window else ([], self.window)
        else:
            ahead, now = [number % count for number in range(at, at + min(count, AHEAD * self.window))], 1
        with self._lock:  # let the cache evict shards that have been read
            for number in self._held.keys() - set(ahead):
                del self._held[number]
        self._place.announce([self._shards[number] for number in ahead], now)

    def await_(self, indices: Indices) -> None:
        """Wait until the shards of these samples are cached. The training process waits, since the processes that read the
        samples cannot signal that they are alive."""
        if self.remote:
            for shard in np.unique(np.searchsorted(self._ends, indices, side="right")):
                self._open(int(shard))

    def take(self, indices: Indices) -> Any:
        """Return the untransformed samples at `indices`: tokens of shape (n, block + 1), or a dict of columns."""
        shards = np.searchsorted(self._ends, indices, side="right")
        local = indices - (self._ends[shards] - self._sizes[shards])
        parts = [(rows := np.flatnonzero(shards == shard), self._open(int(shard)), local[rows]) for shard in np.unique(shards)]
        if self.block is None:
            return _joined(parts, len(indices))
        out = np.empty((len(indices), self.block + 1), np.int64)
        for rows, columns, places in parts:
            out[rows] = np.lib.stride_tricks.sliding_window_view(columns["tokens"], self.block + 1)[places * self.block]
        return torch.from_numpy(out)

    def _open(self, number: int) -> Columns:
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
                return self._held[number][0]
            path, held = self._place.hold(self._shards[number])
            columns = {"tokens": shard_format.tokens(path, self.manifest.dtype)} if self.block else shard_format.columns(path)
            self._held[number] = columns, held
            while len(self._held) > self._place.keeps:
                self._held.popitem(last=False)
            return columns


def _opened(place: str, window: int, patience: float) -> Place:
    if "://" not in place:
        return Directory(Path(place).expanduser())
    from outlast.training.samples.shard_fetching import Fetched

    return Fetched(place, window, patience)


def _joined(parts: list[tuple[Indices, Columns, Indices]], count: int) -> dict[str, Any]:
    """Join rows of several shards into a batch. A part is (rows of the batch, columns of a shard, rows of the shard)."""
    batch: dict[str, Any] = {}
    for rows, columns, places in parts:
        for name, column in columns.items():
            if (offsets := columns.get(name + shard_format.OFFSETS)) is not None:
                ragged = batch.setdefault(name, [None] * count)
                for row, place in zip(rows, places, strict=True):
                    ragged[row] = torch.from_numpy(np.array(column[offsets[place] : offsets[place + 1]]))
            elif not name.endswith(shard_format.OFFSETS):
                if name not in batch:
                    batch[name] = np.empty((count, *column.shape[1:]), column.dtype)
                if column[:1].nbytes < _LARGE:
                    batch[name][rows] = column[places]
                else:
                    for row, place in zip(rows, places, strict=True):
                        batch[name][row] = column[place]
    return {name: torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows for name, rows in batch.items()}
