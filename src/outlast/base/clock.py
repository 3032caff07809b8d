"""Clocks that never step, for measuring silence, loops and hangs.

    clock = Clock()
    clock()          seconds since the epoch, monotonic from the clock's creation
    clock.broken_at  when the wall clock last stepped: silence before that time proves nothing
    clock = Awake()  for a loop: stands still whenever the loop does not run
    Seen(clock)      how long each of several values has stayed the same

The wall clock steps when NTP corrects it and when a suspended machine wakes up. Use these clocks for times that are compared
within one process, and `time.time` for times that people read or that outlive the process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

BREAK_S = 2.0
"""Minimum difference in seconds that counts as a step. NTP slews by at most 0.5 ms per second."""


class Clock:
    """A clock that returns steady seconds since the epoch. Thread-safe."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._started = self._apart = wall() - monotonic()
        self._lock = threading.Lock()
        self.broken_at = -math.inf
        """Time on this clock at which the wall clock last stepped or the machine last slept. Measure silence only from then
        on."""

    def __call__(self) -> float:
        """Return the steady time. Sets `broken_at` if the wall clock has stepped or the machine has slept since the last call."""
        with self._lock:
            monotonic = self._monotonic()
            now, apart = self._started + monotonic, self._wall() - monotonic
            stepped_s, self._apart = apart - self._apart, apart
            if abs(stepped_s) <= BREAK_S:
                return now
            self.broken_at = now
        log.warning("the wall clock stepped by %+.1f s (set anew, or the machine slept); silence is counted from now", stepped_s)
        return now


STEP_S = 1.0
"""Maximum advance of `Awake` between two readings, in seconds. Loops read it ten times a second."""
STOOD_S = 10.0
"""A pause in the loop is logged if it lasts at least this many seconds."""


class Awake:
    """A clock that advances only while its loop runs. Thread-safe.

    It also stands still while a virtual machine is paused, a container is frozen or the process is stopped, so that no deadline
    passes while the loop cannot run. Loops must read it at least every `STEP_S`.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now, self._read = wall(), monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            read = self._monotonic()
            passed_s, self._read = read - self._read, read
            self._now += min(passed_s, STEP_S)
            now = self._now
        if passed_s > STOOD_S:
            log.warning(
                "this process stood still for %.0f s; that time counts neither as silence nor towards a deadline", passed_s
            )
        return now


class Seen:
    """Measures how long values, such as times written by processes with other clocks, have stayed the same."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def age(self, key: Hashable, value: object) -> float:
        """Return the seconds since `key` was first seen with this value; 0 for a new value."""
        now = self._clock()
        last = self._seen.get(key)
        if last is None or last[0] != value:
            self._seen[key] = value, now
            return 0.0
        return now - last[1]

    def forget(self, key: Hashable) -> None:
        """Drop a key, so that its next value counts as new."""
        self._seen.pop(key, None)


def until(at: float, timeout: float, now: float) -> float | None:
    """Return the time at which a timeout that began at `at` ends; None if it has ended.

    If the clock was set back, `at` may be in the future. If it is ahead by at most one timeout, no time counts as passed; if it
    is ahead by more, the timeout is over.
    """
    end = at + timeout
    return None if now >= end or at > now + timeout else end
