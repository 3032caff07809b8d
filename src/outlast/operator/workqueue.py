"""Whose turn it is: the jobs that have to be looked at, each once, never two at a time on one of them.

A job that changes while somebody looks at it gets another turn afterwards. One may also ask for a turn at a later time; the
earliest counts. Times are those of the clock that is given, one that never steps.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """A queue of names. All may be called from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[K, None] = {}
        self._begun: set[K] = set()
        self._again: set[K] = set()
        self._later: dict[K, float] = {}
        self._rests: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._closed = False
        self._news = threading.Condition()  # of a lock that its holder may take again

    def add(self, name: K) -> None:
        """It has to be looked at."""
        with self._news:
            if (until := self._rests.get(name)) is not None:
                if until > self._clock():
                    return self.later(name, until)
                del self._rests[name]
            if name in self._begun:
                self._again.add(name)
            elif name not in self._waiting:
                self._waiting[name] = None
                self._news.notify()

    def later(self, name: K, when: float) -> None:
        """It has to be looked at, but not before this time."""
        with self._news:
            if when < self._later.get(name, float("inf")):
                self._later[name] = when
                self._count += 1
                heapq.heappush(self._heap, (when, self._count, name))
                self._news.notify()

    def rest(self, name: K, until: float) -> None:
        """It has a turn at this time, and none before, whatever changes."""
        with self._news:
            self._rests[name] = until
            self._again.discard(name)
            self.later(name, until)

    def take(self) -> K | None:
        """Wait for the next turn; None when there will be none. Each is given back by `done`."""
        with self._news:
            while not self._closed:
                wait = self._due()
                if self._waiting:
                    name = next(iter(self._waiting))
                    del self._waiting[name]
                    self._begun.add(name)
                    self._later.pop(name, None)  # whoever looks now says when to look next
                    return name
                self._news.wait(wait if wait is None else min(wait, threading.TIMEOUT_MAX))  # deadlines may be far away
            return None

    def done(self, name: K) -> None:
        """The turn is over."""
        with self._news:
            self._begun.discard(name)
            if name in self._again:
                self._again.discard(name)
                self._waiting[name] = None
                self._news.notify()

    def close(self) -> None:
        """No turn begins any more."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def idle(self) -> bool:
        """Whether nobody looks at anything, and nothing is due."""
        with self._news:
            self._due()
            return not self._waiting and not self._begun

    def _due(self) -> float | None:
        """Give what is due its turn; seconds until the next is, None for never."""
        while self._heap:
            when, _, name = self._heap[0]
            if self._later.get(name) != when:  # it was called off, or is due earlier
                heapq.heappop(self._heap)
                continue
            if (wait := when - self._clock()) > 0:
                return wait
            heapq.heappop(self._heap)
            del self._later[name]
            if name in self._begun:
                self._again.add(name)
            else:
                self._waiting.setdefault(name, None)
        return None
