"""What was simulated as a picture: time against cost of every choice, and the machines of a typical run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast.report import plot
from outlast.simulation.choices import Result

check = plot.check
SPOT, ON_DEMAND = "#4c72b0", "#dd8452"


def write(path: Path, named: Sequence[Result], others: Sequence[Result], cost: str) -> None:
    """Draw to a file; the first of `named` is the one whose machines are shown, `cost` is the unit of costs.

    Raises OutlastError as `report.plot` does.
    """
    drawn = plot.figure(10, 4)
    left, right = drawn.subplots(1, 2)
    _choices(left, named, others)
    left.set_ylabel(f"{cost}, median")
    _machines(right, named[0])
    plot.save(drawn, path)


def _choices(axes: Any, named: Sequence[Result], others: Sequence[Result]) -> None:
    tried = [each for each in others if each.ended]
    axes.scatter(
        [each.wall_s / 3600 for each in tried], [each.cost for each in tried], s=12, color="#bbbbbb", label="other settings"
    )
    for each in named:
        if each.ended:
            axes.scatter([each.wall_s / 3600], [each.cost], s=40, label=each.choice.name)
    axes.set_xlabel("hours until the end, median")
    axes.set_ylim(bottom=0)
    axes.legend()


def _machines(axes: Any, result: Result) -> None:
    """Machines that were ready, over time."""
    outcome = result.typical
    hours = [at / 3600 for at, _, _ in outcome.timeline] + [outcome.wall_s / 3600]
    spot = [count for _, count, _ in outcome.timeline]
    on_demand = [count for _, _, count in outcome.timeline]
    axes.stackplot(
        hours, [*spot, spot[-1]], [*on_demand, on_demand[-1]], step="post", labels=("spot", "on demand"), colors=(SPOT, ON_DEMAND)
    )
    axes.set_xlabel("hours")
    axes.set_title(f"machines: {result.choice.name}")
    axes.legend()
