"""Jobs in a notebook: follow a job while it trains, and show its report.

    from outlast import notebooks

    notebooks.follow("gpt")     # a panel that updates until the job has ended
    notebooks.draw("gpt")       # the job's loss, and its time by cause
    notebooks.report("gpt")     # the same as a dict

As in `outlast status`, only jobs of the notebook's directory are visible. In a terminal, the panel is a line of text.
`notebooks.jupyter` starts JupyterLab for `outlast notebook`, and `first.ipynb` is the first notebook.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base.errors import OutlastError

if TYPE_CHECKING:
    from outlast.job.backend import Backend
    from outlast.job.report.goodput import Goodput
    from outlast.job.status import JobStatus
    from outlast.local.backend import LocalBackend
    from outlast.local.notebooks.panel import Point


def follow(name: str, *, until: int | None = None, metric: str = "loss") -> None:
    """Show a job in a panel that updates until the job has reached step `until`, or has ended.

    `metric` is the metric to draw: a name that the training passes to `run.log`. The Stop button ends this call, not the job.
    Raises OutlastError if the job has failed or was cancelled, so that later cells do not run without its result.
    """
    from IPython import display

    place = _here()
    shown = Panel(place, name, metric)
    handle = display.display(shown, display_id=True)
    while shown.status.state.active and (until is None or shown.status.step < until):
        time.sleep(place.poll_s)
        last, shown = shown, Panel(place, name, metric)
        if handle is not None and shown != last:
            handle.update(shown)
    status = shown.status
    if not status.state.active and status.state != "Succeeded":
        raise OutlastError(f"{name} has ended: {status.state}: {status.reason}; its log: outlast logs {name}")


def report(name: str) -> dict[str, Any]:
    """Return the job's time by cause, and the cost of its failures, as `outlast report -o json` prints them."""
    from outlast.job.report import printed

    return printed.as_json(_account(_here(), name))


def draw(name: str) -> None:
    """Draw the loss of a job over its steps, and its time by cause. Needs matplotlib."""
    from IPython import display

    from outlast.local.notebooks import charts

    place = _here()
    figure = charts.story(_account(place, name), _points(place, name, "loss"), _points(place, name, "val_loss"))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=160)
    display.display(display.Image(picture.getvalue(), width=820))


class Panel:
    """A job at one point in time, for a page or a terminal."""

    def __init__(self, place: Backend, name: str, metric: str) -> None:
        self.status: JobStatus = place.status(name)
        self._metric, self._points = metric, _points(place, name, metric)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Panel) and (self.status, self._points) == (other.status, other._points)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        from outlast.local.notebooks import panel

        return panel.text(self.status, self._metric)

    def _repr_html_(self) -> str:
        from outlast.local.notebooks import panel

        return panel.page(self.status, self._points, self._metric, time.time())


def _here() -> LocalBackend:
    from outlast.local import backend, state_dir

    return backend.LocalBackend(state_dir.root())


def _points(place: Backend, name: str, metric: str) -> Sequence[Point]:
    from outlast.job import contract
    from outlast.local.notebooks import panel

    output = place.output(name)
    try:
        return panel.points((output / contract.METRICS).read_bytes().splitlines(), metric) if isinstance(output, Path) else ()
    except FileNotFoundError:  # nothing logged yet
        return ()


def _account(place: LocalBackend, name: str) -> Goodput:
    from outlast.job.report import goodput

    return goodput.buckets(place.events(name), time.time() if place.status(name).launcher is not None else None)
