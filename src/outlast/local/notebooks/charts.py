"""Charts of one run: its loss over the steps, and its time by cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from outlast.base import units
from outlast.job.report import plot
from outlast.job.report.goodput import Goodput
from outlast.job.report.incidents import FAILURES
from outlast.job.report.steps import Bucket
from outlast.local.notebooks.panel import Point


def story(account: Goodput, train: Sequence[Point], validation: Sequence[Point]) -> Any:
    """Draw a matplotlib figure: the loss over the steps at the top, the time of the run by cause below. Raises OutlastError if
    matplotlib is missing."""
    figure = plot.figure(9, 5.2)
    loss, time = figure.subplots(2, 1, height_ratios=[3, 1])
    _loss(loss, train, validation)
    _time(time, account)
    return figure


def _loss(axes: Any, train: Sequence[Point], validation: Sequence[Point]) -> None:
    axes.plot([point.step for point in train], [point.value for point in train], color="#4c72b0", label="training loss")
    if validation:
        steps, values = [point.step for point in validation], [point.value for point in validation]
        axes.plot(steps, values, "o--", color="#dd8452", label="validation loss")
    begun = [(a.step + b.step) / 2 for a, b in itertools.pairwise(train) if b.generation > a.generation]
    for number, step in enumerate(begun):
        axes.axvline(step, color="#d64545", linestyle=":", label=None if number else "a new world of workers")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _time(axes: Any, account: Goodput) -> None:
    """Draw a strip from the submission to the end, in which colours show the cause of each segment."""
    for bucket in sorted(Bucket, key=account.microseconds.__getitem__, reverse=True):
        if account.microseconds[bucket]:
            spans = [(each.start - account.start, each.end - each.start) for each in account.segments if each.bucket is bucket]
            name = f"{bucket.value} {units.human_seconds(account.seconds[bucket])}"
            axes.broken_barh(spans, (0, 1), color=plot.COLOURS[bucket], label=name)
    for incident in account.incidents:
        if incident.kind in FAILURES:
            at = incident.time - account.start
            axes.annotate(incident.text, (at, 1), (at, 1.25), ha="center", color="#d64545", arrowprops={"arrowstyle": "->"})
    axes.set_ylim(0, 1.6)
    axes.set_yticks([])
    axes.set_xlim(0, max(account.wall_s, 1e-9))
    axes.set_xlabel(f"seconds since the start; goodput {units.percent(account.goodput)}")
    axes.spines[["left", "right", "top"]].set_visible(False)
    if account.segments:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=4, frameon=False, fontsize="small")
