"""Plots a comparison of runs: their times, and the measured and ideal speed-ups. This is the only module that imports
matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast.base.errors import OutlastError, importing
from outlast.job.report.comparison import Row
from outlast.job.report.steps import Bucket

KINDS = (".svg", ".png", ".pdf")
COLOURS = {
    Bucket.TRAINING: "#2e9e5b",
    Bucket.REPLAYED: "#d64545",
    Bucket.DATA: "#e8c547",
    Bucket.SNAPSHOT: "#57b8d9",
    Bucket.CHECKPOINT: "#3d7ea6",
    Bucket.RENDEZVOUS: "#a05195",
    Bucket.RESTORE: "#4c72b0",
    Bucket.STARTUP: "#dd8452",
    Bucket.QUEUE: "#bbbbbb",
    Bucket.PODS: "#d0d0d0",
    Bucket.HANG: "#7a1f1f",
    Bucket.IDLE: "#eeeeee",
    Bucket.SUSPENDED: "#f7f7f7",
}


def check(path: Path) -> None:
    """Raise OutlastError if a plot cannot be written to this path."""
    if path.suffix.lower() not in KINDS:
        raise OutlastError(f"--plot {path} must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    _figure()


def write(path: Path, rows: Sequence[Row]) -> None:
    """Plot a comparison to a file: bars for the times, and the known speed-ups over the number of workers. Raises OutlastError if
    matplotlib is missing or the file cannot be written."""
    drawn = _figure()(figsize=(9, 3.6), layout="constrained")
    points = [(row.run.workers[0], row.speedup) for row in rows if row.efficiency is not None and row.speedup is not None]
    left, *right = drawn.subplots(1, 2 if len(points) > 1 else 1, squeeze=False)[0]
    _times(left, rows)
    if right:
        _speedups(right[0], sorted(points))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path)
    except OSError as error:
        raise OutlastError(f"--plot {path} cannot be written: {error.strerror or error}; name another file") from error


def _times(axes: Any, rows: Sequence[Row]) -> None:
    minutes = max(row.run.time_s for row in rows) >= 180
    values = [row.run.time_s / 60 if minutes else row.run.time_s for row in rows]
    labels = [f"{row.run.name}\n{'→'.join(map(str, row.run.workers)) or '?'} workers" for row in rows]
    bars = axes.bar(range(len(rows)), values, color="#4c72b0")
    axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("minutes" if minutes else "seconds")
    axes.set_title("time from submission to the end")


def _speedups(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    workers = [count for count, _ in points]
    base = points[0][0] / points[0][1]
    axes.plot(workers, [count / base for count in workers], "--", color="#999999", label="ideal")
    axes.plot(workers, [speedup for _, speedup in points], "o-", color="#c44e52", label="measured")
    axes.set_xticks(workers)
    axes.set_xlabel("workers")
    axes.set_title("speed-up")
    axes.set_ylim(bottom=0)
    axes.legend()


def _figure() -> Any:
    """Return matplotlib's Figure class, which needs no display. Raises OutlastError if matplotlib is missing."""
    with importing("drawing", "plots"):
        from matplotlib.figure import Figure
    return Figure
