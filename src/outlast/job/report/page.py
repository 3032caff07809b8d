"""The report as one self-contained HTML page: `outlast report -o html`. For the reasons, see docs/decisions/0065-one-page.md.

A job's text becomes markup in one place, the template `page.html`, where Jinja escapes it; plots are packed as gzip and base64.
The page's content security policy allows two scripts, identified by their digests: BokehJS, and `page.js`, which unpacks the
plots. `outlast ui` extends the template (`live.html`) with a third script that keeps its pages up to date.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from operator import itemgetter
from typing import Any

from outlast import __version__
from outlast.base import units
from outlast.base.errors import OutlastError, importing
from outlast.job import url_logins
from outlast.job.backend import Backend
from outlast.job.ledger import Event
from outlast.job.logs import LogLine
from outlast.job.report import comparison as compare
from outlast.job.report import goodput, printed
from outlast.job.report.goodput import Goodput
from outlast.job.report.history import History, longest, stays
from outlast.job.report.incidents import FAILURES
from outlast.job.report.series import METRICS, Series, metrics
from outlast.job.report.steps import Bucket
from outlast.job.status import JobStatus

_INCIDENTS = 200
"""Maximum number of incidents on a page. The costliest ones are shown."""
_ROWS = 60
_PERIODS, _PERIODS_OF_ALL = 2000, 20_000
"""Maximum number of periods in the job's timeline, and in the timelines of all workers together."""
TAIL = 40
"""Number of lines shown from the end of a log."""
_LOGS = 8
_TALL, _ROW = 640, 22
"""Height in pixels of a timeline with many workers, and of a row in a smaller timeline."""
_BLUE, _RED, _ORANGE, _GREEN, _PURPLE = _COLOURS = ("#4c78c8", "#d64545", "#e08a3c", "#2e9e5b", "#a05195")
_WHAT = {
    Bucket.TRAINING.value: "#2e9e5b",
    Bucket.REPLAYED.value: "#d64545",
    Bucket.DATA.value: "#e8c547",
    Bucket.SNAPSHOT.value: "#57b8d9",
    Bucket.CHECKPOINT.value: "#3d7ea6",
    Bucket.RENDEZVOUS.value: "#a05195",
    Bucket.RESTORE.value: "#4c72b0",
    Bucket.STARTUP.value: "#dd8452",
    Bucket.QUEUE.value: "#bbbbbb",
    Bucket.PODS.value: "#d0d0d0",
    Bucket.HANG.value: "#7a1f1f",
    Bucket.IDLE.value: "#eeeeee",
    Bucket.SUSPENDED.value: "#f7f7f7",
    "starting": "#f0c9a0",
}
_PARTS = ("detection", "reforming", "restoring", "again")
_LOST = {"detection": _RED, "re-forming": _PURPLE, "restoring": _BLUE, "repeated steps": _ORANGE}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run to report on. Its functions may raise OutlastError or OSError."""

    name: str
    run: str
    events: Iterable[Event]
    active: bool
    """True if a launcher or an operator drives the job. The account then extends up to now."""
    metrics: Callable[[], Iterable[str | bytes]]
    job_file: Callable[[], str]
    log: Callable[[int], Iterable[LogLine]]
    """`metrics`, `job_file` and `log` read the lines of metrics.jsonl, the job file without secrets, and the end of a worker's
    log."""
    ended: str = ""
    status: JobStatus | None = None

    def account(self, events: Iterable[Event]) -> Goodput:
        """Return the run's account for these events, up to the run's end or to now."""
        now = time.time() if self.active or next(iter(self.events), None) is None else None
        found = goodput.buckets(events, now)
        return dataclasses.replace(found, state=found.state or self.ended or None)


def of(place: Backend, status: JobStatus) -> Run:
    """Return the run to report on for the job with this status."""
    name, ended = status.name, str(status.state) if status.state.final else ""
    read, file = functools.partial(place.metrics, name), functools.partial(place.job_file, name)
    logs = functools.partial(place.logs, name, tail=TAIL)
    return Run(
        name, status.run, place.events(name), status.state.active, read, file, lambda worker: logs(worker=worker), ended, status
    )


def run(shown: Run) -> str:
    """Return a run's page as an HTML file. Raises OutlastError if bokeh is missing."""
    return built(shown).html()


def built(shown: Run) -> Page:
    """Build a run's page. Raises OutlastError if bokeh is missing."""
    past = History(shown.events)
    account, (logged, broken) = shown.account(past), metrics(shown.metrics())
    unread = {"the ledger": getattr(shown.events, "broken", 0) + past.unusable, "metrics.jsonl": broken}
    status, begun = shown.status, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(account.start))
    facts: dict[str, object] = {
        "state": account.state or "Running",
        "step": f"{status.step:,}{f' of {status.steps:,}' if status.steps else ''}" if status else "",
        "goodput": units.percent(account.goodput),
        "time": f"{units.human_seconds(account.wall_s)} since {begun}",
        **printed.counts(account),
        "run": shown.run,
        "versions": ", ".join(f"{name} {version}" for name, version in past.versions.items()),
        "digest of the code": past.code,
        "output": url_logins.hidden(status.output) if status else "",
        "not readable": ", ".join(f"{units.count(count, 'line')} of {place}" for place, count in unread.items() if count),
    }
    page = Page(shown.name, account.wall_s, max((each.x[-1] for each in logged.values()), default=0.0))
    page.facts = {name: text for name, text in facts.items() if text}
    _metrics(page, logged, past, account)
    _timeline(page, past, account)
    _goodput(page, account)
    _incidents(page, account)
    _errors(page, shown, past, account)
    _times(page, past, account)
    with contextlib.suppress(OutlastError, OSError):
        if text := url_logins.hidden(shown.job_file()):
            page.add("Job file", "As submitted, without secrets.", texts=[(shown.name, text)])
    return page


def comparison(rows: Sequence[compare.Run], logged: Sequence[Iterable[str | bytes]]) -> str:
    """Return the page that compares runs. `logged` has the lines of each run's metrics.jsonl. Raises OutlastError if bokeh is
    missing."""
    losses = [metrics(lines)[0].get("loss") for lines in logged]
    page = Page(", ".join(each.name for each in rows), steps=max((each.x[-1] for each in losses if each), default=0.0))
    names = [f"{number}. {each.name[:24]}" for number, each in enumerate(rows, 1)]
    colours = [colour for colour, _ in zip(itertools.cycle(_COLOURS), rows, strict=False)]
    seconds = [each.time_s for each in rows]
    page.plots.bars("times", dict(zip(names, seconds, strict=True)), [units.human_seconds(each) for each in seconds], colours)
    page.add(
        "Time to train",
        "From submission to the end.",
        plot="times",
        table=("All runs", compare.HEADINGS, map(compare.cells, rows)),
    )
    known = sorted((each.workers[0], each.speedup, each.efficiency) for each in rows if each.speedup and each.efficiency)
    if len(known) > 1:
        drawn = page.plots.plot("speedups", "workers", label="speed-up")
        first, speedup, _ = known[0]
        drawn.line([first, known[-1][0]], [speedup, speedup * known[-1][0] / first], color="grey", line_dash="dashed")
        at, up, share = zip(*known, strict=True)
        source = page.columns(workers=at, speedup=up, efficiency=share)
        drawn.line("workers", "speedup", source=source, color=_RED, line_width=2)
        marks = drawn.scatter("workers", "speedup", source=source, color=_RED, size=8)
        page.hover(drawn, marks, workers="@workers", speedup="@speedup{0.00}", efficiency="@efficiency{0.0 %}")
        note = "Beside the first run. The dashed line is an efficiency of 100 %: as many times faster as there are workers."
        cells = [(workers, f"{up:.2f}x", units.percent(share)) for workers, up, share in known]
        page.add("Speed-up", note, plot="speedups", table=("Efficiency", ("workers", "speed-up", "efficiency"), cells))
    for name, colour, loss in zip(names, colours, losses, strict=True):
        if loss is not None:
            drawn = page.plots.drawn.get("losses") or page.plots.plot("losses", "step")
            page.line(drawn, loss, colour, run=name, step="@x{0,0}")
    if any(losses):
        page.add("Loss", plot="losses", legend=dict(zip(names, colours, strict=True)))
    return page.html()


class Page:
    """A page under construction: its facts, sections and plots."""

    def __init__(self, title: str, seconds: float = 0.0, steps: float = 0.0) -> None:
        with importing("a page", "plots"):
            from outlast.job.report import figures
        self.title, self.facts = title, dict[str, object]()
        self.plots, self.sections = figures.Plots(seconds, steps), list[dict[str, object]]()
        self.columns, self.hover, self.line, self.workers = figures.columns, figures.hover, figures.line, figures.workers
        self.library = figures.javascript()

    def add(self, title: str, note: str = "", **more: Any) -> None:
        """Add a section. `more` may have a `plot` (its name), a `legend` (colours keyed by meaning), a `table` (caption,
        headings, rows), and `texts` with titles."""
        self.sections.append({"title": title, "note": note, **more})

    @functools.cached_property
    def packed(self) -> str:
        """The plots, packed for `page.js`."""
        return _packed(json.dumps(self.plots.packed(), allow_nan=False))

    def html(self, **more: object) -> str:
        """Return the page as an HTML file or, with more fields, as a page for `outlast ui`."""
        fields = {"title": self.title, "facts": self.facts, "sections": self.sections, "plots": self.packed, **more}
        return _rendered("live.html" if more else "page.html", self.library, fields)


def live(**fields: object) -> str:
    """Return a page for `outlast ui` that has no plots. `live.html` describes the fields."""
    return _rendered("live.html", "", fields)


@functools.lru_cache(4)  # BokehJS is large
def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _rendered(template: str, library: str, fields: Mapping[str, object]) -> str:
    """Render a page. This is the only place where text becomes markup."""
    import jinja2  # comes with bokeh

    names = [*(["live.js"] if template == "live.html" else []), *(["page.js"] if library else [])]
    scripts = [resources.files(__package__).joinpath(name).read_text() for name in names]
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in [*scripts, library])
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    files = jinja2.PackageLoader(__package__, "")
    environment = jinja2.Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template(template).render(
        fields,
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'",
        scripts=scripts,
        library=library and _packed(library),
        version=__version__,
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()  # for any terminal encoding, and for lone surrogates


def _thinned(series: Series) -> str:
    """Return a note about how many values each point stands for; empty if the series is short."""
    return f" Each point is the last of {series.per} values, with their range." if series.per > 1 else ""


def _table(over: str, series: Series, at: Callable[[float], str]) -> tuple[str, Sequence[str], Sequence[Sequence[object]]]:
    rows = [(at(x), f"{last:.6g}", f"{min(low, high):.6g}", f"{high:.6g}") for x, low, high, last in series.rows(_ROWS)]
    return f"{units.count(series.count, 'value')} in {units.count(len(rows), 'row')}", (over, "last", "least", "most"), rows


def _metrics(page: Page, logged: Mapping[str, Series], past: History, account: Goodput) -> None:
    steps = [past.step_at(t) for t, _ in past.worlds] + past.progress.last[-1:]
    sizes = [size for _, size in past.worlds]
    failures = [each for each in account.incidents if each.kind in FAILURES]
    lines = page.columns(x=[past.step_at(each.time) for each in failures], text=[each.text for each in failures])
    for number, (name, series) in enumerate(logged.items()):
        drawn = page.plots.plot(f"metric-{number}", "step")
        page.line(drawn, series, _BLUE, step="@x{0,0}")
        drawn.y_range.renderers = list(drawn.renderers)
        page.workers(drawn, steps, [*sizes, *sizes[-1:]][: len(steps)])
        page.hover(drawn, drawn.vspan("x", color=_RED, line_dash="dotted", source=lines), failure="@text", step="@x{0,0}")
        note = f"The first {METRICS} metrics are shown." if number == METRICS - 1 else ""
        note = note if number else "Over the steps; the size of the world in grey, failures in red."
        page.add(name, note + _thinned(series), plot=f"metric-{number}", table=_table("step", series, "{:,.0f}".format))


def _timeline(page: Page, past: History, account: Goodput) -> None:
    """Show what the job and each worker did. Workers that did the same thing at the same time share one shape."""
    place = {worker: number for number, worker in enumerate(sorted(past.presence))}
    job = longest(account.segments, _PERIODS)
    coarse = longest(account.segments, max(50, min(_PERIODS, _PERIODS_OF_ALL // max(1, len(place)))))
    shapes: dict[str, list[tuple[float, float, float, float, str]]] = {}
    spent, origin = dict.fromkeys(place, 0.0), account.start
    for each in job:
        shapes.setdefault(each.bucket.value, []).append((each.start - origin, each.end - origin, -1.9, -0.3, "job"))
    for (start, end, what), doing in stays(past, account, coarse).items():
        spent |= {worker: spent[worker] + end - start for worker in doing}
        for _, together in itertools.groupby(enumerate(doing), key=lambda pair: place[pair[1]] - pair[0]):
            who = [worker for _, worker in together]
            name = str(who[0]) if len(who) == 1 else f"{who[0]}–{who[-1]}"
            shapes.setdefault(what, []).append((start - origin, end - origin, place[who[0]], place[who[-1]] + 0.9, name))
    height = 130 + max(3, min(_ROW, _TALL // max(1, len(place)))) * len(place)
    drawn = page.plots.plot("timeline", "time", height, "worker", y_range=(len(place), -3))
    for what, shown in shapes.items():
        left, right, top, bottom, names = zip(*shown, strict=True)
        lasted = [end - start for start, end in zip(left, right, strict=True)]
        source = page.columns(left=left, right=right, top=top, bottom=bottom, lasted=lasted, worker=names)
        shape = drawn.quad("left", "right", "top", "bottom", source=source, color=_WHAT[what], line_color=None)
        page.hover(drawn, shape, what=what, worker="@worker", at="@left{00:00:00}", seconds="@lasted{0,0.00}")
    text = [each.text for each in account.incidents]
    colours = [_RED if each.kind in FAILURES else _ORANGE for each in account.incidents]
    source = page.columns(x=[each.time - origin for each in account.incidents], y=[-2.4] * len(text), text=text, c=colours)
    marks = drawn.scatter("x", "y", source=source, marker="inverted_triangle", size=9, color="c")
    page.hover(drawn, marks, incident="@text", at="@x{00:00:00}")
    labels = {
        -1.1: "job",
        **{number + 0.45: str(worker) for worker, number in place.items() if not number % (len(place) // 30 + 1)},
    }
    drawn.yaxis.ticker, drawn.yaxis.major_label_overrides = list(labels), labels
    drawn.ygrid.visible = False
    note = "Drag over a part to zoom in, or use the buttons. A worker without a colour is not there. Triangles are incidents."
    if left_out := len(account.segments) - len(job):
        note += f" {units.count(left_out, 'short period')} of {len(account.segments):,} are drawn as a part of others."
    rows = [(worker, len(past.presence[worker]), units.human_seconds(seconds)) for worker, seconds in spent.items()]
    table = units.count(len(rows), "worker"), ("worker", "changes", "time there"), rows
    page.add("Timeline", note, plot="timeline", legend={what: _WHAT[what] for what in _WHAT if what in shapes}, table=table)


def _goodput(page: Page, account: Goodput) -> None:
    spent = sorted(Bucket, key=lambda bucket: (bucket is not Bucket.TRAINING, -account.microseconds[bucket]))
    shown = [bucket for bucket in spent if account.microseconds[bucket]] or [Bucket.TRAINING]
    shares = [units.percent(account.share(bucket)) for bucket in shown]
    values = {bucket.value: account.seconds[bucket] for bucket in shown}
    page.plots.bars("goodput", values, shares, [_WHAT[name] for name in values])
    rows = [(name, f"{seconds:.3f}", share) for (name, seconds), share in zip(values.items(), shares, strict=True)]
    note = f"Every second since the submission has one cause; together they are {units.human_seconds(account.wall_s)}."
    page.add("Time by cause", note, plot="goodput", table=("Seconds by cause", ("cause", "seconds", "share"), rows))


def _incidents(page: Page, account: Goodput) -> None:
    free = {"seconds": 0.0, "up_to": False, "source": "", **{f"{part}_s": 0.0 for part in _PARTS}}
    every = [{**each, "lost": each["lost"] or free} for each in printed.as_json(account)["incidents"]]
    found = sorted(
        heapq.nlargest(_INCIDENTS, enumerate(every, 1), key=lambda each: each[1]["lost"]["seconds"]), key=itemgetter(0)
    )
    headings = ("no.", "at", "incident", "seconds lost", *_LOST, "number of these", "restored from")
    rows, parts = [], {part: [each["lost"][f"{part}_s"] for _, each in found] for part in _PARTS}
    for number, each in found:
        lost = each["lost"]
        seconds = f"{'up to ' if lost['up_to'] else ''}{lost['seconds']:.2f}", *(f"{lost[f'{part}_s']:.2f}" for part in _PARTS)
        rows.append((number, printed.at(each["time"] - account.start), each["text"], *seconds, each["replayed"], lost["source"]))
    table = units.count(len(rows), "incident"), headings, rows
    if not any(map(any, parts.values())):  # training has not stopped, or has not continued
        return page.add("Incidents", table=table) if rows else None
    drawn = page.plots.plot("lost", "incident", label="seconds lost")
    source = page.columns(incident=[number for number, _ in found], text=[each["text"] for _, each in found], **parts)
    for bars in drawn.vbar_stack([*_PARTS], x="incident", width=0.7, color=[*_LOST.values()], source=source):
        page.hover(drawn, bars, incident="@incident: @text", lost=" + ".join(f"@{part}{{0.00}} s" for part in _PARTS))
    note = printed.counts(account).get("lost", "")
    note += f" The {_INCIDENTS} that cost most of {len(every):,} are shown." if len(rows) < len(every) else ""
    page.add("Incidents", note, plot="lost", legend=_LOST, table=table)


def _errors(page: Page, shown: Run, past: History, account: Goodput) -> None:
    """Show errors, each with the last output of its process, and the ends of the failed workers' logs."""
    texts = [(f"{printed.at(t - account.start)} {reason}", text) for t, _, reason, text in past.errors if text]
    if not texts and shown.status and (last := shown.status.failure):
        texts = [(last.reason, last.traceback or last.log_tail)]
    for worker in list(dict.fromkeys(worker for _, worker, _, _ in past.errors if worker is not None))[:_LOGS]:
        with contextlib.suppress(OutlastError, OSError):
            texts.append((f"End of the log of worker {worker}", "\n".join(line.text for line in shown.log(worker))))
    if texts := [(title, text) for title, text in texts if text]:
        page.add("First errors", texts=texts)


def _times(page: Page, past: History, account: Goodput) -> None:
    steps = "Step times", "As rank 0 reports them, without the first step of each world."
    for name, (title, note), series in (("steps", steps, past.times), ("saves", ("Checkpoints", ""), past.saves)):
        used = {what: each for what, each in series.items() if each.count}
        legend = dict(zip(used, (_BLUE, _ORANGE, _GREEN), strict=False))
        for what, each in used.items():
            each.x = [x - account.start for x in each.x]
            drawn = page.plots.drawn.get(name) or page.plots.plot(name, "time", label="seconds")
            page.line(drawn, each, legend[what], what=what, at="@x{00:00:00}")
        for first in [*used.values()][:1]:
            page.add(title, note + _thinned(first), plot=name, legend=legend, table=_table("at", first, printed.at))
