"""How long training waits for its data, and when that is worth a warning.

A stream measures its waits (`timed`), the session writes them to the ledger with its steps, and `Stalls` judges them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, TypeVar

from outlast.base import units

T = TypeVar("T")

LEAST_S = 0.001
"""A shorter wait is the hand-over from the thread that reads ahead, not a stall."""
_LOOK_S = 60.0
"""Length of the periods that are judged; arbitrary."""
_MUCH = 0.2
"""Share of a period from which on waiting is worth a warning; arbitrary."""
_QUIET_S = 900.0
"""Least time between two warnings; arbitrary."""


class Waits(Protocol):
    """What counts its waits."""

    waited_s: float

    @property
    def remedy(self) -> str:
        """What to do if training waits for this."""


def timed(batches: Generator[T, None, None], reader: Waits) -> Iterator[T]:
    """`batches`; adds the time that each took to come to `reader.waited_s`."""
    with contextlib.closing(batches):
        while True:
            begun = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                if (waited := time.monotonic() - begun) >= LEAST_S:
                    reader.waited_s += waited
            yield batch


class Stalls:
    """Judges the waits of one process, period by period."""

    def __init__(self, now: float) -> None:
        self._since = self._first = now
        self._waited = self._told = 0.0
        self._warned = float("-inf")

    def since(self, now: float, readers: Sequence[Waits]) -> tuple[float, str]:
        """Seconds that all have waited since the last call, and the warning, if one is due."""
        waited = sum(reader.waited_s for reader in readers)
        before, self._told = self._told, waited
        remedy = max(readers, key=lambda reader: reader.waited_s).remedy if readers else ""
        return waited - before, self.warning(now, waited, remedy)

    def warning(self, now: float, waited: float, remedy: str) -> str:
        """The warning if training has waited much of the last period; `waited` seconds are all so far. Mostly empty."""
        if (period := now - self._since) < _LOOK_S:
            return ""
        share, first = (waited - self._waited) / period, self._since == self._first
        self._since, self._waited = now, waited
        if share < _MUCH or first or now - self._warned < _QUIET_S:  # the first period fills caches
            return ""
        self._warned = now
        return f"training waited for data {units.percent(share)} of the last {units.human_seconds(period)}; {remedy}"
