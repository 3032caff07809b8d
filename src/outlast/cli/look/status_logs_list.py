"""`outlast list | status | logs`: the state of jobs, and their output."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from outlast.base import backoff
from outlast.base.errors import OutlastError
from outlast.cli import find_job, status_page, tables, terminal
from outlast.cli.find_job import ContextOption, EverywhereOption, NameArgument, NamespaceOption, SelectorOption
from outlast.cli.tables import ListOutput, ListOutputOption, Output, OutputOption
from outlast.job import logs as job_logs

if TYPE_CHECKING:
    from outlast.client import Run
    from outlast.job.backend import Backend
    from outlast.job.logs import LogLine
    from outlast.job.status import JobStatus

_DOCUMENTS = (ListOutput.JSON, ListOutput.YAML)


def list_(
    ctx: typer.Context,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Then a line for each change, until Ctrl-C.")] = False,
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    selector: SelectorOption = "",
    context: ContextOption = None,
    output: ListOutputOption = ListOutput.TABLE,
) -> None:
    """List the jobs of this directory, or of a cluster.

    The newest job comes last.

    \b
    Examples:
      outlast list
      outlast list -n team-a -w
      outlast list -A -l team=a -o wide
      outlast list -n team-a -l sweep=3 -o name | xargs -n 1 outlast cancel -n team-a
    """
    place = find_job.place(ctx, None, namespace, context, everywhere=everywhere, selector=selector)
    statuses = place.list()
    none = "" if statuses else find_job.no_job(place)
    if none and (watch or output not in _DOCUMENTS):
        print(none, file=sys.stderr)
    if watch:
        _watch_list(place, statuses, output, namespaced=everywhere)
    elif output in _DOCUMENTS:
        tables.data([status.model_dump(mode="json") for status in statuses], output)
    elif statuses:
        print(status_page.jobs(statuses, time.time(), output, namespaced=everywhere))


def _watch_list(place: Backend, statuses: Sequence[JobStatus], output: ListOutput, *, namespaced: bool) -> NoReturn:
    def shown(status: JobStatus) -> dict[str, object]:
        if output in _DOCUMENTS:
            return status.model_dump(mode="json")
        return status_page.row(status, status.submitted, output, namespaced=namespaced)  # a new age is not a change

    known: dict[tuple[str, str], tuple[JobStatus, dict[str, object]]] = {}
    begun = False
    while True:
        present = {(status.namespace, status.name): (status, shown(status)) for status in statuses}
        gone = [each.model_copy(update={"reason": "it is gone"}) for key, (each, _) in known.items() if key not in present]
        new = {key: status for key, (status, facts) in present.items() if key not in known or known[key][1] != facts}
        changed = [*new.values(), *gone]
        if output in _DOCUMENTS:
            for status in changed:
                tables.data(status.model_dump(mode="json"), output, changed=True)
        elif changed:
            others = [status for key, (status, _) in present.items() if key not in new]  # for the column widths
            lines = status_page.jobs([*others, *changed], time.time(), output, namespaced=namespaced).splitlines()
            print("\n".join(lines[-len(changed) :] if begun else lines), flush=True)
            begun = True
        known = present
        time.sleep(place.poll_s)
        statuses = backoff.until_answered(place.list, terminal.say, every_s=place.poll_s)


def status(
    ctx: typer.Context,
    name: NameArgument = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep showing it until the job ends.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where a job stands: step, workers, checkpoint, failure.

    \b
    Examples:
      outlast status
      outlast status cifar10 -w
      outlast status cifar10 -n team-a
      outlast status cifar10 -o json
    """
    run = find_job.run(ctx, name, namespace, context)
    if watch:
        _watch(run, output)
    elif output is Output.TABLE:
        print(status_page.page(run.status, time.time()))
    else:
        tables.data(run.status.model_dump(mode="json"), output)


def _watch(run: Run, output: Output) -> None:
    """Show a live page on a terminal. Elsewhere, print a line or a document for every change."""
    if output is Output.TABLE and terminal.interactive(sys.stdout):
        from outlast.cli import live_panel

        live_panel.page(lambda: run.status, every_s=run.place.poll_s)
        return
    old: JobStatus | None = None
    new = run.status
    while True:
        if output is Output.TABLE:
            for sentence in status_page.changes(old, new):
                print(sentence, flush=True)
        elif old != new:
            tables.data(new.model_dump(mode="json"), output, changed=True)
        if not new.state.active:
            return
        old = new
        time.sleep(run.place.poll_s)
        new = backoff.until_answered(lambda: run.status, terminal.say, every_s=run.place.poll_s)


def logs(
    ctx: typer.Context,
    name: NameArgument = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for a job that has not started, and continue until it ends.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Only the lines of each worker's attempt before its last one.")
    ] = False,
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this worker, without prefixes.")] = None,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Start with the last N lines of each worker.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="In a cluster: only lines no older than this, such as 10m.")
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Print the logs of the workers.

    Log lines on this machine have no timestamps, so existing lines are printed one worker after the other, and new lines as they
    are written. In a cluster, -f waits for pods, says why they do not start, and follows restarts and new workers. NAME may be a
    job file, or the URL of a job's output in a store, which has the logs of machines that are gone.

    -p shows why the last attempt was necessary: an attempt ends with a failure, a change of the workers or an interruption.

    \b
    Examples:
      outlast logs -f
      outlast logs cifar10 --worker 1 --tail 20
      outlast logs cifar10 -p --tail 50
      outlast logs cifar10 -n team-a -f --since 10m
      outlast logs --grep 'loss|Error'
      outlast logs s3://bucket/runs/cifar10
    """
    if previous and follow:
        raise OutlastError("the log of an attempt that has ended cannot be followed; leave out -f or -p")
    try:
        pattern = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise OutlastError(f"--grep {grep!r} is not a regular expression: {error}") from error
    if url := find_job.in_store(name):
        from outlast.storage.runs import output

        if follow or since:
            raise OutlastError("logs in a store have no times and cannot be followed; give the name of the job, where it runs")
        lines: Iterable[LogLine] = output.logs(url, worker=worker, tail=None if previous else tail)
        if previous:
            lines = job_logs.previous_attempt(lines, tail=tail)
    else:
        since_s = None if since is None else find_job.duration("--since", since).total_seconds()
        run = find_job.run(ctx, name, namespace, context)
        lines = run.logs(worker=worker, follow=follow, tail=tail, previous=previous, since=since_s, say=terminal.say)
    for line in terminal.Folded().take(lines) if follow and worker is None else lines:
        if pattern is None or pattern.search(line.text):
            terminal.log([line], prefixed=worker is None)
