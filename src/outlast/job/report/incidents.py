"""A run's incidents, and the training time that each failure cost: detection, re-forming, restoring, and repeated steps. The loss
begins with the fault and ends with the next completed step, whose ordinary duration does not count as lost. Used by
`report.timeline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from outlast.job import failure
from outlast.job.report.steps import WAITING, Bucket


@dataclasses.dataclass(slots=True)
class Lost:
    """Training time lost to an incident, in whole microseconds, without suspended and queued time."""

    detection_us: int = 0
    """Time from the fault until a process noticed it."""
    reforming_us: int = 0
    """Rendezvous, starting processes, importing, building the model, and the first step's extra time."""
    restoring_us: int = 0
    again_us: int = 0
    """Time spent on steps whose results were lost, and on the interrupted step."""
    up_to: bool = False
    """True if the time of the fault is unknown. The lost time is then measured from the last step in the ledger, so it
    is an upper bound."""
    source: str = ""
    """Where the state was restored from: memory | peer | disk | store; empty if not reported."""

    @property
    def seconds(self) -> float:
        """The sum of the four parts."""
        return (self.detection_us + self.reforming_us + self.restoring_us + self.again_us) / 1e6

    def spend(self, phase: Bucket, us: int) -> None:
        """Add `us` microseconds to the part of the loss to which `phase` belongs. Checkpoints and time without a running worker
        do not count."""
        if phase is Bucket.RESTORE:
            self.restoring_us += us
        elif phase is Bucket.HANG:
            self.detection_us += us
        elif phase not in (*WAITING, Bucket.CHECKPOINT):
            self.reforming_us += us

    def ordinary(self, us: int) -> None:
        """Subtract the ordinary duration of the first step after the incident, because that time is not lost."""
        self.reforming_us = max(0, self.reforming_us - us)

    def recover(self, us: int) -> None:
        """Subtract the time of steps that seemed lost but had completed, although they are not in the ledger."""
        taken = min(us, self.detection_us)
        self.detection_us -= taken
        self.again_us = max(0, self.again_us - (us - taken))


def stopped(*, progress: int | None, fault: int | None, noticed: int, at: int) -> Lost:
    """Return the loss so far when a world ends at time `at`. All times are in microseconds.

    `progress` is the end of the world's last step, or None if no step has ended; `fault` is the time of the fault, if known;
    `noticed` is the time of its first report.
    """
    noticed = max(min(noticed, at), progress or 0)
    begun = noticed if progress is None else progress
    moment = begun if fault is None else min(max(fault, begun if progress is not None else fault), noticed)
    return Lost(
        detection_us=noticed - moment,
        reforming_us=at - noticed,
        again_us=max(0, moment - begun),
        up_to=fault is None and moment < noticed,
    )


@dataclasses.dataclass(slots=True)
class Incident:
    """An event that changed or interrupted training."""

    time: float
    kind: str
    """failure | hang | unheard | interruption | change | launcher | save | damaged | slow | differs"""
    text: str
    """One sentence, from the process that made the change or detected the problem."""
    worker: int | None = None
    generation: int = -1
    """Generation of the world in which the incident happened, or which it ended."""
    recovery_s: float | None = None
    """Seconds until the next step or, if the script reports no steps, the next world. None before that, or if training never
    stopped."""
    replayed: int = 0
    attempt: int = 0
    """The attempt of the world that the incident ended, above 0 if the members had already restarted its processes."""
    lost: Lost | None = None
    """Training time lost, final once `recovery_s` is known. None if training never stopped, or if the script reports no steps."""
    cause: str = ""
    """One of `CAUSES`, for incidents that cost training time."""


SOURCES = ("memory", "peer", "disk", "store")
FAILURES = ("failure", "hang", "unheard")
PLANNED = ("interruption", "change")
CAUSES = (*failure.CATEGORIES, "lost", *PLANNED, "launcher")
"""Causes of lost training time. `lost` is a worker that is gone or unreachable without an exit code."""


def cause(kind: str, event: Mapping[str, Any]) -> str:
    """Return the cause of an incident of this kind, from the event that reported it."""
    if kind == "failure" and isinstance(event.get("code"), int):
        return failure.category(event)
    return "lost" if kind in ("failure", "unheard") else kind


@dataclasses.dataclass(frozen=True)
class Total:
    """Total cost of all incidents of certain kinds that training has recovered from."""

    failures: int
    seconds: float
    last_s: float
    generation: int
    """Generation of the world that the last incident ended."""
    up_to: bool


def total(incidents: Iterable[Incident], kinds: Iterable[str] = FAILURES) -> Total:
    """Add up the cost of incidents of these kinds that training has recovered from."""
    over = [(i, i.lost) for i in incidents if i.kind in kinds and i.lost is not None and i.recovery_s is not None]
    if not over:
        return Total(0, 0.0, 0.0, -1, up_to=False)
    last, cost = over[-1]
    return Total(
        len(over), sum(lost.seconds for _, lost in over), cost.seconds, last.generation, any(lost.up_to for _, lost in over)
    )


def seconds_by_cause(incidents: Iterable[Incident]) -> dict[str, float]:
    """Return the training seconds that each cause has cost, for incidents that training has recovered from."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for incident in incidents:
        if incident.lost is not None and incident.recovery_s is not None:
            seconds[incident.cause] += incident.lost.seconds
    return seconds
