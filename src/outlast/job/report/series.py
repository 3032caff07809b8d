"""A run's series of values, in bounded memory: neighbouring values share a bucket, which keeps the smallest, the largest and the
last of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic_core import from_json

BUCKETS = 400
"""A long series has at least this many buckets and at most twice as many, about one per pixel of a plot."""
METRICS = 24


class Series:
    """Values over `x`. Each `x` must be at least as large as the one before. In a bucket without finite values, `low` is above
    `high`."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.count = 0
        self.per = 1
        """Maximum number of values in a bucket."""
        self.x: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.last: list[float] = []
        self._most = 2 * buckets

    def add(self, x: float, value: float) -> None:
        if not self.count % self.per:
            if len(self.x) == self._most:
                self.x, self.low, self.high, self.last = map(list, zip(*self.rows(self._most // 2), strict=True))
                self.per *= 2
            self.x.append(x)
            self.last.append(value)
            self.low.append(math.inf)
            self.high.append(-math.inf)
        self.count += 1
        self.x[-1], self.last[-1] = x, value
        if -math.inf < value < self.low[-1]:
            self.low[-1] = value
        if self.high[-1] < value < math.inf:
            self.high[-1] = value

    def rows(self, most: int) -> list[tuple[float, float, float, float]]:
        """Return (x, low, high, last) for at most `most` buckets, merging neighbouring buckets as needed."""
        wide = max(1, math.ceil(len(self.x) / most))
        parts = (slice(at, at + wide) for at in range(0, len(self.x), wide))
        return [(self.x[each][-1], min(self.low[each]), max(self.high[each]), self.last[each][-1]) for each in parts]


def metrics(lines: Iterable[str | bytes]) -> tuple[dict[str, Series], int]:
    """Return the first METRICS metrics in metrics.jsonl as series over the steps, the loss first, and the number of unreadable
    lines."""
    found, broken = {"loss": Series()}, 0
    for line in lines:
        try:
            values = from_json(line)
            step = float(values["step"])
            numbers = [(name, float(value)) for name, value in values.items() if type(value) in (int, float)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            broken += 1
            continue
        for name, value in numbers:
            if name not in found and name not in ("step", "time", "generation") and len(found) < METRICS:
                found[name] = Series()
            if name in found:
                found[name].add(step, value)
    return {name: each for name, each in found.items() if each.count}, broken
