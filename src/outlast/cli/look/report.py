"""`outlast report`: where a run's time went, or several runs side by side."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, tables
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.cli.tables import Output
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.job.ledger import Event
    from outlast.job.report.page import Run


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
    output: Annotated[
        Literal["table", "json", "yaml", "html"], typer.Option("-o", "--output", help="Output format; html is a page with plots.")
    ] = "table",
) -> None:
    """Show where the time of a job went, or compare several jobs.

    The report shows the share of training, the time lost to replayed steps, waiting for data, checkpoints and recovery, and a
    list of incidents. For a job in a cluster, the job's output must be in a store. NAME may be a job file, or the URL of a job's
    output in a store.

    With `-o html`, the report is one self-contained page for a browser, with loss and other metrics, a timeline of the workers,
    the cost of each failure, first errors, step times, checkpoints and the job file.

    If several names are given, each job is compared with the first: time from submission to the end, speed-up, efficiency (the
    speed-up divided by the ratio of workers), speed, goodput and the last loss.

    \b
    Examples:
      outlast report
      outlast report cifar10 -o json
      outlast report cifar10 -o html > cifar10.html
      outlast report cifar10 -n team-a
      outlast report s3://bucket/runs/cifar10
      outlast report cifar10-1 cifar10-2 cifar10-4 -o html > scaling.html
    """
    from outlast.job.report import comparison, page, printed

    if output == "html" and sys.stdout.isatty():
        raise OutlastError(
            "-o html writes a page, which a browser shows; name a file for it: outlast report -o html > report.html"
        )
    if names is not None and len(names) > 1:
        jobs = [_job(ctx, name, namespace, context) for name in names]
        rows = comparison.compared([comparison.run(job.name, job.account(job.events), job.events, job.metrics()) for job in jobs])
        if output == "html":
            sys.stdout.write(page.comparison(rows, [job.metrics() for job in jobs]))
        elif output == "table":
            print(tables.table(comparison.HEADINGS, map(comparison.cells, rows)))
        else:
            tables.data([comparison.as_json(row) for row in rows], Output(output))
        return
    job = _job(ctx, names[0] if names else None, namespace, context)
    if output == "html":
        sys.stdout.write(page.run(job))
        return
    account = job.account(job.events)
    if output == "table":
        sys.stdout.write(printed.plain(account, job.name))
    else:
        sizes = comparison.sizes(job.events)
        document = {"name": job.name, "run": job.run, "workers": list(sizes), **printed.as_json(account)}
        tables.data(document, Output(output))


def _job(ctx: typer.Context, name: str | None, namespace: str | None, context: str | None) -> Run:
    from outlast.job.report import page

    if url := find_job.in_store(name):
        from outlast.storage.runs import output

        place, record = find_job.stored_run(url)
        stored, ended = output.events(place), record.state if record.ended else ""
        first: Event = next(iter(stored), {})
        if record.submitted < first.get("t", 0.0):
            stored = stored.merged([{"t": record.submitted, "kind": "submitted", "source": "run", "run": record.run}])
        return page.Run(
            record.job,
            record.run,
            stored,
            not ended,
            functools.partial(output.metrics, place),
            lambda: place.get(contract.JOB_FILE).decode(errors="replace"),
            lambda worker: output.logs(place.url, worker=worker, tail=page.TAIL),
            ended,
        )
    run = find_job.run(ctx, name, namespace, context)
    return page.of(run.place, run.status)
