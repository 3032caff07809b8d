"""Writes that need not wait for each other: those of one part of a plan, made at once; and Events, which nobody waits for.

Threads(16)(create, documents)       instead of        in_turn(create, documents)
Later(1000)(write)                   instead of        at_once(write)
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)

D = TypeVar("D")
R = TypeVar("R")

AT_ONCE = 8
"""Of one plan. Whoever is refused one, for want of quota, is refused the others as well: the rest is not asked for."""


class Each(Protocol):
    """How something is done with each of some things."""

    def __call__(self, do: Callable[[D], R], things: Sequence[D], /) -> list[R]:
        """What came of each, in their order. Raises the first failure, with none of them left under way."""


def in_turn(do: Callable[[D], R], things: Sequence[D], /) -> list[R]:
    """One after the other."""
    return [do(thing) for thing in things]


class Threads:
    """So many threads for all who ask; `AT_ONCE` of the things of each are under way at a time.

    They begin when they are asked first, end with the process, and do not keep it, which those of an executor would.
    """

    def __init__(self, count: int) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = [threading.Thread(target=self._run, name=f"write {number}", daemon=True) for number in range(count)]
        self._guard = threading.Lock()

    def __call__(self, do: Callable[[D], R], things: Sequence[D], /) -> list[R]:
        """See `Each`."""
        results: list[R] = []
        for begin in range(0, len(things), AT_ONCE):
            batch = [(Future[R](), thing) for thing in things[begin : begin + AT_ONCE]]
            if len(batch) > 1:
                self._begin()
            for future, thing in batch[1:]:
                self._todo.put(functools.partial(_do, future, do, thing))
            _do(batch[0][0], do, batch[0][1])  # whoever asks would only wait
            futures = [future for future, _ in batch]
            wait(futures)
            results += [future.result() for future in futures]
        return results

    def _begin(self) -> None:
        with self._guard:
            while self._idle:
                self._idle.pop().start()

    def _run(self) -> None:
        while True:
            self._todo.get()()


def at_once(do: Callable[[], None]) -> None:
    """Do it."""
    do()


class Later:
    """One thread for what nobody waits for, in its order; no more than so many may wait. It begins when it is asked first."""

    def __init__(self, most: int) -> None:
        self._todo: queue.Queue[Callable[[], None]] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name="later", daemon=True)
        self._guard = threading.Lock()

    def __call__(self, do: Callable[[], None]) -> None:
        """Have it done, unless too many wait already: that is said."""
        with self._guard:
            if self._thread.ident is None:
                self._thread.start()
        try:
            self._todo.put_nowait(do)
        except queue.Full:
            log.warning("an Event is left out: %d are still to be written", self._todo.maxsize)

    def finish(self, timeout_s: float) -> None:
        """Wait until all is done, but no longer than this."""
        with self._todo.all_tasks_done:
            self._todo.all_tasks_done.wait_for(lambda: not self._todo.unfinished_tasks, timeout_s)

    def _run(self) -> None:
        while True:
            do = self._todo.get()
            try:
                do()
            except Exception:  # a bug that one meets must not stop the others
                log.exception("an Event could not be written")
            finally:
                self._todo.task_done()


def _do(future: Future[Any], do: Callable[[Any], Any], thing: Any) -> None:
    try:
        future.set_result(do(thing))
    except BaseException as error:  # it is whoever asked who has to hear of it
        future.set_exception(error)
