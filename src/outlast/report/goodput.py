"""Where the time of a job went: every instant from submission to the end belongs to exactly one bucket.

`buckets(events, now)` is pure. The buckets sum to the wall time to the microsecond, whatever the ledger holds; the status, the
report and the page all show this one value.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping

from outlast.report.timeline import Bucket, Incident, Step, Timeline, in_order, microseconds
from outlast.runtime.ledger import Event


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time, in seconds since the epoch. Segments touch, and neighbours differ in their bucket."""

    start: float
    end: float
    bucket: Bucket


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time of one job went, up to its end or to now."""

    start: float
    """The first event, seconds since the epoch."""
    end: float
    state: str | None
    """The ledger's last word, e.g. `Succeeded`; None while the job runs."""
    microseconds: Mapping[Bucket, int]
    """Time in every bucket; whole numbers, so that the sum is exact."""
    segments: tuple[Segment, ...]
    incidents: tuple[Incident, ...]
    steps_kept: int
    steps_replayed: int
    step_mean_s: float | None
    """Over all steps that were executed but the first of each world, which pays for warming up."""
    step_median_s: float | None
    worlds: int
    failures: int
    """Failures that counted."""
    restarts: int
    """Worlds formed after a failure or a hang."""
    interruptions: int
    """How often training was told to save and leave; planned changes included."""
    hangs: int
    saves: int
    """Checkpoints that were committed."""
    saves_failed: int

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the end, or to now."""
        return sum(self.microseconds.values()) / 1e6

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Seconds in every bucket."""
        return {bucket: us / 1e6 for bucket, us in self.microseconds.items()}

    @property
    def goodput(self) -> float:
        """Share of the wall time spent on steps that were kept, 0 ... 1."""
        return self.share(Bucket.TRAINING)

    def share(self, bucket: Bucket) -> float:
        """Share of a bucket in the wall time, 0 ... 1."""
        return self.microseconds[bucket] / max(1, sum(self.microseconds.values()))


def buckets(events: Iterable[Event], now: float) -> Goodput:
    """Account for the time from the first event until the end of the job; until `now` (seconds since the epoch) when it has none.

    For a job that nobody runs any more pass the time of its last event: what came after is not the job's.
    """
    ordered = in_order(events)
    start = ordered[0][0] if ordered else microseconds(now)
    timeline = Timeline(start, ordered)
    for t, event in ordered:
        timeline.feed(t, event)
    timeline.stop(max(microseconds(now), timeline.seen))

    steady = [step.us for step in timeline.executed if not step.first]
    median = statistics.median(steady) if steady else None
    stretches = list(_joined(_resolved(timeline.spans, median)))
    us = dict.fromkeys(Bucket, 0)
    for begin, end, bucket in stretches:
        us[bucket] += end - begin
    return Goodput(
        start=start / 1e6,
        end=(start + sum(us.values())) / 1e6,
        state=timeline.finished,
        microseconds=us,
        segments=tuple(Segment(begin / 1e6, end / 1e6, bucket) for begin, end, bucket in stretches),
        incidents=tuple(timeline.incidents),
        steps_kept=len(timeline.kept),
        steps_replayed=len(timeline.executed) - len(timeline.kept),
        step_mean_s=statistics.fmean(steady) / 1e6 if steady else None,
        step_median_s=median / 1e6 if median is not None else None,
        worlds=timeline.worlds,
        failures=timeline.failures,
        restarts=timeline.restarts,
        interruptions=timeline.interruptions,
        hangs=timeline.hangs,
        saves=timeline.saves,
        saves_failed=timeline.saves_failed,
    )


_Stretch = tuple[int, int, Bucket]


def _resolved(spans: Iterable[tuple[int, int, Bucket | Step]], ordinary: float | None) -> Iterator[_Stretch]:
    """Spans with the bucket that their owner came to.

    `ordinary` is the microseconds of a step that has no warming up to do: what a first step takes longer is start-up.
    """
    warming: dict[int, int] = {}  # id of a first step -> microseconds of start-up still to be taken from its spans
    for start, end, owner in spans:
        if isinstance(owner, Bucket):
            yield start, end, owner
            continue
        cut = start
        if owner.first and ordinary is not None and owner.bucket in (Bucket.TRAINING, Bucket.REPLAYED):
            excess = warming.setdefault(id(owner), max(0, owner.us - round(ordinary)))
            cut = min(end, start + excess)
            warming[id(owner)] = excess - (cut - start)
        if start < cut:
            yield start, cut, Bucket.STARTUP
        if cut < end:
            yield cut, end, owner.bucket


def _joined(stretches: Iterable[_Stretch]) -> Iterator[_Stretch]:
    """Neighbours of the same bucket made one."""
    last: _Stretch | None = None
    for start, end, bucket in stretches:
        if last is not None and last[2] is bucket:
            last = last[0], end, bucket
            continue
        if last is not None:
            yield last
        last = start, end, bucket
    if last is not None:
        yield last
