"""Measures how long training waits for data. The session writes these times to the ledger, and `Stalls` warns about long
waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, TypeVar

from outlast.base import units

T = TypeVar("T")

LEAST_S = 0.001
"""Waits shorter than this many seconds do not count: they come from the hand-over between threads."""
_LOOK_S = 60.0
_MUCH = 0.2
"""Waiting for more than this share of a period causes a warning (an arbitrary value)."""
_QUIET_S = 900.0


class Waits(Protocol):
    """A reader that measures how many seconds steps wait for it."""

    waited_s: float

    @property
    def remedy(self) -> str:
        """Advice to print if training waits for this reader."""


def timed(batches: Generator[T, None, None], reader: Waits) -> Iterator[T]:
    """Yield `batches`, and add the time spent waiting to `reader.waited_s`."""
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
    def __init__(self, now: float) -> None:
        self._since = self._first = now
        self._waited = self._reported = 0.0
        self._warned = float("-inf")

    def since(self, now: float, readers: Sequence[Waits]) -> tuple[float, str]:
        """Return the seconds of waiting since the last call, and a warning if one is due, or an empty string."""
        waited = sum(reader.waited_s for reader in readers)
        previous, self._reported = self._reported, waited
        remedy = max(readers, key=lambda reader: reader.waited_s).remedy if readers else ""
        return waited - previous, self.warning(now, waited, remedy)

    def warning(self, now: float, waited: float, remedy: str) -> str:
        """Return a warning if much of the last period was spent waiting, or an empty string. `waited` is the total in seconds."""
        if (period := now - self._since) < _LOOK_S:
            return ""
        share, first = (waited - self._waited) / period, self._since == self._first
        self._since, self._waited = now, waited
        if share < _MUCH or first or now - self._warned < _QUIET_S:  # the first period fills caches
            return ""
        self._warned = now
        return f"training waited for data {units.percent(share)} of the last {units.human_seconds(period)}; {remedy}"
