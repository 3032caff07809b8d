"""How fast a job trains on how many workers, and what a change of its world costs it: measured by `outlast report -o json`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outlast.errors import OutlastError
from outlast.report.incidents import FAILURES, PLANNED


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds that a job takes for what it does."""

    fixed_s: float
    """What of a step more workers do not shorten."""
    shared_s: float
    """What of a step the workers share."""
    planned_s: float = 2.0
    """Until training goes on after a change that it was told of in time; what was trained is kept."""
    failure_s: float = 2.5
    """Until training goes on after a loss, without the steps that are done again."""
    stall_s: float = 0.0
    """For which training stands still at a checkpoint."""
    snapshot_every: int = 1
    """Steps between two snapshots in memory; 0: there are none."""
    assumed: tuple[str, ...] = ()
    """What was not measured, in words."""

    def step_s(self, workers: int) -> float:
        """Seconds of a step on so many workers, with the same global batch."""
        return self.fixed_s + self.shared_s / workers


def measured(reports: Sequence[Mapping[str, Any]], workers: int | None = None, snapshots: bool = True) -> Profile:
    """The profile of a job from its reports, as `outlast report -o json` prints them.

    Reports of runs with different numbers of workers say what more workers gain (a fit of fixed + shared / workers); one report
    alone cannot, and all of a step is taken to be shared. `workers` is how many a report without that number had; `snapshots`
    whether the job keeps any. Raises OutlastError for a report without steps or of several sizes.
    """
    points = [(_workers(report, workers), _step(report)) for report in reports]
    fixed, shared = _fit(points)
    assumed = [] if len({size for size, _ in points}) > 1 else ["more workers shorten a step in proportion"]
    found = Profile(fixed, shared)
    costs = {}
    for field, kinds, what in (("planned_s", PLANNED, "a planned change"), ("failure_s", FAILURES, "a failure")):
        seconds = [cost for report in reports for cost in _costs(report, kinds)]
        costs[field] = statistics.median(seconds) if seconds else getattr(found, field)
        assumed += [] if seconds else [f"{what} costs {costs[field]:g} s"]
    saves = sum(report.get("saves") or 0 for report in reports)
    stall = sum((report.get("seconds") or {}).get("checkpoint") or 0.0 for report in reports) / saves if saves else 0.0
    assumed += [] if saves else ["a checkpoint costs no time"]
    every = max(((report.get("snapshots") or {}).get("every") or 0 for report in reports), default=0)
    return Profile(fixed, shared, **costs, stall_s=stall, snapshot_every=every if snapshots else 0, assumed=tuple(assumed))


def _workers(report: Mapping[str, Any], said: int | None) -> int:
    sizes = report.get("workers") or []
    if len(sizes) > 1:
        raise OutlastError(f"the report of {report.get('name')} has worlds of {sizes} workers; take one of a single size")
    if not sizes and said is None:
        raise OutlastError(f"the report of {report.get('name')} does not say how many workers there were; add --workers N")
    return int(sizes[0]) if sizes else said or 1


def _step(report: Mapping[str, Any]) -> float:
    step = report.get("step_median_s")
    if not isinstance(step, int | float) or not step > 0 or not math.isfinite(step):
        raise OutlastError(f"the report of {report.get('name')} has no steps; let the job make a few, or say --step SECONDS")
    return float(step)


def _costs(report: Mapping[str, Any], kinds: Iterable[str]) -> list[float]:
    """What incidents of these kinds cost, without steps that were done again."""
    lost = [each["lost"] for each in report.get("incidents") or () if each.get("kind") in kinds and each.get("lost")]
    return [each["detection_s"] + each["reforming_s"] + each["restoring_s"] for each in lost]


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, shared) seconds by least squares, neither negative; all is shared where only one size is known."""
    inverse = [1 / workers for workers, _ in points]
    steps = [step for _, step in points]
    if len(set(inverse)) > 1:
        line = statistics.linear_regression(inverse, steps)
        if line.slope > 0:
            fixed = max(0.0, line.intercept)
            if fixed:
                return fixed, line.slope
        else:
            return statistics.mean(steps), 0.0
    return 0.0, statistics.mean(step / part for part, step in zip(inverse, steps, strict=True))
