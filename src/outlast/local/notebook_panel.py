"""Shows jobs in a notebook while they train, and their reports.

    from outlast import notebooks

    notebooks.follow("gpt")     # a panel that updates until the job has ended
    notebooks.draw("gpt")       # the page of `outlast report -o html`, with plots
    notebooks.report("gpt")     # its figures as a dict

As in `outlast status`, only jobs in the notebook's directory are visible. In a terminal, the panel is a line of text.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import html
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base.errors import OutlastError
from outlast.job.report import panel

if TYPE_CHECKING:
    from outlast.job.backend import Backend
    from outlast.local.backend import LocalBackend


def follow(name: str, *, until: int | None = None, metric: str = "loss") -> None:
    """Show a job in a panel that updates until the job has reached step `until`, or has ended. `metric` names the metric to plot.
    The Stop button ends this call, not the job. Raises OutlastError if the job has ended without success, so that later cells do
    not run without its result."""
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
    """Return where the job's time went, and what its failures cost, as `outlast report -o json` prints them."""
    from outlast.job.report import page, printed

    run = page.of(place := _here(), place.status(name))
    return printed.as_json(run.account(run.events))


def draw(name: str) -> None:
    """Show the page of `outlast report -o html`, or plain text where HTML cannot be shown. Needs bokeh."""
    from IPython import display

    from outlast.job.report import page, printed

    run = page.of(place := _here(), place.status(name))
    look = "width: 100%; height: 45rem; border: 0"
    frame = f'<iframe sandbox="allow-scripts" title="report" style="{look}" srcdoc="{html.escape(page.run(run))}"></iframe>'
    display.display({"text/html": frame, "text/plain": printed.plain(run.account(run.events), name)}, raw=True)


class Panel:
    """A job at one point in time, for a page or a terminal."""

    def __init__(self, place: Backend, name: str, metric: str) -> None:
        self.status, self._metric = place.status(name), metric
        lines = place.metrics(name) if isinstance(place.output(name), Path) else ()
        self._points = panel.points(lines, metric)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Panel) and (self.status, self._points) == (other.status, other._points)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return panel.text(self.status, self._metric)

    def _repr_html_(self) -> str:
        return panel.page(self.status, self._points, self._metric, time.time())


def _here() -> LocalBackend:
    from outlast.local import backend, state_dir

    return backend.LocalBackend(state_dir.root())
