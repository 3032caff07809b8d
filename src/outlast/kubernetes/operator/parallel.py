"""Writes in parallel, for one part of a plan, and in the background, for Events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

log = logging.getLogger(__name__)

D = TypeVar("D")
R = TypeVar("R")

IN_FLIGHT = 8
"""Most writes in flight per plan. If quota rejects one, the rest would be rejected too, so we stop there."""


class Parallel:
    """A thread pool for several callers, each with at most `IN_FLIGHT` calls running."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def __call__(self, do: Callable[[D], R], items: Sequence[D], /) -> list[R]:
        """Call it for every item; the results in order. Raises the first failure, with no call still running."""
        results: list[R] = []
        for begin in range(0, len(items), IN_FLIGHT):
            first, *others = items[begin : begin + IN_FLIGHT]
            futures = [self._pool.submit(do, item) for item in others]
            try:
                results.append(do(first))  # the caller would only wait
            finally:
                wait(futures)
            results += [future.result() for future in futures]
        return results


class Background:
    """Calls without result, in order, in one thread. At most `limit` may be pending."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._pending: set[Future[None]] = set()

    def __call__(self, do: Callable[[], None]) -> None:
        """Have it called soon; drops it with a warning when too many are pending."""
        if len(self._pending) > self._limit:
            return log.warning("an Event is dropped: %d are pending", self._limit)
        future = self._pool.submit(_logged, do)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def finish(self, timeout_s: float) -> None:
        """Wait until all calls are done, at most this long."""
        wait(list(self._pending), timeout_s)


def _logged(do: Callable[[], None]) -> None:
    try:
        do()
    except Exception:  # a bug in one call must not stop the others
        log.exception("an Event could not be written")
