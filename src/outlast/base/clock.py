"""Clocks that never step, for timeouts of silence, turns and hangs; and a note when the machine's wall clock stepped.

    clock = Clock()
    clock()          seconds since the epoch when the clock was made, and monotonic from then on
    clock.broken_at  when the wall clock last parted from the monotonic one: nothing heard before that proves a silence

The wall clock steps when NTP sets it right and when a suspended machine wakes up. Times that are compared with each other in one
process come from here; times that people read, or that outlive the process, are those of `time.time`.

    clock = Awake()  for a loop: time in which it did not run does not pass, whatever the reason was
    Seen(clock)      how long each of several things has looked the same to us
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

BREAK_S = 2.0
"""NTP slews smaller differences: 0.5 ms a second at most, which no two readings of a running process sum to this."""


class Clock:
    """Steady seconds since the epoch. Safe to call from any thread."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._started = self._apart = wall() - monotonic()
        self._lock = threading.Lock()
        self.broken_at = -math.inf
        """The steady time of the last break, from which silence has to be counted."""

    def __call__(self) -> float:
        """The steady time now. Notes a break if the wall clock stepped, or the machine slept, since the last reading."""
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
"""The most that `Awake` passes between two readings; the loops that read it do so ten times a second."""
STOOD_S = 10.0
"""A loop that stood still for longer says so."""


class Awake:
    """Seconds since the epoch when it was made, and from then on only the time in which its loop ran.

    A suspended machine stops the monotonic clock; a paused virtual machine, a frozen container and a stopped process do not. In
    such a pause the others stood still, too, so no member turns silent and no deadline passes by this clock. Needs a reading at
    least every `STEP_S`. Safe to call from any thread.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now, self._read = wall(), monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """The time now."""
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
    """How long each of several values has stayed the same.

    Times that other processes have written are compared with each other only: a new one is a sign of life, whatever it says.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def age(self, key: Hashable, value: object) -> float:
        """Seconds since `key` was first seen with this value; 0 if that is now."""
        now = self._clock()
        before = self._seen.get(key)
        if before is None or before[0] != value:
            self._seen[key] = value, now
            return 0.0
        return now - before[1]

    def forget(self, key: Hashable) -> None:
        """It is no more; what comes under the same name is another."""
        self._seen.pop(key, None)


def until(at: float, timeout: float, now: float) -> float | None:
    """When a timeout that began at `at` ends; None when it is over.

    A beginning in the future means that the clock went back. If by less than the timeout, no time has passed yet. If by more,
    it is unknown how much has, and the timeout is over. So no wait is longer than twice its timeout, however the clock jumps.
    """
    end = at + timeout
    return None if now >= end or at > now + timeout else end
