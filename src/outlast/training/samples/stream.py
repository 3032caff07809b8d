"""A run's samples, in an order that depends on neither restarts nor the world size.

A stream cuts every epoch into global batches, whose samples are a function of (seed, epoch, position) alone. Every rank takes its
share of each batch, so all ranks together read each sample of an epoch exactly once, however often the world changes.

    for batch in stream:                          # one optimizer step
        for (x, y), share in batch.split(net):    # this rank's micro-batches
            (loss(net(x), y) * share).backward()
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import numbers
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from outlast.base.errors import OutlastError
from outlast.order import VERSION, Indices, Windows, permuted
from outlast.training import data_waits, device
from outlast.training.samples.seeded import Seeded, preserved_generators
from outlast.training.samples.shards import Shards

_LEAVE_S = 1.0
"""Seconds to wait for a stream's thread to stop. If it still ran torch code at exit, torch would abort the process."""


def _world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share_of(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the start and end of `rank`'s contiguous share of `count` items. The first shares may have one item more."""
    small, larger = divmod(count, ranks)
    start = rank * small + min(rank, larger)
    return start, start + small + (rank < larger)


@dataclasses.dataclass(frozen=True)
class Batch:
    """This rank's part of one global batch."""

    epoch: int
    """Number of the epoch, counted from 0."""
    step: int
    """Number of optimizer steps in the stream before this batch."""
    size: int
    """Number of samples in the global batch, over all ranks."""
    indices: Indices
    """Dataset indices of this rank's samples, int64 of shape (n,); may be empty in a short last batch."""
    ends_epoch: bool
    """True for the last batch of its epoch."""
    pieces: tuple[tuple[Any, float], ...]
    """Micro-batches and their shares, as `split` yields them, but before they are moved to `net`'s device."""
    most: int = 1
    """Largest number of micro-batches that a rank has in this batch."""
    start: int = 0
    """Number of the epoch's samples that precede this batch, over all ranks."""

    def __iter__(self) -> NoReturn:
        raise OutlastError(
            "a Batch cannot be unpacked: it holds this rank's micro-batches and their shares; "
            "write `for (x, y), share in batch.split(net):` and multiply the mean loss by share"
        )

    def split(self, net: torch.nn.Module | None = None) -> Iterator[tuple[Any, float]]:
        """Iterate over this rank's micro-batches, as (data, share). Multiply the mean loss by the share before `backward`.

        `data` has the structure of the dataset's samples, and the first dimension of its tensors is the sample. The shares of all
        micro-batches on all ranks sum to the number of ranks: DDP averages gradients over ranks, so the result is the gradient of
        the mean loss over the global batch, even if the batch does not divide evenly. With `net` (DDP or FSDP2), gradients are
        exchanged in the last micro-batch only, and tensors are moved to `net`'s device. Every rank must take part in the
        exchange, so a rank without a sample in the short last batch of an epoch gets another rank's sample with share 0.0. FSDP2
        gathers weights in every forward pass, so a rank with fewer micro-batches than others gets its first micro-batch again,
        with share 0.0.
        """
        where = next((p.device for p in net.parameters()), None) if net is not None else None
        pieces = self.pieces
        if hasattr(net, "set_requires_gradient_sync"):  # FSDP2: every forward pass gathers weights from all ranks
            pieces = ((pieces[0][0], 0.0),) * (self.most - len(pieces)) + pieces
        for number, (data, share) in enumerate(pieces, start=1):
            with _exchanging(net, number == len(pieces)):
                yield (map_tensors(data, lambda tensor: tensor.to(where, non_blocking=True)) if where else data), share


@contextlib.contextmanager
def _exchanging(net: Any, last: bool) -> Iterator[None]:
    if not last and hasattr(net, "no_sync"):  # DDP
        with net.no_sync():
            yield
    else:
        if hasattr(net, "set_requires_gradient_sync"):  # FSDP2
            net.set_requires_gradient_sync(last)
        yield


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, change) for key, value in data.items()}
    if isinstance(data, tuple | list):
        changed = [map_tensors(value, change) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    return data


@dataclasses.dataclass(frozen=True)
class _Plan:
    epoch: int
    step: int
    start: int
    size: int
    ends_epoch: bool
    indices: Indices
    cuts: tuple[tuple[Indices, float], ...]


class Stream:
    """Batches of a dataset in an order that is a function of (seed, epoch, position).

    `dataset` is a tuple or dict of arrays, a single array, or a map-style dataset (`__getitem__`, `__len__`). Arrays are tensors
    or numpy arrays, also memory-mapped, whose first dimension is the sample; a thread indexes them a batch at a time, `prefetch`
    batches ahead. Samples of a map-style dataset are read and joined by `collate` in this thread or in `workers` processes. The
    random numbers drawn for a sample are a function of (seed, epoch, index), so augmentation resumes exactly, too.

    `batch` is the number of samples in one optimizer step over all ranks; the last batch of an epoch may be smaller. A batch is
    cut into pieces of `microbatch` samples, which are the same for every world size, and the pieces are distributed over the
    ranks. Without `microbatch`, each rank's share is one piece. The stream ends after `steps`, or after `epochs` if `steps` is
    None: each sample is then yielded exactly `epochs` times, even if a resumed run has another `batch`.

    The position of a stream counts the batches yielded, not those prefetched: in the loop's body, the current batch counts as
    consumed. `len(stream)` is the number of batches still to come. `for batch in stream:` yields a `Batch`; after the loop, the
    session saves the last step. Raises OutlastError for other kinds of data, and if a full batch leaves a rank without samples.

    The order is a keyed permutation (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), computed without a table.
    """

    def __init__(  # noqa: PLR0913 # keywords, as of the DataLoader
        self,
        dataset: Any,
        batch: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        steps: int | None = None,
        microbatch: int | None = None,
        shuffle: bool = True,
        prefetch: int = 2,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._arrays, self.samples = _source(dataset, collate)
        self._shards = dataset if isinstance(dataset, Shards) else None
        if self.samples == 0:
            raise OutlastError("the dataset is empty; a stream needs at least one sample")
        if not all(number is None or (isinstance(number, numbers.Integral) and number >= 1) for number in (batch, microbatch)):
            raise OutlastError(f"batch ({batch}) and microbatch ({microbatch}) must be whole numbers of 1 or more")
        self.batch = batch
        self.microbatch = microbatch
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """Epoch of the current batch; between loops, the epoch of the next batch."""
        self.step = 0
        """Number of batches yielded since the beginning of the run."""
        self.saved_with: tuple[int, int] | None = None
        """`batch` and total steps of the restored run; None if unknown."""
        self.reading = 0
        """Number of unfinished loops over the stream."""
        self.ended: Callable[[], None] | None = None
        """Called when a loop reaches the end of the stream, but not when the loop is left early."""
        self.saves = 0
        self.not_shardable = ""
        """Why the ranks of the process group must not read different shares of a batch; an empty string if they may."""
        self.sample = ""
        """Description of the first micro-batch, such as `a Tensor of shape (16, 3)`."""
        self.waited_s = 0.0
        """Seconds that steps have waited for data in this process."""
        self._window = dataset.window if isinstance(dataset, Shards) else 0
        self._start = 0
        self._epochs, self._steps = epochs, steps
        self._prefetch, self._workers = prefetch, workers
        self._collate = collate or default_collate

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one epoch."""
        return -(-self.samples // self.batch)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in the whole stream: those done, and those that remain with the current `batch`.

        If a run resumes with another `batch`, this number changes, and `step` counts steps of both batch sizes.
        """
        if self._steps is not None:
            return self._steps
        epoch, start = self._next
        if epoch >= self._epochs:
            return self.step
        return self.step - (-(self.samples - start) // self.batch) + (self._epochs - epoch - 1) * self.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the data; empty if unknown."""
        return self._shards.fingerprint if self._shards else ""

    @property
    def remedy(self) -> str:
        """Advice to print if training waits for this stream."""
        if self._shards and self._shards.remote:
            return "the store delivers too slowly: name it under `data` in the job file, which fetches everything before training"
        if self._arrays is not None or self._workers:
            more = f"workers (now {self._workers})" if self._workers else f"prefetch (now {self._prefetch})"
            return f"raise {more} of the Stream, or put the data on a faster disk"
        return "let processes read the samples: Stream(..., workers=4); or prepare the data: outlast data prepare"

    @property
    def _windows(self) -> Windows | None:
        """The order in windows of shards; None if samples are not shuffled in windows."""
        return self._shards.windows(self._window, self.seed) if self._shards and self.shuffle else None

    @property
    def _next(self) -> tuple[int, int]:
        return (self.epoch, self._start) if self._start < self.samples else (self.epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and order as plain values, the same on every rank."""
        self.saves += 1
        epoch, start = self._next
        order: dict[str, Any] = {"seed": self.seed, "samples": self.samples, "shuffle": self.shuffle}
        if self._shards:
            order |= {"order": "windows" if self._windows else "permuted", "window": self._window}
            order["data"] = self.fingerprint
        steps = {"step": self.step, "batch": self.batch, "total_steps": self.total_steps}
        return {"version": VERSION, **order, "epoch": epoch, "position": start, **steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. The world size and `batch` may differ from the saved run's.

        Raises OutlastError if the samples would come in another order: with other data, another seed, or another `shuffle`.
        """
        if state["version"] != VERSION:
            raise OutlastError(
                f"the stream was saved in order {state['version']}, this Outlast knows {VERSION}; use the one that saved it"
            )
        if state["samples"] != self.samples:
            raise OutlastError(
                f"the stream was saved over {state['samples']} samples, the dataset now has {self.samples}; "
                "resume with the same data or start a new run"
            )
        for name, own in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise OutlastError(
                    f"the stream was saved with {name}={state[name]} and now has {name}={own}: in another order some samples of "
                    f"epoch {state['epoch'] + 1} would come twice and others never; use {name}={state[name]} or start a new run"
                )
        self._adopt(state)
        self.epoch, self._start, self.step = state["epoch"], state["position"], state["step"]
        self.saved_with = (state["batch"], state["total_steps"]) if "batch" in state else None

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Adopt the order of shards in `state`, since the run may have begun with another default window. Raises OutlastError."""
        name = state.get("order", "permuted")
        if name not in ("permuted", "windows") or (name == "windows" and not self._shards):
            remedy = "resume with the same data" if name == "windows" else "use the Outlast that saved it"
            raise OutlastError(f"the stream was saved in the order {name!r} of shards, and cannot go on in it; {remedy}")
        if not self._shards:
            return
        own, theirs = self.fingerprint, state.get("data", "")
        if own and theirs and own != theirs:
            raise OutlastError(
                f"the stream was saved over shards with other checksums ({theirs}) than those there now ({own}); "
                "resume with the same data or start a new run"
            )
        self._window = state["window"] if name == "windows" else 0

    def __len__(self) -> int:
        return max(0, self.total_steps - self.step)

    def __iter__(self) -> Iterator[Batch]:
        if self.not_shardable:
            raise OutlastError(self.not_shardable)
        return self.batches(*_world())

    def batches(self, rank: int, ranks: int) -> Generator[Batch, None, None]:
        """Iterate over the batches of rank `rank` in a world of `ranks` ranks, from the current position on.

        `for batch in stream` passes the rank and size of the process group. Call this yourself if several ranks share one copy of
        the model (tensor or pipeline parallelism): `rank` is then the number of this rank's copy, and `ranks` the number of
        copies. Raises OutlastError if a full batch leaves a rank without samples.
        """
        self._check(ranks)
        plans = self._plans(rank, ranks)
        accelerator = device.find()
        begun(self)
        try:
            for plan, pieces in data_waits.timed(self._read(plans), self):
                self.epoch, self._start, self.step = plan.epoch, plan.start + plan.size, plan.step + 1
                if not self.sample:
                    self.sample = kind(pieces[0][0])
                most = -(-plan.size // (self.microbatch * ranks)) if self.microbatch else 1
                yield Batch(plan.epoch, plan.step, plan.size, plan.indices, plan.ends_epoch, pieces, most, plan.start)
                accelerator.mark_step()
        finally:
            self.reading -= 1
        if self.ended is not None:
            self.ended()

    def _check(self, ranks: int) -> None:
        pieces = -(-self.batch // (self.microbatch or 1))
        if pieces < ranks:
            what = (
                f"batch ({self.batch}) makes {pieces} micro-batches of {self.microbatch}"
                if self.microbatch
                else f"batch ({self.batch})"
            )
            raise OutlastError(
                f"{what}, fewer than the {ranks} ranks, so that some would have nothing to do; raise batch or use fewer ranks"
            )

    def _plans(self, rank: int, ranks: int) -> Iterator[_Plan]:
        epoch, start = self._next
        windows = self._windows
        for step in range(self.step, self.total_steps):
            size = min(self.batch, self.samples - start)
            ends = start + size == self.samples
            piece = self.microbatch or 1
            first, last = share_of(-(-size // piece), ranks, rank)
            begin, end = first * piece, min(last * piece, size)
            stand_in = begin >= end
            if stand_in:  # use the samples of the last rank that has any
                begin, end = (-(-size // piece) - 1) * piece, size
            positions = np.arange(start + begin, start + end)
            if self._shards:
                self._shards.reading(windows, start, epoch, self.shuffle)
            if windows:
                indices = windows.at(positions, epoch)
            else:
                indices = permuted(positions, self.samples, self.seed, epoch) if self.shuffle else positions
            width = self.microbatch or len(indices)
            parts = [indices[i : i + width] for i in range(0, len(indices), width)]
            cuts = tuple((part, 0.0 if stand_in else len(part) * ranks / size) for part in parts)
            yield _Plan(epoch, step, start, size, ends, indices[:0] if stand_in else indices, cuts)
            epoch, start = (epoch + 1, 0) if ends else (epoch, start + size)

    def _read(self, plans: Iterator[_Plan]) -> Generator[tuple[_Plan, tuple[tuple[Any, float], ...]], None, None]:
        accelerator = device.find()
        if (arrays := self._arrays) is not None:
            change = accelerator.pin if self._prefetch else lambda tensor: tensor  # pinned in the thread that reads ahead
            read = (
                (plan, tuple((map_tensors(_taken(arrays, part), change), share) for part, share in plan.cuts)) for plan in plans
            )
            yield from _ahead(read, self._prefetch) if self._prefetch else read
            return
        samples, collate = Seeded(self._dataset, self.seed), self._collate
        if not self._workers:
            for plan in plans:
                with preserved_generators():
                    pieces = tuple((collate([samples[plan.epoch, int(i)] for i in part]), share) for part, share in plan.cuts)
                yield plan, pieces
            return
        # One loader serves the whole run; its batches are our micro-batches. It has its own generator and does not draw from the
        # default generator.
        queued: queue.SimpleQueue[_Plan] = queue.SimpleQueue()
        loader = iter(
            DataLoader(
                samples,
                batch_sampler=_Pieces(plans, queued, self._shards),
                num_workers=self._workers,
                collate_fn=collate,
                prefetch_factor=max(1, self._prefetch),
                pin_memory=accelerator.pins,
                generator=torch.Generator(),
            )
        )
        try:
            for first in loader:
                plan = queued.get()
                data = [first, *(next(loader) for _ in plan.cuts[1:])]
                yield plan, tuple((piece, share) for piece, (_, share) in zip(data, plan.cuts, strict=True))
        except OutlastError as error:  # its text is the worker process's traceback, and the last line is the message
            raise OutlastError(str(error).rpartition(f".{type(error).__name__}: ")[2].strip()) from error


def _ahead(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `items`, which a thread reads up to `count` ahead. An exception in the thread is raised after the items read before
    it."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    stopped = threading.Event()

    def put(item: tuple[str, Any]) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def fill() -> None:
        try:
            for item in items:
                if not put(("item", item)):
                    return
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    thread = threading.Thread(target=fill, name="outlast-stream", daemon=True)

    def end() -> None:
        stopped.set()
        if threading.current_thread() is not thread:  # the garbage collector may call this in the thread
            thread.join(_LEAVE_S)

    thread.start()
    atexit.register(end)
    try:
        while True:
            what, item = ready.get()
            if what == "end":
                return
            if what == "error":
                raise item
            yield item
    finally:
        atexit.unregister(end)
        end()


def _taken(arrays: Any, indices: Indices) -> Any:
    """Return rows of a mapping, tuple or list of arrays, of a single array, or of Shards."""
    if isinstance(arrays, Shards):
        return arrays.take(indices)
    if isinstance(arrays, Mapping):
        return {name: _rows(array, indices) for name, array in arrays.items()}
    if isinstance(arrays, tuple | list):
        return tuple(_rows(array, indices) for array in arrays)
    return _rows(arrays, indices)


def _rows(array: Any, indices: Indices) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array[torch.from_numpy(indices)]
    return torch.from_numpy(np.asarray(array[indices]))


def _source(dataset: Any, collate: Any) -> tuple[Any, int]:
    """Return the dataset's arrays (None if samples are read one by one) and its number of samples."""
    if isinstance(dataset, Shards):
        return None if dataset.transform or collate else dataset, len(dataset)
    array = np.ndarray | torch.Tensor
    parts: dict[Any, Any] = {}
    if isinstance(dataset, Mapping):
        parts = dict(dataset)
    elif isinstance(dataset, tuple):
        parts = dict(enumerate(dataset))
    elif isinstance(dataset, array):
        parts = {0: dataset}
    elif isinstance(dataset, list) and dataset and all(isinstance(part, array) for part in dataset):
        raise OutlastError(
            f"the dataset is a list of {len(dataset)} arrays, which may be meant as columns or as samples; "
            "use a tuple for columns: Stream((x, y), ...), or torch.stack(list) for samples"
        )
    if not parts:
        return None, _length(dataset)
    for place, part in parts.items():
        if not isinstance(part, array):
            raise OutlastError(
                f"the dataset is a {type(dataset).__name__} of columns, and [{place!r}] is {kind(part)}; "
                "make it a numpy array or a tensor: torch.tensor(...)"
            )
        if not part.ndim:
            raise OutlastError(f"column [{place!r}] of the dataset is a single number; its first dimension must be the samples")
    lengths = {len(part) for part in parts.values()}
    if len(lengths) > 1:
        raise OutlastError(f"the arrays of the dataset have {sorted(lengths)} samples; they must have the same number")
    return dataset, lengths.pop()


def _length(dataset: Any) -> int:
    what = f"the dataset is {kind(dataset)}"
    if isinstance(dataset, DataLoader):
        other = ", or wrap it in Stateful(loader)" if hasattr(dataset, "state_dict") else ""
        raise OutlastError(f"{what}; a Stream makes the batches and their order itself: give it loader.dataset{other}")
    if isinstance(dataset, IterableDataset):
        raise OutlastError(
            f"{what}, an IterableDataset, which cannot go on at a position; "
            "give the Stream arrays or a dataset with __getitem__ and __len__, or use Stateful(StatefulDataLoader(dataset, ...))"
        )
    path = isinstance(dataset, str | bytes | Path)
    if path or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        first = "read it first, and " if path else ""
        raise OutlastError(f"{what}; {first}give the Stream a tuple of arrays, or a dataset with __getitem__ and __len__")
    return len(dataset)


def kind(value: Any) -> str:
    """Describe a value for an error message: `a Tensor of shape (3, 4)`, `a tuple of 3`, `'data/train'`."""
    if isinstance(value, str | bytes | int | float | Path):
        return repr(value)[:60]
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{article} {name} of shape {tuple(value.shape)}"
    return f"{article} {name} of {len(value)}" if isinstance(value, tuple | list | dict) else f"{article} {name}"


_read_now: weakref.WeakSet[Any] = weakref.WeakSet()
_loops = 0


def begun(reader: Any) -> None:
    """Record the start of a loop over a stream or a similar reader."""
    global _loops
    _loops += 1
    reader.reading += 1
    _read_now.add(reader)


def loops() -> int:
    return _loops


def being_read() -> list[Any]:
    """Return the streams and similar readers that are being read."""
    return [stream for stream in _read_now if stream.reading]


class _Pieces(Sampler[list[tuple[int, int]]]):
    """Yields the indices that a DataLoader's workers read, and queues each batch's plan."""

    def __init__(self, plans: Iterator[_Plan], queued: queue.SimpleQueue[_Plan], shards: Shards | None) -> None:
        self._plans, self._queued, self._shards = plans, queued, shards

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for plan in self._plans:
            self._queued.put(plan)
            for part, _ in plan.cuts:
                if self._shards:
                    self._shards.await_(part)
                yield [(plan.epoch, int(i)) for i in part]
