"""Plots for a page, drawn by Bokeh in the browser. This is the only module that imports bokeh, and `report.page` uses it. Bokeh
does not render text as markup. `page.js` replaces the placeholders `_INK` and `_LINE` with colours for a light or a dark page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from bokeh.document import Document
from bokeh.models import AdaptiveTicker, BasicTicker, ColumnDataSource, HoverTool, LinearAxis, NumeralTickFormatter, Range1d
from bokeh.plotting import figure
from bokeh.resources import Resources

from outlast.job.report.series import Series

_INK, _LINE = "#0a0b0c", "#0a0b0d"
_TICKS = 4
"""Number of labels on a horizontal axis, few enough for a phone."""
_TOOLS = "xpan,xbox_zoom,xwheel_zoom,xzoom_in,xzoom_out,reset"


class Plots:
    """A page's plots, keyed by name. All plots over `time`, in seconds since the run started, zoom together, and so do all plots
    over `step`."""

    def __init__(self, seconds: float, steps: float) -> None:
        self.drawn: dict[str, Any] = {}
        self._shared = {over: Range1d(start=0, end=end or 1, bounds="auto") for over, end in (("time", seconds), ("step", steps))}

    def plot(self, name: str, over: str, height: int = 240, label: str = "", **more: Any) -> Any:
        """Add a figure. `over` is its horizontal axis."""
        if over in self._shared:
            more["x_range"] = self._shared[over]
        drawn: Any = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, toolbar_location="above", **more)
        drawn.toolbar.logo = drawn.background_fill_color = drawn.border_fill_color = drawn.outline_line_color = None
        drawn.toolbar.active_drag = drawn.tools[1]
        drawn.xaxis.axis_label, drawn.yaxis.axis_label = over, label
        drawn.xaxis.formatter = NumeralTickFormatter(format="00:00:00" if over == "time" else "0,0")
        drawn.xaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=_TICKS)
        if over == "time":
            drawn.xaxis.ticker = AdaptiveTicker(base=60, mantissas=[1, 2, 5, 10, 15, 30], desired_num_ticks=_TICKS)
        drawn.grid.grid_line_color, drawn.grid.grid_line_alpha = _LINE, 0.25
        _style(drawn)
        self.drawn[name] = drawn
        return drawn

    def bars(self, name: str, values: Mapping[str, float], labels: Sequence[str], colours: Sequence[str]) -> None:
        """Add horizontal bars of seconds, with labels at their ends."""
        ends = 0, 1.3 * (max(values.values(), default=0) or 1)
        drawn = self.plot(name, "seconds", 80 + 28 * len(values), y_range=[*values][::-1], x_range=ends)
        source = columns(name=[*values], value=[*values.values()], label=[*labels], colour=[*colours])
        drawn.hbar("name", 0.7, "value", source=source, color="colour")
        look = {"text_baseline": "middle", "x_offset": 6, "text_font_size": "12px", "text_color": _INK}
        drawn.text("value", "name", "label", source=source, **look)
        drawn.ygrid.visible = False

    def packed(self) -> dict[str, Any]:
        """Return the plots in the form that `page.js` draws."""
        document = Document()
        with document.models.freeze():  # not earlier, and frozen: a document inspects all its plots whenever one changes
            for drawn in self.drawn.values():
                document.add_root(drawn)
        roots = {drawn.id: name for name, drawn in self.drawn.items()}
        item = {"docid": "plots", "roots": roots, "root_ids": list(roots)}
        return {"documents": {"plots": document.to_json(deferred=False)}, "items": [item], "ink": _INK, "line": _LINE}


def line(drawn: Any, series: Series, colour: str, **tips: str) -> None:
    """Draw the last value of each point in a series, and the range if a point stands for several values."""
    thinned = series.per > 1
    range_ = {"low": _finite(series.low), "high": _finite(series.high)} if thinned else {}
    source = columns(x=np.array(series.x, float), last=_finite(series.last), **range_)
    if thinned:
        drawn.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.25)
        tips |= {"least": "@low", "most": "@high"}
    if len(series.x) <= 50:
        drawn.scatter("x", "last", source=source, color=colour, size=5)
    hover(drawn, drawn.line("x", "last", source=source, color=colour, line_width=1.5), mode="vline", last="@last", **tips)


def workers(drawn: Any, steps: Sequence[float], sizes: Sequence[float]) -> None:
    """Draw the world sizes behind a metric, on a separate axis."""
    drawn.extra_y_ranges = {"workers": Range1d(start=0, end=1.2 * max(sizes, default=1) or 1)}
    drawn.add_layout(LinearAxis(y_range_name="workers", axis_label="workers", ticker=BasicTicker(min_interval=1)), "right")
    drawn.step(steps, sizes, mode="after", y_range_name="workers", color=_LINE, line_width=2, alpha=0.8)
    _style(drawn)


def hover(drawn: Any, shape: Any, mode: Literal["mouse", "vline"] = "mouse", **tips: str) -> None:
    """Show a shape's values under the pointer."""
    drawn.add_tools(HoverTool(renderers=[shape], mode=mode, tooltips=list(tips.items())))


def columns(**values: Any) -> ColumnDataSource:
    return ColumnDataSource(values)


def javascript() -> str:
    """Return the source text of BokehJS, without widgets, tables, WebGL or MathJax."""
    return str(Resources(mode="inline", components=["bokeh"]).js_raw[0])


def _finite(values: Sequence[float]) -> Any:
    """Return the values in single precision, with gaps for values that are not finite or do not fit."""
    with np.errstate(over="ignore"):
        array = np.array(values).astype(np.float32)
    array[~np.isfinite(array)] = np.nan
    return array


def _style(drawn: Any) -> None:
    for axis in drawn.axis:
        axis.axis_label_text_color = axis.major_label_text_color = _INK
        axis.axis_line_color = axis.major_tick_line_color = _LINE
        axis.minor_tick_line_color = None
