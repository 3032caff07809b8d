"""Which committed checkpoints to keep: one rule for disks and stores. Pure.

The `keep` newest checkpoints stay, and so do the `best` checkpoints with the best metrics. If a later generation resumed from
an earlier step, it skipped a checkpoint as damaged: that checkpoint counts neither as one of the newest nor as one of the best.
A run resumes from the newest checkpoint, never from the best one. See docs/decisions/0029-best-checkpoints.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

from outlast.base.errors import NotFound
from outlast.job.contract import Env

LEAST = 2
"""Minimum number of newest checkpoints to keep, since the newest one may turn out to be damaged."""

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Metric:
    """How good a checkpoint is, with the measure's name and direction, so that any reader can compare checkpoints."""

    value: float
    by: str = ""
    """The name under which the value was logged; empty for a value passed to `run.save`."""
    mode: Mode = "min"

    @classmethod
    def of(cls, document: object) -> Metric | None:
        """Parse the metric in a JSON document. Returns None if this version does not support it."""
        if not isinstance(document, dict):
            return None
        value, by, mode = document.get("value"), document.get("by", ""), document.get("mode", "min")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(by, str) or mode not in ("min", "max"):
            return None
        return cls(float(value), by, mode) if math.isfinite(value) else None

    def plain(self) -> dict[str, Any]:
        """Return the metric as a JSON document, which `of` reads back."""
        return asdict(self)


class Committed(Protocol):
    """A committed checkpoint, on a disk or in a store."""

    @property
    def step(self) -> int:
        """Number of optimizer steps done when the checkpoint was saved."""

    @property
    def generation(self) -> int:
        """The generation that saved the checkpoint."""

    @property
    def metric(self) -> Metric | None:
        """The checkpoint's metric, if known."""


C = TypeVar("C", bound=Committed)


def withdrawn(generation: int, step: int, ways_back: Iterable[tuple[int, int]]) -> bool:
    """Return whether one of the run's states no longer counts, given the generation and step of each time the run went back.

    States after such a step are wrong if they come from that generation or an earlier one. See
    docs/decisions/0069-the-way-back.md.
    """
    return any(generation <= last and step > agreed for last, agreed in ways_back)


def counted(checkpoints: Iterable[C]) -> list[C]:
    """Return the checkpoints that no later generation has skipped by resuming from an earlier step, lowest step first."""
    stays, newest = [], -1
    for each in sorted(checkpoints, key=lambda each: each.step):
        if each.generation >= newest:
            stays.append(each)
        newest = max(newest, each.generation)
    return stays


def ranked(checkpoints: Iterable[C]) -> list[C]:
    """Return the checkpoints that have a metric, best first. If values are equal, the older one comes first.

    A logged value applies to every checkpoint until the next value is logged, but measures only the first of them. Checkpoints
    with a different measure than the newest measured one are omitted, since their values cannot be compared.
    """
    measured = [(each, each.metric) for each in counted(checkpoints) if each.metric and math.isfinite(each.metric.value)]
    if not measured:
        return []
    by, mode = measured[-1][1].by, measured[-1][1].mode
    sign = 1 if mode == "min" else -1
    alike = [(sign * metric.value, each.step, each) for each, metric in measured if (metric.by, metric.mode) == (by, mode)]
    return [each for _, _, each in sorted(alike, key=lambda entry: entry[:2])]


BEST = "best"


def named(checkpoints: Iterable[C], name: str) -> C:
    """Return the checkpoint that the user named, by `best` or by its step. Raises NotFound."""
    checkpoints = sorted(checkpoints, key=lambda each: each.step)
    if name == BEST:
        if best := ranked(checkpoints):
            return best[0]
        remedy = "let the script call run.save(step, metric=...), or set checkpoint.by in the job file"
        raise NotFound(f"none of the {len(checkpoints)} checkpoints has a metric, so none is best; {remedy}")
    if not name.isdecimal():
        raise NotFound(f"{name!r} names no checkpoint; give a step, or {BEST}")
    if same := [each for each in checkpoints if each.step == int(name)]:
        return same[-1]
    raise NotFound(f"no checkpoint of step {name}; there are: {', '.join(str(each.step) for each in checkpoints) or 'none'}")


@dataclass(frozen=True)
class Retention:
    """A rule that says which committed checkpoints to keep."""

    keep: int = 3
    """Number of newest checkpoints to keep; LEAST if this is lower."""
    best: int = 0
    """Number of best checkpoints to keep."""
    by: str = ""
    """Name of the logged value that ranks checkpoints; if empty, only values passed to `run.save(metric=)` rank them."""
    mode: Mode = "min"

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> Retention:
        """Parse OUTLAST_CHECKPOINT_KEEP and OUTLAST_CHECKPOINT_BEST; `spec.Checkpoint.variables` writes them."""
        number, mode, by = [*environ.get(Env.CHECKPOINT_BEST, "").split(" ", 2), "", "", ""][:3]
        return cls(int(environ.get(Env.CHECKPOINT_KEEP, 3)), int(number or 0), by, "max" if mode == "max" else "min")

    def metric(self, value: float | None) -> Metric | None:
        """Return a checkpoint's metric, or None if the value is None or not finite: such a checkpoint is never best."""
        return Metric(value, self.by, self.mode) if value is not None and math.isfinite(value) else None

    def needs_commit(self, checkpoint: Committed) -> bool:
        """Return whether `expired` needs a checkpoint's COMMIT, given the checkpoint as described in the register."""
        return self.best > 0 and checkpoint.metric is None

    def expired(self, checkpoints: Iterable[C]) -> list[C]:
        """Return the committed checkpoints to remove, lowest step first."""
        checkpoints = sorted(checkpoints, key=lambda each: each.step)
        newest = counted(checkpoints)[-max(LEAST, self.keep) :]
        if len(newest) < max(LEAST, self.keep):
            return []
        best = {each.step for each in self.best_of(checkpoints)}
        return [each for each in checkpoints if each.step < newest[0].step and each.step not in best]

    def best_of(self, checkpoints: Iterable[C]) -> list[C]:
        """Return the best checkpoints to keep, best first."""
        return ranked(checkpoints)[: self.best]
