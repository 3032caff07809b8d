"""Loaders with their own state, for scripts that cannot use a `Stream`: torchdata's StatefulDataLoader and similar loaders.

    loader = Stateful(StatefulDataLoader(dataset, batch_size=32, sampler=StatefulDistributedSampler(dataset)), epochs=3)
    step = run.resume({"model": net, "optimizer": optimizer, "loader": loader})
    for x, y in loader:

Every rank has a loader, and a checkpoint holds all loaders' states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from outlast.base.errors import OutlastError
from outlast.training import data_waits
from outlast.training.samples import seeded, stream

log = logging.getLogger("outlast")


class Stateful:
    """The batches of an iterable that has `state_dict` and `load_state_dict`, over `epochs` iterations of it.

    Each rank has its own iterable, whose batches are yielded unchanged and whose state is saved per rank. With the same number of
    ranks, a resumed run continues with the next batch, as exactly as the iterable allows: random numbers drawn in its worker
    processes are restored only if its dataset saves them. With another number of ranks, the saved states fit no loader. The epoch
    then begins again, samples that were already yielded are repeated, and a warning gives the number of repeated batches. A
    `Stream` continues with the next batch in both cases.

    If the iterable has a `sampler` with `set_epoch`, this method is called at the start of each epoch. `len(loader)` is the
    number of batches still to come, if the iterable has a length. Raises OutlastError for an iterable without `state_dict`.
    """

    def __init__(self, loader: Any, *, epochs: int = 1) -> None:
        if not all(hasattr(loader, name) for name in ("__iter__", "state_dict", "load_state_dict")):
            raise OutlastError(
                f"the loader is {stream.kind(loader)} without state_dict and load_state_dict, so it cannot go on where it was; "
                "use torchdata's StatefulDataLoader, or a Stream over its dataset"
            )
        self.loader = loader
        self.epoch = 0
        """Epoch of the current batch; between loops, the epoch of the next batch."""
        self.step = 0
        """Number of batches yielded since the beginning of the run."""
        self.waited_s = 0.0
        """Seconds that steps have waited for data in this process."""
        self.reading = 0
        self.saves = 0
        self.ended: Callable[[], None] | None = None
        self.saved_with: tuple[int, int] | None = None
        self.batch = 0
        self.not_shardable = self.sample = self.fingerprint = ""
        self._epochs = epochs
        self._done = 0

    @property
    def remedy(self) -> str:
        """Advice to print if training waits for this loader."""
        return "raise num_workers or prefetch_factor of the loader, or prepare the data: outlast data prepare"

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in all epochs with the current number of ranks. Raises AttributeError if it is unknown."""
        if (each := self._each()) is None:
            raise AttributeError("the loader has no length", name="total_steps", obj=self)
        return self.step - self._done + max(0, self._epochs - self.epoch) * each

    def _each(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def __len__(self) -> int:
        return self.total_steps - self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers, which are the same on every rank. `loader_state` returns what differs between
        ranks."""
        self.saves += 1
        position = {"epoch": self.epoch, "done": self._done, "step": self.step}
        return {"version": 1, "ranks": _ranks(), **position, "each": self._each()}

    def loader_state(self) -> Any:
        """Return the state of this rank's iterable."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], loader: Any = None) -> None:
        """Continue at the position in `state`. `loader` is this rank's saved `loader_state`, or None if it was not saved."""
        self.epoch, self._done, self.step = state["epoch"], state["done"], state["step"]
        if loader is not None and state["ranks"] == _ranks():
            self.loader.load_state_dict(loader)
            return
        again, self._done = self._done, 0
        if again == state["each"]:  # the epoch had ended
            self.epoch += 1
        elif again and (not dist.is_initialized() or dist.get_rank() == 0):
            log.warning(
                "outlast: the loader was saved by %d ranks, and its states do not fit %d: epoch %d begins anew, and the samples "
                "of %d batches come again; a Stream would go on exactly",
                *(state["ranks"], _ranks(), self.epoch + 1, again),
            )

    def __iter__(self) -> Iterator[Any]:
        stream.begun(self)
        try:
            yield from data_waits.timed(self._batches(), self)
        finally:
            self.reading -= 1
        if self.ended is not None:
            self.ended()

    def _batches(self) -> Generator[Any, None, None]:
        while self.epoch < self._epochs:
            if (set_epoch := getattr(getattr(self.loader, "sampler", None), "set_epoch", None)) is not None:
                set_epoch(self.epoch)
            with seeded.preserved_generators():  # a loader draws a seed for its workers, and again after a resume
                batches = iter(self.loader)
            for batch in batches:
                self.step, self._done = self.step + 1, self._done + 1
                yield batch
            self.epoch, self._done = self.epoch + 1, 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
