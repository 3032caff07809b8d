"""What a stretch of time was spent on, and the steps that own stretches until their fate is known. Used by `report.timeline`."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections import Counter


class Bucket(enum.StrEnum):
    """What a stretch of time was spent on."""

    TRAINING = "training"
    """Steps whose result was kept. The share of this in the time that the job was not suspended is the goodput."""
    REPLAYED = "replayed"
    """Steps whose result was lost: taken back by a restore, or cut short by a failure."""
    DATA = "data stall"
    """Steps whose result was kept waited for their data."""
    SNAPSHOT = "snapshot stall"
    """Steps whose result was kept copied the state into memory."""
    CHECKPOINT = "checkpoint"
    """Training stood still for a save; a save in the background costs nothing here."""
    RENDEZVOUS = "rendezvous"
    """From the end of a world (failure, interruption, planned change) until the next one was formed."""
    RESTORE = "restore"
    """Reading a checkpoint back."""
    STARTUP = "startup"
    """Starting processes, importing, building the model; the extra time of a first step; exiting at the end."""
    QUEUE = "queue"
    """Submitted (or resumed), before pods were asked for or the first worker started; also held by a queue."""
    PODS = "pod start"
    """Pods were asked for, and none of them runs yet: scheduling, images, volumes."""
    HANG = "hang"
    """From the last step until a hang was noticed."""
    IDLE = "idle"
    """Interrupted, or without a launcher and workers."""
    SUSPENDED = "suspended"
    """By the user. Goodput is a share of the other time."""


WAITING = (Bucket.IDLE, Bucket.SUSPENDED, Bucket.QUEUE, Bucket.PODS)
"""No worker is there."""


@dataclasses.dataclass(slots=True)
class Step:
    """One execution of a step, finished or not, or of several that were reported together or joined since."""

    bucket: Bucket = Bucket.TRAINING
    first: bool = False
    """First of its world: its extra time is start-up."""
    before: int = 0
    """Number of the step before the first of these."""
    number: int = 0
    """Of the last of these whose result is kept."""
    count: int = 0
    """How many of them are kept; 0 while it is under way."""
    life: int = 0
    us: int = 0
    waited_us: int = 0
    """What of `us` was waiting for data."""
    copied_us: int = 0
    """What of `us` was copying the state into memory."""
    kept_us: int = -1
    """What of `us` was for the kept ones, when the later ones were taken back; -1: all."""
    pieces: int = 0
    """Spans that it owns."""

    def join(self, other: Step) -> bool:
        """Take in the step after this one, if nothing tells the two apart."""
        one = (self.bucket, self.life) == (other.bucket, other.life) and self.number == other.before
        whole = self.pieces == other.pieces == 1 and self.kept_us == other.kept_us == -1 and self.count and other.count
        if not one or not whole or self.first or other.first:
            return False
        self.number, self.count = other.number, self.count + other.count
        self.us, self.waited_us = self.us + other.us, self.waited_us + other.waited_us
        self.copied_us += other.copied_us
        return True


_DIGITS = 1 << 16
"""Most distinct step durations; above, they are rounded to a thousandth."""


class Durations:
    """How long steps took, per step, in bounded memory."""

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
        """Microseconds; None before the first step."""
        return self._total / self._number if self._number else None

    def median(self) -> float | None:
        """Microseconds; None before the first step."""
        if not self._number:
            return None
        ordered = sorted(self._counts)
        seen = list(itertools.accumulate(self._counts[each] for each in ordered))
        middle = self._number / 2
        return (ordered[bisect.bisect_left(seen, middle)] + ordered[bisect.bisect_right(seen, middle)]) / 2
