"""The clock by which silence, turns and hangs are judged: it never steps, and it notices when the machine's wall clock did.

    clock = Clock()
    clock()          seconds since the epoch when the clock was made, and monotonic from then on
    clock.broken_at  when the wall clock last parted from the monotonic one: nothing heard before that proves a silence

The wall clock steps when NTP sets it right and when a suspended machine wakes up. Times that are compared with each other in one
process come from here; times that people read, or that outlive the process, are those of `time.time`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

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
        """The steady time of the last break, by which silence has to be counted anew."""

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
