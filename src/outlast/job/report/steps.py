"""The buckets into which time is divided, and the steps that own time until its bucket is known. Used by `report.timeline`."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections import Counter


class Bucket(enum.StrEnum):
    """How a span of time was used."""

    TRAINING = "training"
    """Steps whose results were kept. Goodput is this bucket's share of all time that was not suspended."""
    REPLAYED = "replayed"
    """Steps whose results were lost: rolled back by a restore, or cut short by a failure."""
    DATA = "data stall"
    """Waiting for data during steps whose results were kept."""
    SNAPSHOT = "snapshot stall"
    """Copying the state into memory during steps whose results were kept."""
    CHECKPOINT = "checkpoint"
    """Training stalled for a save. Saves in the background do not count."""
    RENDEZVOUS = "rendezvous"
    """Time from the end of a world (a failure, an interruption, a planned change) until the next world formed."""
    RESTORE = "restore"
    STARTUP = "startup"
    """Starting processes, importing, building the model, the extra time of a first step, and exiting at the end."""
    QUEUE = "queue"
    """Time from submission or resumption until pods are requested or the first worker starts, and time in a queue."""
    PODS = "pod start"
    """Time from the request for pods until the first pod runs: scheduling, pulling images, mounting volumes."""
    HANG = "hang"
    """Time from the last step until a hang was detected."""
    IDLE = "idle"
    """The job was interrupted, or had neither a launcher nor workers."""
    SUSPENDED = "suspended"


WAITING = (Bucket.IDLE, Bucket.SUSPENDED, Bucket.QUEUE, Bucket.PODS)


@dataclasses.dataclass(slots=True)
class Step:
    """One execution of a step, finished or not, or of several steps that were reported together or merged later."""

    bucket: Bucket = Bucket.TRAINING
    first: bool = False
    """True for a world's first step, whose extra time is start-up."""
    before: int = 0
    """The number of the step before the first of these steps."""
    number: int = 0
    """The number of the last step whose results are kept."""
    count: int = 0
    """Number of kept steps; 0 while the step runs."""
    life: int = 0
    us: int = 0
    waited_us: int = 0
    copied_us: int = 0
    """The parts of `us` spent waiting for data and copying the state into memory."""
    kept_us: int = -1
    """Part of `us` spent on kept steps, if later steps were rolled back; -1 means all of it."""
    pieces: int = 0

    def join(self, other: Step) -> bool:
        """Merge the following step into this step if both are alike, and return whether they were merged."""
        one = (self.bucket, self.life) == (other.bucket, other.life) and self.number == other.before
        whole = self.pieces == other.pieces == 1 and self.kept_us == other.kept_us == -1 and self.count and other.count
        if not one or not whole or self.first or other.first:
            return False
        self.number, self.count = other.number, self.count + other.count
        self.us, self.waited_us = self.us + other.us, self.waited_us + other.waited_us
        self.copied_us += other.copied_us
        return True


_DIGITS = 1 << 16
"""Maximum number of distinct step durations. Beyond it, durations are rounded to about a thousandth of their length."""


class Durations:
    """Statistics of step durations in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = self._number = 0

    def add(self, us: int, count: int) -> None:
        """Add `count` steps that took `us` microseconds together."""
        self._counts[us // count] += count
        self._total, self._number = self._total + us, self._number + count
        if len(self._counts) > _DIGITS:
            rounded: Counter[int] = Counter()
            for each, number in self._counts.items():
                grain = max(1, 1 << (each.bit_length() - 10))
                rounded[each // grain * grain + grain // 2] += number
            self._counts = rounded

    def mean(self) -> float | None:
        """Return the mean duration in microseconds; None before the first step."""
        return self._total / self._number if self._number else None

    def median(self) -> float | None:
        """Return the median duration in microseconds; None before the first step."""
        if not self._number:
            return None
        ordered = sorted(self._counts)
        seen = list(itertools.accumulate(self._counts[each] for each in ordered))
        middle = self._number / 2
        return (ordered[bisect.bisect_left(seen, middle)] + ordered[bisect.bisect_right(seen, middle)]) / 2
