"""Which bytes of a file have arrived: sorted half-open intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
"""From the first byte to the one behind the last."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same bytes in as few intervals as possible, without empty ones."""
    found: list[Interval] = []
    for first, end in sorted(intervals):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def missing(intervals: Sequence[Interval], size: int) -> list[Interval]:
    """What lacks of a file of this size; `intervals` as `merged` returns them."""
    edges = [0, *(edge for interval in intervals for edge in interval), size]
    return [(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True) if first < end]


def count(intervals: Iterable[Interval]) -> int:
    """How many bytes they hold."""
    return sum(end - first for first, end in intervals)


def pieces(intervals: Iterable[Interval], longest: int) -> Iterator[Interval]:
    """The same bytes in intervals of at most this length."""
    for first, end in intervals:
        for start in range(first, end, longest):
            yield start, min(start + longest, end)
