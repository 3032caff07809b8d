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
    throughput: tuple[str, float] | None = None
    """Name and median of a logged speed, such as `images_per_s`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A run compared with the first run."""

    run: Run
    speedup: float | None
    efficiency: float | None
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


def _logged(lines: Iterable[str | bytes]) -> tuple[float | None, tuple[str, float] | None]:
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
    name, each = next(iter(speeds.items()), ("", []))
    return loss, (name, statistics.median(each)) if each else None


def compared(runs: Sequence[Run]) -> list[Row]:
    """Compare each run with the first run."""
    first = runs[0]
    rows = []
    for each in runs:
        over = first.state == each.state == "Succeeded"
        speedup = first.time_s / each.time_s if over and each.time_s else None
        sized = speedup is not None and len(first.workers) == len(each.workers) == 1
        efficiency = speedup * first.workers[0] / each.workers[0] if sized and speedup else None
        rows.append(Row(each, speedup, efficiency))
    return rows


def cells(row: Row) -> list[object]:
    """Return a row's cells in the order of HEADINGS, with None for unknown values."""
    each = row.run
    name, value = each.throughput or ("", 0.0)
    return [
        each.name,
        each.state,
        "→".join(map(str, each.workers)) or None,
        units.human_seconds(each.time_s),
        None if row.speedup is None else f"{row.speedup:.2f}x",
        None if row.efficiency is None else units.percent(row.efficiency),
        f"{each.steps:,}",
        None if each.steps_per_s is None else f"{each.steps_per_s:.2f}",
        f"{value:,.0f} {name.removesuffix('_per_s')}/s" if each.throughput else None,
        units.percent(each.goodput),
        None if each.loss is None else f"{each.loss:.4f}",
    ]


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""
    plain = dataclasses.asdict(row.run)
    throughput = {name: value for name, value in [row.run.throughput or ("", 0.0)] if name}
    return {
        **plain,
        "workers": list(row.run.workers),
        "throughput": throughput,
        "loss": plain["loss"] if plain["loss"] is not None and math.isfinite(plain["loss"]) else None,  # JSON has no NaN
        "speedup": row.speedup,
        "efficiency": row.efficiency,
    }
