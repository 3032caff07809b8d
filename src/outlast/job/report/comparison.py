"""Compares several runs with the first run by duration, workers and speed-up. Speed-ups compare the times from submission to the
end, so all runs must do the same training. A run that has not succeeded has no speed-up. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from outlast.base import units
from outlast.job.ledger import Event
from outlast.job.report.goodput import Goodput
from outlast.job.report.steps import Bucket

HEADINGS = ("NAME", "STATE", "WORKERS", "TIME", "SPEED-UP", "EFFICIENCY", "STEPS", "STEPS/S", "THROUGHPUT", "GOODPUT", "LOSS")


@dataclasses.dataclass(frozen=True)
class Run:
    """One of the compared runs. Times are in seconds."""

    name: str
    state: str
    workers: tuple[int, ...]
    """The run's world sizes in chronological order, with consecutive equal sizes merged."""
    time_s: float
    training_s: float
    """Part of `time_s` spent on steps whose results were kept."""
    steps: int
    steps_per_s: float | None
    """Steps per second while the run trained, not counting the first step of each world."""
    goodput: float
    loss: float | None = None
    throughput: dict[str, float] = dataclasses.field(default_factory=dict)
    """Median of the first logged speed, keyed by its name, such as `images_per_s`."""
    speedup: float | None = None
    efficiency: float | None = None
    """The speed-up divided by the ratio of the worker counts. 1 is ideal."""


def run(name: str, account: Goodput, events: Iterable[Event], metrics: Iterable[str | bytes]) -> Run:
    """Summarise a run, given its account, its ledger's events and the lines of its metrics.jsonl."""
    loss, throughput = _logged(metrics)
    return Run(
        name,
        account.state or "Running",
        sizes(events),
        round(account.wall_s, 3),
        round(account.seconds[Bucket.TRAINING], 3),
        account.steps_kept,
        1 / account.step_mean_s if account.step_mean_s else None,
        account.goodput,
        loss,
        throughput,
    )


def sizes(events: Iterable[Event]) -> tuple[int, ...]:
    """Return the world sizes in order, merging consecutive equal sizes. Under plain torchrun, the sizes count ranks instead of
    workers."""
    worlds: list[int] = []
    ranks: list[int] = []
    for event in events:
        members, ranks_ = event.get("workers"), event.get("world_size")
        if event.get("kind") == "world" and isinstance(size := event.get("size"), int):
            worlds.append(size)
        elif event.get("kind") == "world" and isinstance(members, list):
            worlds.append(len(members))
        elif event.get("kind") == "session" and isinstance(ranks_, int):
            ranks.append(ranks_)
    return tuple(size for size, _ in itertools.groupby(worlds or ranks))


def _logged(lines: Iterable[str | bytes]) -> tuple[float | None, dict[str, float]]:
    """Return the last loss and the median of the first speed."""
    loss: float | None = None
    speeds: dict[str, list[float]] = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the last line may be half written
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if name == "loss":
                    loss = float(value)
                elif name.endswith("_per_s"):
                    speeds.setdefault(name, []).append(float(value))
    return loss, {name: statistics.median(each) for name, each in [*speeds.items()][:1]}


def compared(runs: Sequence[Run]) -> list[Run]:
    """Compare each run with the first run."""
    first = runs[0]
    rows = []
    for each in runs:
        over = first.state == each.state == "Succeeded"
        speedup = first.time_s / each.time_s if over and each.time_s else None
        sized = speedup is not None and len(first.workers) == len(each.workers) == 1
        efficiency = speedup * first.workers[0] / each.workers[0] if sized and speedup else None
        rows.append(dataclasses.replace(each, speedup=speedup, efficiency=efficiency))
    return rows


def cells(each: Run) -> list[object]:
    """Return a run's cells in the order of HEADINGS, with None for unknown values."""
    speed = next((f"{value:,.0f} {name.removesuffix('_per_s')}/s" for name, value in each.throughput.items()), None)
    return [
        each.name,
        each.state,
        "→".join(map(str, each.workers)) or None,
        units.human_seconds(each.time_s),
        None if each.speedup is None else f"{each.speedup:.2f}x",
        None if each.efficiency is None else units.percent(each.efficiency),
        f"{each.steps:,}",
        None if each.steps_per_s is None else f"{each.steps_per_s:.2f}",
        speed,
        units.percent(each.goodput),
        None if each.loss is None else f"{each.loss:.4f}",
    ]


def as_json(each: Run) -> dict[str, Any]:
    """Return a run as plain values."""
    loss = each.loss if each.loss is not None and math.isfinite(each.loss) else None  # JSON has no NaN
    return {**dataclasses.asdict(each), "workers": list(each.workers), "loss": loss}
