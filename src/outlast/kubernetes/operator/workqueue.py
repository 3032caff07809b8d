"""The operator's workqueue of jobs to reconcile: each key is queued once, and never processed by two threads at a time.

A key that is added while it is processed is queued again afterwards. If a key is added for several later times, the earliest
counts. The given clock must not jump.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """A thread-safe queue with the semantics of client-go's workqueue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[K, None] = {}
        self._processing: set[K] = set()
        self._dirty: set[K] = set()
        self._due_at: dict[K, float] = {}
        self._held_until: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._shut_down = False
        self._changed = threading.Condition()  # its lock is reentrant

    def add(self, key: K) -> None:
        with self._changed:
            if (until := self._held_until.get(key)) is not None:
                if until > self._clock():
                    return self.add_at(key, until)
                del self._held_until[key]
            if key in self._processing:
                self._dirty.add(key)
            elif key not in self._waiting:
                self._waiting[key] = None
                self._changed.notify()

    def add_at(self, key: K, when: float) -> None:
        with self._changed:
            if when < self._due_at.get(key, float("inf")):
                self._due_at[key] = when
                self._count += 1
                heapq.heappush(self._heap, (when, self._count, key))
                self._changed.notify()

    def hold(self, key: K, until: float) -> None:
        """Queue a key at time `until`, and postpone any earlier `add` of the key until then."""
        with self._changed:
            self._held_until[key] = until
            self._dirty.discard(key)
            self.add_at(key, until)

    def get(self) -> K | None:
        """Wait for the next key, or return None after `shut_down`. The caller must call `done` with the key."""
        with self._changed:
            while not self._shut_down:
                wait = self._due()
                if self._waiting:
                    key = next(iter(self._waiting))
                    del self._waiting[key]
                    self._processing.add(key)
                    self._due_at.pop(key, None)  # the pass that begins now sets the next time
                    return key
                self._changed.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))  # deadlines may be far away
            return None

    def done(self, key: K) -> None:
        with self._changed:
            self._processing.discard(key)
            if key in self._dirty:
                self._dirty.discard(key)
                self._waiting[key] = None
                self._changed.notify()

    def shut_down(self) -> None:
        with self._changed:
            self._shut_down = True
            self._changed.notify_all()

    def idle(self) -> bool:
        """Return whether no key is queued, due or being processed."""
        with self._changed:
            self._due()
            return not self._waiting and not self._processing

    def _due(self) -> float | None:
        """Queue the keys that are due. Returns the seconds until the next key is due, or None if there is none."""
        while self._heap:
            when, _, key = self._heap[0]
            if self._due_at.get(key) != when:  # superseded by an earlier time
                heapq.heappop(self._heap)
                continue
            if (wait := when - self._clock()) > 0:
                return wait
            heapq.heappop(self._heap)
            del self._due_at[key]
            if key in self._processing:
                self._dirty.add(key)
            else:
                self._waiting.setdefault(key, None)
        return None
