"""Finds slow ranks, those whose own time per step (`training.own_time`) exceeds the others'. Pure.

Under DDP, fast ranks wait for slow ones, so steps take equally long on all ranks, and only their own times differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from outlast.base import units

Window = Sequence[tuple[float, float]]
"""The median of each rank's own time per step in one window, and that median's standard error, in seconds; 0 if unknown."""

WINDOWS = 3
"""How many consecutive windows a rank must be above the limit to count as slow. Bursts of other load are shorter."""
LIMIT = 0.15
"""Minimum excess over the other ranks, as a fraction. It is below 0.2 because a rank slowed by a fifth may measure less."""
LEAST_S = 1e-3
"""Minimum difference in seconds. Rank 0 writes the ledger and metrics, which matters only if steps take a few milliseconds."""
_UNEVEN, _CERTAIN = 0.05, 4.0
"""The mean excess must be above `_UNEVEN` by `_CERTAIN` standard errors: healthy machines differ, and busy ones fluctuate."""


def measured(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median of a rank's own times in a window, and the median's standard error for a normal distribution."""
    middle = statistics.median(samples)
    return middle, 1.25 * 1.48 * statistics.median(abs(each - middle) for each in samples) / math.sqrt(len(samples))


def judged(windows: Sequence[Window], work: Sequence[float], named: Mapping[int, float]) -> dict[int, float]:
    """Return the slow ranks, each with its excess: the fraction by which its own time exceeds the others' median, such as 0.25.

    `windows` are the latest ones. `named` is the previous result: a rank in it stays named, with that excess, while it is
    above the limit in one of the windows. `work` is the amount of work per step for each rank, in any unit; a rank with more work
    than the others may take proportionally longer.
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
    """Return the fraction by which a rank's own time exceeds the other ranks' median, scaled up if this rank has more work, and
    that fraction's standard error."""
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
    """Return a sentence about a rank whose own time exceeds the others' by the fraction `share` or, if `share` is 0, no longer
    does."""
    if not share:
        return f"rank {rank} ({where}) is as fast as the others again"
    return f"rank {rank} ({where}) is slow: its own time per step is {units.percent(share)} above the others'"
