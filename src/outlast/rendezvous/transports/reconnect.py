"""Reconnecting to the server between members and coordinator: complaints once per outage, and pauses with jitter."""

from __future__ import annotations

import sys

from outlast.base import backoff

FIRST_PAUSE_S = 0.1
"""Before the second attempt."""


class Line:
    """Prints when the connection breaks, and when it is back."""

    def __init__(self, broken: str, well: str) -> None:
        self._sentences = broken, well
        self._problem: type[Exception] | None = None

    def broken(self, problem: Exception) -> None:
        """We do not, because of this."""
        if type(problem) is not self._problem:
            _say(f"{self._sentences[0]}; it goes on as it was and tries again: {problem}")
        self._problem = type(problem)

    def well(self) -> None:
        """We do."""
        if self._problem:
            _say(self._sentences[1])
        self._problem = None


def pause(failures: int, longest_s: float) -> float:
    """Seconds until the next attempt: growing, and random, since all workers miss the same server."""
    return backoff.jittered(backoff.exponential(failures, FIRST_PAUSE_S, longest_s))


def _say(sentence: str) -> None:
    # Named, so that it is held: print() of Python 3.11 does not hold what it takes from sys, and crashes when another thread
    # puts something else there meanwhile.
    print(f"outlast | {sentence}", file=sys.stdout, flush=True)
