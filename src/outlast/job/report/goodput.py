"""Accounts for a job's time: each instant from submission to the end belongs to exactly one bucket. The buckets add up to the
wall time, to the microsecond, whatever the ledger contains. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from outlast.job.ledger import Event
from outlast.job.report.incidents import Incident
from outlast.job.report.ledger_events import in_order, microseconds, survey
from outlast.job.report.steps import Bucket, Step
from outlast.job.report.timeline import Snapshots, Timeline

COUNTED = ("steps_kept", "worlds", "failures", "restarts", "interruptions", "hangs", "saves", "saves_failed")


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A period of time, in seconds since the epoch. Consecutive segments are contiguous and have different buckets."""

    start: float
    end: float
    bucket: Bucket


@dataclasses.dataclass(frozen=True)
class Goodput:
    """An account of how one job spent its time, up to its end, or up to now if it is still running."""

    start: float
    """Time of the first event, in seconds since the epoch."""
    end: float
    state: str | None
    """The final state in the ledger, e.g. `Succeeded`; None while the job runs."""
    microseconds: Mapping[Bucket, int]
    """Microseconds in each bucket, as whole numbers, so that the sum is exact."""
    segments: tuple[Segment, ...]
    incidents: tuple[Incident, ...]
    steps_kept: int
    steps_replayed: int
    step_mean_s: float | None
    """Mean duration of all executed steps except each world's first step, which includes the warm-up. `step_median_s` is the
    median over the same steps."""
    step_median_s: float | None
    worlds: int
    failures: int
    restarts: int
    """Number of worlds formed after a failure or a hang."""
    interruptions: int
    """Number of requests to save and leave, including planned changes."""
    hangs: int
    saves: int
    saves_failed: int
    snapshots: Snapshots | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the end, or to now."""
        return sum(self.microseconds.values()) / 1e6

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Seconds in each bucket."""
        return {bucket: us / 1e6 for bucket, us in self.microseconds.items()}

    @property
    def goodput(self) -> float:
        """Share of the wall time spent on steps whose results were kept, from 0 to 1. Suspended time does not count."""
        us = self.microseconds
        return us[Bucket.TRAINING] / max(1, sum(us.values()) - us[Bucket.SUSPENDED])

    def share(self, bucket: Bucket) -> float:
        """Return a bucket's share of the wall time, from 0 to 1."""
        return self.microseconds[bucket] / max(1, sum(self.microseconds.values()))


def buckets(events: Iterable[Event], now: float | None) -> Goodput:
    """Return the account from the first event to the job's end or, while the job runs, to `now`, in seconds since the epoch.

    A sequence may be in any order. Any other iterable, such as `ledger.Events`, must be in chronological order and allow two
    passes, so that memory stays bounded. If `now` is None, as for a job without a launcher, the account ends with the last event.
    """
    if isinstance(events, Sequence):
        events = sorted(events, key=lambda event: microseconds(event["t"]))
    facts = survey(in_order(events))
    start = microseconds(now or 0.0) if facts.start is None else facts.start
    timeline = Timeline(start, facts)
    for t, event in in_order(events):
        timeline.feed(max(t, timeline.seen), event)
    timeline.stop(timeline.seen if now is None else max(microseconds(now), timeline.seen))

    mean, median = timeline.durations.mean(), timeline.durations.median()
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
        steps_replayed=timeline.steps_executed - timeline.steps_kept,
        step_mean_s=mean / 1e6 if mean is not None else None,
        step_median_s=median / 1e6 if median is not None else None,
        snapshots=timeline.snapshots,
        **{name: getattr(timeline, name) for name in COUNTED},
    )


_Stretch = tuple[int, int, Bucket]


def _resolved(spans: Iterable[tuple[int, int, Bucket | Step]], ordinary: float | None) -> Iterator[_Stretch]:
    """Yield the spans, split where needed, each with its final bucket.

    `ordinary` is the usual duration of a step in microseconds; the extra time of a first step counts as start-up. By convention,
    a step waits for data, copies the state, warms up and trains, in this order.
    """
    stalling: dict[tuple[int, Bucket], int] = {}  # (step id, stall) -> microseconds still to be taken from its spans
    warming: dict[int, int] = {}  # first step's id -> microseconds of start-up still to be taken from its spans
    keeping: dict[int, int] = {}  # id of partly rolled-back steps -> microseconds left for the kept ones
    for start, end, owner in spans:
        if isinstance(owner, Bucket):
            yield start, end, owner
            continue
        stalls = owner.waited_us + owner.copied_us
        if owner.bucket is Bucket.TRAINING:
            for bucket, us in ((Bucket.DATA, owner.waited_us), (Bucket.SNAPSHOT, owner.copied_us)):
                left = stalling.setdefault((id(owner), bucket), us)
                cut = min(end, start + left)
                stalling[id(owner), bucket] = left - (cut - start)
                if start < cut:
                    yield start, cut, bucket
                start = cut
        cut = start
        if owner.first and ordinary is not None and owner.bucket in (Bucket.TRAINING, Bucket.REPLAYED):
            excess = warming.setdefault(id(owner), max(0, owner.us - stalls - round(ordinary * max(1, owner.count))))
            cut = min(end, start + excess)
            warming[id(owner)] = excess - (cut - start)
        if start < cut:
            yield start, cut, Bucket.STARTUP
        if owner.kept_us >= 0 and owner.bucket is Bucket.TRAINING:
            left = keeping.setdefault(id(owner), max(0, owner.kept_us - stalls))
            kept = min(end, cut + left)
            keeping[id(owner)] = left - (kept - cut)
            if cut < kept:
                yield cut, kept, Bucket.TRAINING
            if kept < end:
                yield kept, end, Bucket.REPLAYED
        elif cut < end:
            yield cut, end, owner.bucket


def _joined(stretches: Iterable[_Stretch]) -> Iterator[_Stretch]:
    for bucket, same in itertools.groupby(stretches, key=lambda stretch: stretch[2]):
        together = list(same)
        yield together[0][0], together[-1][1], bucket
