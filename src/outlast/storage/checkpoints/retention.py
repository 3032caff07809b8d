"""Decides which committed checkpoints to keep, both on disks and in stores. Pure.

The `keep` newest checkpoints are kept, and the `best` checkpoints with the best metrics. A checkpoint that a later generation
skipped as damaged, by resuming from an earlier step, counts as neither. A run always resumes from the newest checkpoint, not from
the best. See docs/decisions/0029-best-checkpoints.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

from outlast.base.errors import NotFound
from outlast.job.contract import Env

LEAST = 2
"""Minimum number of newest checkpoints to keep, because the newest one may turn out to be damaged."""

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Metric:
    """A checkpoint's metric, and how to compare it with others."""

    value: float
    by: str = ""
    """The name under which the value was logged; empty for a value passed to `run.save`."""
    mode: Mode = "min"

    @classmethod
    def of(cls, document: object) -> Metric | None:
        """Parse a metric in JSON. Returns None if this version does not support it."""
        if not isinstance(document, dict):
            return None
        value, by, mode = document.get("value"), document.get("by", ""), document.get("mode", "min")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(by, str) or mode not in ("min", "max"):
            return None
        return cls(float(value), by, mode) if math.isfinite(value) else None

    def plain(self) -> dict[str, Any]:
        """Return the metric as a JSON object, which `of` accepts."""
        return asdict(self)


class Committed(Protocol):
    """A committed checkpoint, on a disk or in a store."""

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""

    @property
    def generation(self) -> int:
        """The generation that saved the checkpoint."""

    @property
    def metric(self) -> Metric | None:
        """The checkpoint's metric, if known."""


C = TypeVar("C", bound=Committed)


def withdrawn(generation: int, step: int, ways_back: Iterable[tuple[int, int]]) -> bool:
    """Return whether a state no longer counts, because the run went back to an earlier one.

    `ways_back` are pairs (generation, step): states after `step` are wrong if that generation or an earlier one computed them.
    See docs/decisions/0069-the-way-back.md.
    """
    return any(generation <= last and step > agreed for last, agreed in ways_back)


def counted(checkpoints: Iterable[C]) -> list[C]:
    """Return in order of step the checkpoints that no later generation skipped by resuming from an earlier step."""
    stays, newest = [], -1
    for each in sorted(checkpoints, key=lambda each: each.step):
        if each.generation >= newest:
            stays.append(each)
        newest = max(newest, each.generation)
    return stays


def ranked(checkpoints: Iterable[C]) -> list[C]:
    """Return the checkpoints that have a metric, best first; of equally good ones, the older comes first.

    Checkpoints whose metric has another name or direction than the newest one's are omitted, because they cannot be compared.
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
    """Return the checkpoint that the user named by its step, or `best`. Raises NotFound."""
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
    """How many checkpoints to keep, and which."""

    keep: int = 3
    """Number of newest checkpoints to keep, at least LEAST."""
    best: int = 0
    by: str = ""
    """Name of the logged value that ranks checkpoints; empty if only values passed to `run.save(metric=)` do."""
    mode: Mode = "min"

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> Retention:
        """Parse OUTLAST_CHECKPOINT_KEEP and OUTLAST_CHECKPOINT_BEST, which `spec.Checkpoint.variables` writes."""
        number, mode, by = [*environ.get(Env.CHECKPOINT_BEST, "").split(" ", 2), "", "", ""][:3]
        return cls(int(environ.get(Env.CHECKPOINT_KEEP, 3)), int(number or 0), by, "max" if mode == "max" else "min")

    def metric(self, value: float | None) -> Metric | None:
        """Return a checkpoint's metric, or None for a value that is None or not finite."""
        return Metric(value, self.by, self.mode) if value is not None and math.isfinite(value) else None

    def needs_commit(self, checkpoint: Committed) -> bool:
        """Return whether a registered checkpoint's COMMIT must be read before calling `expired`, because it may have a metric."""
        return self.best > 0 and checkpoint.metric is None

    def expired(self, checkpoints: Iterable[C]) -> list[C]:
        """Return the checkpoints to remove, in order of step."""
        checkpoints = sorted(checkpoints, key=lambda each: each.step)
        newest = counted(checkpoints)[-max(LEAST, self.keep) :]
        if len(newest) < max(LEAST, self.keep):
            return []
        best = {each.step for each in self.best_of(checkpoints)}
        return [each for each in checkpoints if each.step < newest[0].step and each.step not in best]

    def best_of(self, checkpoints: Iterable[C]) -> list[C]:
        """Return the best checkpoints, best first."""
        return ranked(checkpoints)[: self.best]
