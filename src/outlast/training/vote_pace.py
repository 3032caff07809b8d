"""The number of steps between the ranks' votes in `Session.boundary`.

A vote is a small all-reduce. With as many ranks as cores it delays a step by milliseconds, since the threads that run it need
the same cores. Votes may take at most a hundredth of the steps' time: rank 0 measures them, and each of its votes proposes the
number of steps to the next. A later vote delays the next snapshot and the response to an interruption by as much.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Iterator

from outlast.training.state import snapshot_taking

_VOTES = 15
"""Number of recent votes whose mean duration is used."""
_LONGEST_S = 0.25
"""Maximum number of seconds between two votes."""


def interval(vote_s: float, step_s: float) -> int:
    """Return the number of steps from one vote to the next, given the seconds that a vote and a step take."""
    most = max(1, int(_LONGEST_S / step_s)) if step_s > 0 else 1
    return min(most, snapshot_taking.interval(vote_s, step_s))


class Pace:
    def __init__(self) -> None:
        self.agreed, self.next = 1, 0
        """The interval agreed on in the last vote, and the step of the next vote."""
        self._votes_s: collections.deque[float] = collections.deque(maxlen=_VOTES)

    @contextlib.contextmanager
    def voting(self) -> Iterator[None]:
        """Measure the vote in this block."""
        begun = time.monotonic()
        yield
        self._votes_s.append(time.monotonic() - begun)

    def interval(self, step_s: float) -> int:
        """Return the interval that this rank proposes; 1 until enough votes have been measured."""
        return interval(statistics.fmean(self._votes_s), step_s) if len(self._votes_s) == _VOTES else 1
