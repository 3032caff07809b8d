"""Which committed checkpoints stay, on a disk and in a store: the one rule for both. Pure.

The newest `keep` stay, and the `best` best by their metric. A checkpoint that a later generation went back before does not count,
neither as a newest nor as a best one: it was skipped as damaged. Resuming takes the newest one, never the best.
Docs: docs/decisions/0029-best-checkpoints.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

from outlast.base.errors import NotFound
from outlast.job.contract import Env

LEAST = 2
"""The newest checkpoint may turn out to be damaged, so the one before it always stays."""

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Metric:
    """How good a checkpoint is. It says by what, so that any reader can compare."""

    value: float
    by: str = ""
    """The name under which the value was logged; "" for one without."""
    mode: Mode = "min"
    """Whether lower or higher is better."""

    @classmethod
    def of(cls, document: object) -> Metric | None:
        """The metric in a JSON document; None without one, and for one that this version does not understand."""
        if not isinstance(document, dict):
            return None
        value, by, mode = document.get("value"), document.get("by", ""), document.get("mode", "min")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(by, str) or mode not in ("min", "max"):
            return None
        return cls(float(value), by, mode) if math.isfinite(value) else None

    def plain(self) -> dict[str, Any]:
        """As it is written; `of` reads it back."""
        return asdict(self)


class Committed(Protocol):
    """A committed checkpoint, wherever it is."""

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""

    @property
    def generation(self) -> int:
        """The generation that saved it."""

    @property
    def metric(self) -> Metric | None:
        """How good it is, if that is known."""


C = TypeVar("C", bound=Committed)


def counted(found: Iterable[C]) -> list[C]:
    """The checkpoints that no later generation went back before, lowest step first."""
    stays, newest = [], -1
    for each in sorted(found, key=lambda each: each.step):
        if each.generation >= newest:
            stays.append(each)
        newest = max(newest, each.generation)
    return stays


def ranked(found: Iterable[C]) -> list[C]:
    """The checkpoints that have a metric, best first; of equal ones the older first.

    For a logged value is that of every checkpoint until the next is logged, and the first of them is what was measured.
    Those measured by another metric than the newest of them are left out: their values cannot be compared.
    """
    measured = [(each, each.metric) for each in counted(found) if each.metric and math.isfinite(each.metric.value)]
    if not measured:
        return []
    by, mode = measured[-1][1].by, measured[-1][1].mode
    sign = 1 if mode == "min" else -1
    alike = [(sign * metric.value, each.step, each) for each, metric in measured if (metric.by, metric.mode) == (by, mode)]
    return [each for _, _, each in sorted(alike, key=lambda entry: entry[:2])]


BEST = "best"


def named(found: Iterable[C], name: str) -> C:
    """The checkpoint that a user names: `best`, or a step. Raises NotFound."""
    found = sorted(found, key=lambda each: each.step)
    if name == BEST:
        if best := ranked(found):
            return best[0]
        remedy = "let the script call run.save(step, metric=...), or set checkpoint.by in the job file"
        raise NotFound(f"none of the {len(found)} checkpoints has a metric, so none is best; {remedy}")
    if not name.isdecimal():
        raise NotFound(f"{name!r} names no checkpoint; give a step, or {BEST}")
    if same := [each for each in found if each.step == int(name)]:
        return same[-1]
    raise NotFound(f"no checkpoint of step {name}; there are: {', '.join(str(each.step) for each in found) or 'none'}")


@dataclass(frozen=True)
class Retention:
    """How many committed checkpoints to keep."""

    keep: int = 3
    """How many of the newest; at least LEAST stay whatever it says."""
    best: int = 0
    """How many of the best."""
    by: str = ""
    """The logged value that says how good a checkpoint is; "": only what `run.save(metric=)` is given."""
    mode: Mode = "min"

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> Retention:
        """The retention in OUTLAST_CHECKPOINT_KEEP and OUTLAST_CHECKPOINT_BEST; `spec.Checkpoint.variables` makes them."""
        number, mode, by = [*environ.get(Env.CHECKPOINT_BEST, "").split(" ", 2), "", "", ""][:3]
        return cls(int(environ.get(Env.CHECKPOINT_KEEP, 3)), int(number or 0), by, "max" if mode == "max" else "min")

    def metric(self, value: float | None) -> Metric | None:
        """The metric of a checkpoint; None if the value is none or not finite, since such a checkpoint is never best."""
        return Metric(value, self.by, self.mode) if value is not None and math.isfinite(value) else None

    def expired(self, found: Iterable[C]) -> list[C]:
        """Which of the committed checkpoints to remove, lowest step first."""
        found = sorted(found, key=lambda each: each.step)
        newest = counted(found)[-max(LEAST, self.keep) :]
        if len(newest) < max(LEAST, self.keep):
            return []
        best = {each.step for each in self.best_of(found)}
        return [each for each in found if each.step < newest[0].step and each.step not in best]

    def best_of(self, found: Iterable[C]) -> list[C]:
        """The best ones, which stay; best first."""
        return ranked(found)[: self.best]
