"""A run's history from its ledger, beyond `report.goodput`: worlds, workers, steps, saves, errors, versions. Pure."""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from outlast.job.ledger import Event
from outlast.job.report.goodput import Goodput, Segment
from outlast.job.report.ledger_events import KINDS, usable
from outlast.job.report.series import Series
from outlast.job.report.steps import Bucket

_ERRORS = 50
"""Maximum number of errors kept. The first ones are kept, because later errors often repeat them."""
_FINE = 2000
_ORDINARY = (Bucket.TRAINING, Bucket.DATA, Bucket.SNAPSHOT, Bucket.CHECKPOINT)
_SOURCE = re.compile(r"(?:worker|rank)-(\d+)(?:-|$)")


class History:
    """A run's history, recorded in bounded memory during the first iteration over its events. Times are in seconds since the
    epoch. Steps are those of rank 0."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events, self._read = events, False
        self.worlds: list[tuple[float, float]] = []
        """The start and the number of workers of each world."""
        self.progress = Series(_FINE)
        self.times = {"step": Series(), "waiting for data": Series(), "copying the state": Series()}
        """Seconds per step over time, excluding the first step of each world."""
        self.saves = {"until committed": Series(), "training stood still": Series()}
        self.presence: dict[int, list[tuple[float, str]]] = {}
        """When each worker was `starting`, `there` (in the world) or `gone`."""
        self.errors: list[tuple[float, int | None, str, str]] = []
        """The time, worker and reason of each counted failure, and its traceback and the end of the log as one text."""
        self.versions: dict[str, str] = {}
        self.code = ""
        """Digest of the most recently submitted code."""
        self.unusable = 0
        self._stepped: float | None = None  # end of the last step of the current processes

    def __iter__(self) -> Iterator[Event]:
        again, self._read = self._read, True
        for event in self._events:
            if not again and usable(event):
                getattr(self, f"_on_{event['kind']}", lambda t, event: None)(event["t"], event)
            elif not again:
                self.unusable += event["kind"] in KINDS
            yield event

    def step_at(self, time: float) -> float:
        """Return the last step that had ended by this time."""
        at = bisect.bisect_right(self.progress.x, time)
        return self.progress.last[at - 1] if at else 0.0

    def _set(self, worker: object, t: float, what: str) -> None:
        if isinstance(worker, int) and (not (changes := self.presence.setdefault(worker, [])) or changes[-1][1] != what):
            changes.append((t, what))

    def _on_step(self, t: float, event: Event) -> None:
        if self._stepped is not None:
            count = _number(event.get("steps")) or 1
            seconds = (t - self._stepped, _number(event.get("waited_s")), _number(event.get("copied_s")))
            for series, each in zip(self.times.values(), seconds, strict=True):
                if each or series.count:
                    series.add(t, each / count)
        self._stepped = t
        self.progress.add(t, event["step"])

    def _on_world(self, t: float, event: Event) -> None:
        members, self._stepped = event.get("workers") or (), None
        self.worlds.append((t, len(members) or _number(event.get("size"))))
        for worker, changes in self.presence.items():
            if members and changes[-1][1] == "there" and worker not in members:
                self._set(worker, t, "gone")
        for worker in members:
            self._set(worker, t, "there")

    def _on_session(self, t: float, event: Event) -> None:
        self._stepped = None
        if found := _SOURCE.match(str(event.get("source"))):
            self._set(int(found[1]), t, "there")
        if not self.worlds:  # under plain torchrun, count ranks
            self.worlds.append((t, _number(event.get("world_size"))))
        if isinstance(event.get("versions"), dict):
            self.versions = {str(name): str(version) for name, version in event["versions"].items()}

    def _on_worker(self, t: float, event: Event) -> None:
        self._set(event.get("worker"), t, "starting")

    def _on_exited(self, t: float, event: Event) -> None:
        self._set(event["worker"], t, "gone")

    def _on_failure(self, t: float, event: Event) -> None:
        if event.get("repaired") is None:
            self._set(event.get("worker"), t, "gone")
        if event.get("counted") is not False and len(self.errors) < _ERRORS:
            text = "\n\n".join(str(event[name]).rstrip() for name in ("traceback", "log_tail") if event.get(name))
            self.errors.append((t, event.get("worker"), str(event.get("reason") or ""), text))

    def _on_finished(self, t: float, event: Event) -> None:
        for worker in self.presence:
            self._set(worker, t, "gone")

    def _on_submitted(self, t: float, event: Event) -> None:
        self.code = str(event.get("code_digest") or self.code)

    _on_resumed = _on_submitted

    def _on_staged(self, t: float, event: Event) -> None:
        self.saves["training stood still"].add(t, _number(event.get("stall_s")))

    def _on_committed(self, t: float, event: Event) -> None:
        self.saves["until committed"].add(t, _number(event.get("seconds")))


def _number(value: object) -> float:
    """Return a number from an event, or 0 for any other value, which another program may have written."""
    return value if isinstance(value, int | float) else 0.0


def longest(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Return about `most` segments. Half of them are the longest given ones, with preference for those in which training was
    disturbed. The time between two of these becomes one segment, with the bucket that covers most of it."""
    if len(segments) <= most:
        return list(segments)
    picked = heapq.nlargest(most // 2, segments, key=lambda each: (each.bucket not in _ORDINARY, each.end - each.start))
    bounds = {time for each in picked for time in (each.start, each.end)} | {segments[-1].end}
    found, spent, start = list[Segment](), dict.fromkeys(Bucket, 0.0), segments[0].start
    for each in segments:
        spent[each.bucket] += each.end - each.start
        if each.end in bounds:
            found.append(Segment(start, each.end, max(spent, key=spent.__getitem__)))
            spent, start = dict.fromkeys(Bucket, 0.0), each.end
    joined = (list(same) for _, same in itertools.groupby(found, key=lambda each: each.bucket))
    return [Segment(same[0].start, same[-1].end, same[0].bucket) for same in joined]


def stays(history: History, account: Goodput, segments: Sequence[Segment]) -> dict[tuple[float, float, str], list[int]]:
    """Return workers, keyed by period. A period consists of its start, its end, and what these workers did (a bucket's name or
    `starting`). Members of the world do what the job does. A worker that is gone has no period."""
    found: dict[tuple[float, float, str], list[int]] = {}
    starts = [segment.start for segment in segments]
    for worker, changes in sorted(history.presence.items()):
        for (start, what), (end, _) in itertools.pairwise([*changes, (account.end, "")]):
            if what == "starting" and start < end:
                found.setdefault((start, end, what), []).append(worker)
            elif what == "there":
                for segment in segments[max(0, bisect.bisect_right(starts, start) - 1) : bisect.bisect_left(starts, end)]:
                    period = max(start, segment.start), min(end, segment.end), segment.bucket.value
                    if period[0] < period[1]:
                        found.setdefault(period, []).append(worker)
    return found
