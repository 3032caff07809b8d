"""Runs many small jobs, such as requests to a store, in a thread pool with bounded memory.

The caller receives all outcomes in one thread and needs no locks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from outlast.base.errors import Stopped

T = TypeVar("T")

MEMORY = 64 << 20
"""Maximum size of file contents in memory, in bytes."""
_THREADS = 32
"""Number of threads, enough to hide the latency of a distant store (an arbitrary value)."""
_LEAVE_S = 3.0
"""How long running jobs may continue after a stop, in seconds."""


class Job(NamedTuple, Generic[T]):
    """A function to call, the memory that it needs in bytes, and a key for the caller."""

    key: Any
    cost: int
    do: Callable[[], T]


class Outcome(NamedTuple, Generic[T]):
    """A job's result or error."""

    key: Any
    result: T | None
    error: BaseException | None


def work(
    jobs: Iterable[Job[T]],
    enough: threading.Event,
    *,
    stop: threading.Event | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Generator[Outcome[T], None, None]:
    """Run jobs in threads and yield their outcomes as they end. Uses at most MEMORY bytes, unless one job needs more.

    `tick` is called at least ten times a second. Setting `stop`, or closing the generator, drops the queued jobs and sets
    `enough`, which jobs should check. After `stop`, the outcomes of running jobs are yielded, and then Stopped is raised.
    """
    source, out, cost = iter(jobs), 0, 0
    waiting = next(source, None)
    if waiting is None:
        return
    threads = _Threads()
    deadline: float | None = None
    try:
        while True:
            while deadline is None and out < 2 * _THREADS:
                waiting = waiting or next(source, None)
                if waiting is None or (out and cost + waiting.cost > MEMORY):
                    break
                out, cost = out + 1, cost + waiting.cost
                threads.todo.put(waiting)
                waiting = None
            if not out:
                break
            tick()
            if stop is not None and stop.is_set() and deadline is None:
                deadline = time.monotonic() + _LEAVE_S
                enough.set()
                dropped = threads.drop()
                out, cost = out - len(dropped), cost - sum(job.cost for job in dropped)
            if deadline is not None and (not out or time.monotonic() > deadline):
                break
            try:
                job, result, error = threads.done.get(timeout=0.1)
            except queue.Empty:
                continue
            out, cost = out - 1, cost - job.cost
            if not isinstance(error, Stopped):
                yield Outcome(job.key, result, error)
        if deadline is not None:
            raise Stopped("stopped; the same again goes on from here")
    finally:
        enough.set()
        threads.leave(time.monotonic() + _LEAVE_S if deadline is None else deadline)


class _Threads:
    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()
        # Daemon threads, so that a stalled connection does not keep the process alive.
        self._threads = [threading.Thread(target=self._work, name="transfer", daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self.todo.get()) is not None:
            try:
                self.done.put((job, job.do(), None))
            except BaseException as error:
                self.done.put((job, None, error))

    def drop(self) -> list[Any]:
        dropped = []
        with contextlib.suppress(queue.Empty):
            while True:
                dropped.append(self.todo.get_nowait())
        return dropped

    def leave(self, deadline: float) -> None:
        """Stop all threads after their current job, and wait for them until `deadline` (monotonic)."""
        self.drop()
        for _ in self._threads:
            self.todo.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
