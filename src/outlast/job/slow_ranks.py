"""Finds slow ranks: those whose own time per step (`training.own_time`) is longer than the other ranks' time. Under DDP, fast
ranks wait for slow ranks, so only their own times differ, not their steps' durations. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from outlast.base import units

Window = Sequence[tuple[float, float]]
"""Median of each rank's own time per step in one window, and that median's standard error, in seconds; 0 if unknown."""

WINDOWS = 3
"""Number of consecutive windows in which a rank must be above the limit to count as slow. Bursts of other load are shorter."""
LIMIT = 0.15
"""Minimum excess over the other ranks, as a fraction. It is below 0.2 because a rank slowed down by a fifth may measure less."""
LEAST_S = 1e-3
"""Minimum difference in seconds. Rank 0 also writes the ledger and metrics, which matters only for steps of a few
milliseconds."""
_UNEVEN, _CERTAIN = 0.05, 4.0
"""The mean excess must be above `_UNEVEN` by `_CERTAIN` standard errors: healthy machines differ, and busy ones fluctuate."""


def measured(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median of a rank's own times in a window, and the median's standard error for a normal distribution."""
    middle = statistics.median(samples)
    return middle, 1.25 * 1.48 * statistics.median(abs(each - middle) for each in samples) / math.sqrt(len(samples))


def judged(windows: Sequence[Window], work: Sequence[float], named: Mapping[int, float]) -> dict[int, float]:
    """Return the slow ranks, each with its excess over the other ranks' median own time, as a fraction such as 0.25.

    `windows` are the latest windows. A rank in `named`, the previous result, stays in the result while it is above the limit in
    any window. `work` is each rank's amount of work per step, in any unit; a rank with more work may take proportionally longer.
    """
    slow = {}
    for rank in range(len(work)):
        found = [_excess(window, work, rank) for window in windows]
        over = [excess >= LIMIT for excess, _ in found]
        if rank in named:
            if any(over):
                slow[rank] = named[rank]
        elif len(over) >= WINDOWS and all(over):
            mean = statistics.fmean(excess for excess, _ in found)
            error = math.hypot(*(error for _, error in found)) / len(found)
            if mean - _UNEVEN >= _CERTAIN * error:
                slow[rank] = round(statistics.median(excess for excess, _ in found), 3)
    return slow


def _excess(window: Window, work: Sequence[float], rank: int) -> tuple[float, float]:
    """Return the fraction by which a rank's time exceeds the other ranks' median, adjusted for the rank's work, and the standard
    error of this fraction."""
    own_s, error_s = window[rank]
    others = [each for number, each in enumerate(window) if number != rank and each[0] > 0]
    if not own_s or not others:
        return 0.0, 0.0
    more = max(1.0, work[rank] / statistics.median(each for number, each in enumerate(work) if number != rank))
    typical_s = more * statistics.median(each for each, _ in others)
    typical_error_s = more * statistics.median(error for _, error in others)
    if own_s - typical_s < LEAST_S:
        return 0.0, 0.0
    return own_s / typical_s - 1, math.hypot(error_s, typical_error_s) / typical_s


def place(worker: int, node: str) -> str:
    """Return a rank's location as text, such as `worker 1, node a`."""
    return f"worker {worker}, node {node}" if node else f"worker {worker}"


def sentence(rank: int, share: float, where: str) -> str:
    """Describe a rank whose own time exceeds the other ranks' time by the fraction `share`, or that is no longer slow if `share`
    is 0."""
    if not share:
        return f"rank {rank} ({where}) is as fast as the others again"
    return f"rank {rank} ({where}) is slow: its own time per step is {units.percent(share)} above the others'"
