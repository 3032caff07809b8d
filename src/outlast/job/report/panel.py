"""A job's panel for notebooks and `outlast ui`: its state, progress, workers and loss, as HTML and SVG without widgets. The
colours of text and lines are JupyterLab's CSS variables, which follow dark themes, with fallback values elsewhere. Pure."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Iterable, Sequence

from outlast.base import units
from outlast.job.status import JobStatus, State, WorkerStatus

_GREEN, _AMBER, _RED, _BLUE, _GREY = "#2e9e5b", "#d18616", "#d64545", "#4c72b0", "#8a8f98"
_STATES = {
    State.RUNNING: _GREEN,
    State.SUCCEEDED: _GREEN,
    State.RESTARTING: _AMBER,
    State.INTERRUPTED: _AMBER,
    State.FAILED: _RED,
    State.CANCELLED: _RED,
}
_WORKERS = {"training": _GREEN, "done": _GREEN, "gone": _RED}
_TEXT, _DIM, _LINE = "var(--jp-ui-font-color1, #222)", "var(--jp-ui-font-color2, #666)", "var(--jp-border-color2, #ccc)"
_WIDTH, _HEIGHT = 660, 120
"""Size of the curve in pixels."""


@dataclasses.dataclass(frozen=True)
class Point:
    step: int
    generation: int
    value: float


def points(lines: Iterable[str | bytes], metric: str) -> list[Point]:
    """Return a metric's values from the lines of `metrics.jsonl`, skipping lines without the metric and an unfinished last
    line."""
    found = []
    for line in lines:
        try:
            values = json.loads(line)
            found.append(Point(int(values["step"]), int(values.get("generation", 0)), float(values[metric])))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def text(status: JobStatus, metric: str = "loss") -> str:
    """Return the panel as text for a terminal: `gpt: Running, step 120/300, 2 workers, 1 restart, loss 4.23`."""
    steps = f"step {status.step}" + (f"/{status.steps}" if status.steps else "")
    workers = units.count(len(status.world) if status.state.active else status.replicas, "worker")
    facts = [str(status.state), steps, workers, units.count(status.restarts, "restart")]
    if metric in status.metrics:
        facts.append(f"{metric} {status.metrics[metric]:.3g}")
    return f"{status.name}: {', '.join(facts)}"


def page(status: JobStatus, curve: Sequence[Point], metric: str, now: float) -> str:
    """Return the panel as HTML, without a curve if `metric` is empty."""
    colour, name, reason = _STATES.get(status.state, _BLUE), html.escape(status.name), html.escape(status.reason)
    share = min(1.0, status.step / status.steps) if status.steps else 0.0
    done = _div("", f"width:{share:.1%};height:8px;border-radius:4px;background:{colour}")
    rows = [
        _div(f'<b>{name}</b> · <b style="color:{colour}">{status.state}</b> <span style="color:{_DIM}">{reason}</span>'),
        _div(done, f"height:8px;border-radius:4px;background:{_LINE};margin:6px 0 2px"),
        _div(_progress(status)),
        _div("".join(map(_worker, status.workers))),
    ]
    if status.failure is not None:
        rows.append(_div(f"last failure: {html.escape(status.failure.reason)}", f"color:{_RED};margin:6px 0"))
    rows.append(_div(_facts(status, now), f"color:{_DIM}"))
    if metric:
        rows.append(_curve(curve, metric, status.steps))
    look = f"max-width:{_WIDTH}px;border:1px solid {_LINE};border-radius:6px;padding:10px 14px;color:{_TEXT};"
    return _div("".join(rows), look + "font:13px/1.5 var(--jp-ui-font-family, sans-serif)")


def _progress(status: JobStatus) -> str:
    facts = [f"<b>step {status.step:,}{f' of {status.steps:,}' if status.steps else ''}</b>"]
    if status.rate and status.state.trains:
        facts.append(f"{status.rate:.3g} steps/s")
    if status.eta_s:
        facts.append(f"{units.human_seconds(status.eta_s)} left")
    return " · ".join(facts)


def _worker(worker: WorkerStatus) -> str:
    colour = _WORKERS.get(worker.state, _AMBER)
    ranks = f", rank {', '.join(str(rank.rank) for rank in worker.ranks)}" if worker.ranks else ""
    again = f", {units.count(worker.restarts, 'restart')}" if worker.restarts else ""
    look = f"display:inline-block;border:1px solid {colour};border-radius:10px;padding:0 10px;margin:6px 6px 2px 0"
    dot = f'<span style="color:{colour}">●</span>'
    return f'<span style="{look}">{dot} worker {worker.index}: {html.escape(worker.state)}{ranks}{again}</span>'


def _facts(status: JobStatus, now: float) -> str:
    facts = [units.count(status.restarts, "restart")]
    if status.snapshot is not None and status.state.active:
        facts.append(f"snapshot in memory of step {status.snapshot.step:,}")
    if status.checkpoint is not None:
        facts.append(f"checkpoint of step {status.checkpoint.step:,}")
    if status.goodput is not None:
        facts.append(f"goodput {units.percent(status.goodput)}")
    return " · ".join([*facts, f"{units.human_seconds(max(0.0, (status.finished or now) - status.submitted))} since the start"])


def _curve(points: Sequence[Point], metric: str, steps: int | None) -> str:
    """Plot the metric's finite values against the step, with a vertical line where each world starts."""
    finite = [point for point in points if math.isfinite(point.value)]
    if len(finite) < 2:
        return _div(f"the {html.escape(metric)} is drawn as soon as it is logged twice", f"color:{_DIM}")
    low, high = min(point.value for point in finite), max(point.value for point in finite)
    last = max(steps or 1, *(point.step for point in points))

    def x(step: float) -> float:
        return round(_WIDTH * step / last, 1)

    def y(value: float) -> float:
        return round(_HEIGHT * (high - value) / ((high - low) or 1.0), 1)

    worlds = [x((a.step + b.step) / 2) for a, b in itertools.pairwise(points) if b.generation > a.generation]
    shapes = [f'<path d="M{at} 0V{_HEIGHT}" stroke="{_RED}" stroke-dasharray="4 3"/>' for at in worlds]
    thin = [*finite[: -1 : math.ceil(len(finite) / _WIDTH)], finite[-1]]  # a long run has more points than pixels
    line = " ".join(f"{x(point.step)},{y(point.value)}" for point in thin)
    shapes.append(f'<polyline points="{line}" fill="none" stroke="{_BLUE}" stroke-width="2"/>')
    note = f"{html.escape(metric)}, now {points[-1].value:.3g}, between {low:.3g} and {high:.3g}, up to step {last:,}"
    note += "; red lines: another world" if worlds else ""
    box = f'viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" width="100%" role="img" aria-label="{html.escape(metric)}"'
    return f"<svg {box}>{''.join(shapes)}</svg>{_div(note, f'color:{_DIM}')}"


def _div(content: str, look: str = "") -> str:
    return f'<div style="{look}">{content}</div>'
