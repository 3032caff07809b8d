"""`outlast report`: the time of a run by cause, or several runs side by side."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, tables_and_pages, terminal
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.cli.tables_and_pages import Output, OutputOption
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.job.ledger import Event
    from outlast.job.report.goodput import Goodput

NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME",
        help="Name of the job; several are compared. Default: the only unfinished one, else the newest; in a cluster the only.",
        autocompletion=completion.jobs,
    ),
]


def report(
    ctx: typer.Context,
    names: NamesArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the comparison of several runs, too: .svg, .png or .pdf.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where the time of a job went, or compare several.

    The report shows the share of training, the time lost to replayed steps, waiting for data, checkpoints and recovery, and a
    list of incidents. The report of a job in a cluster needs its output in a store. NAME may be a job file, or the URL of a job's
    output in a store.

    If several names are given, each job is compared with the first: time from submission to the end, speed-up, efficiency (the
    speed-up divided by the ratio of workers), speed, goodput and the last loss.

    \b
    Examples:
      outlast report
      outlast report cifar10 -o json
      outlast report cifar10 -n team-a
      outlast report s3://bucket/runs/cifar10
      outlast report cifar10-1 cifar10-2 cifar10-4 --plot scaling.svg
    """
    from outlast.job.report import comparison, printed

    if names is not None and len(names) > 1:
        _compare(ctx, names, namespace, context, plot, output)
        return
    if plot is not None:
        raise OutlastError(f"--plot {plot} draws several runs; name two or more")
    job = _job(ctx, names[0] if names else None, namespace, context)
    account = job.account()
    if output is not Output.TABLE:
        sizes = comparison.sizes(job.events)
        tables_and_pages.data({"name": job.name, "run": job.run, "workers": list(sizes), **printed.as_json(account)}, output)
    elif terminal.colours(sys.stdout):
        console = terminal.console()
        console.print(printed.rich(account, job.name, console.width))
    else:
        sys.stdout.write(printed.plain(account, job.name))


def _compare(
    ctx: typer.Context, names: list[str], namespace: str | None, context: str | None, plot: Path | None, output: Output
) -> None:
    from outlast.job.report import comparison

    if plot is not None:
        from outlast.job.report import plot as plots

        plots.check(plot)
    jobs = [_job(ctx, name, namespace, context) for name in names]
    rows = comparison.compared([comparison.run(job.name, job.account(), job.events, job.metrics()) for job in jobs])
    if output is Output.TABLE:
        print(tables_and_pages.table(comparison.HEADINGS, map(comparison.cells, rows)))
    else:
        tables_and_pages.data([comparison.as_json(row) for row in rows], output)
    if plot is not None:
        plots.write(plot, rows)
        terminal.say(f"drawn to {plot}")


@dataclasses.dataclass(frozen=True)
class _Job:
    """The input of a report."""

    name: str
    run: str
    events: Iterable[Event]
    active: bool
    """True if a launcher or an operator drives the job. Its account then extends to now."""
    metrics: Callable[[], Iterable[str | bytes]]
    """Function that reads the lines of the job's metrics.jsonl."""
    ended: str = ""
    """The final state of the job, if known."""

    def account(self) -> Goodput:
        """Return the account of the job's time up to its end, or to now."""
        from outlast.job.report import goodput

        now = time.time() if self.active or next(iter(self.events), None) is None else None
        found = goodput.buckets(self.events, now)
        return dataclasses.replace(found, state=found.state or self.ended or None)


def _job(ctx: typer.Context, name: str | None, namespace: str | None, context: str | None) -> _Job:
    """Find the job with this name, or with its output at this URL."""
    if url := find_job.in_store(name):
        from outlast.storage.runs import output

        place, record = find_job.stored_run(url)
        stored, ended = output.events(place), record.state if record.ended else ""
        first: Event = next(iter(stored), {})
        if record.submitted < first.get("t", 0.0):
            stored = stored.merged([{"t": record.submitted, "kind": "submitted", "source": "run", "run": record.run}])
        return _Job(record.job, record.run, stored, not ended, functools.partial(output.metrics, place), ended)
    backend, name = find_job.resolve(ctx, name, namespace, context)
    status, events = backend.status(name), backend.events(name)
    metrics = functools.partial(_metrics, backend.output(name))
    if find_job.in_cluster(backend) is None:
        return _Job(name, status.run, events, status.launcher is not None, metrics)
    return _Job(name, status.run, events, status.state.active, metrics, str(status.state) if status.state.final else "")


def _metrics(output: Path | str) -> Iterable[str | bytes]:
    """Return the lines of metrics.jsonl in a job's output, which is a directory or a URL."""
    if isinstance(output, str):
        from outlast.storage import store
        from outlast.storage.runs import output as stored

        return stored.metrics(store.open_(output)) if "://" in output else ()
    try:
        return (output / contract.METRICS).read_bytes().splitlines()
    except OSError:  # none logged, or not on this machine
        return ()
