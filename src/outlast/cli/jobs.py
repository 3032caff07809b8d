"""`outlast list | status | logs | scale | suspend | resume | cancel`: look at jobs and steer them."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import show, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import NameArgument
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.backends import Backend, LogLine
    from outlast.status import JobStatus

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
"""ANSI colours of the workers' prefixes."""

_LOOK_S = 0.3
"""How often `status -w` looks."""


def list_(ctx: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the jobs of this directory, the newest last.

    \b
    Examples:
      outlast list
      outlast list -o json
    """
    statuses = which.backend(ctx).list()
    if output is not Output.TABLE:
        show.data([status.model_dump(mode="json") for status in statuses], output)
    elif statuses:
        print(show.jobs(statuses, time.time()))
    else:
        print("no job has been run here; start one with `outlast run FILE`, in this directory", file=sys.stderr)


def status(
    ctx: typer.Context,
    name: NameArgument = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on showing it until the job ends.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where a job stands.

    That is its world, step, newest checkpoint, workers, warnings and last failure.

    \b
    Examples:
      outlast status
      outlast status cifar10 -w
      outlast status cifar10 -o json
    """
    place = which.backend(ctx)
    name = which.job(place, name)
    if watch:
        _watch(place, name, output)
    elif output is Output.TABLE:
        print(show.page(place.status(name), time.time()))
    else:
        show.data(place.status(name).model_dump(mode="json"), output)


def _watch(place: Backend, name: str, output: Output) -> None:
    """On a terminal the page, again and again; otherwise a line, or a document, for every change."""
    from outlast.cli import view

    if output is Output.TABLE and sys.stdout.isatty():
        from outlast.cli import live

        live.page(lambda: place.status(name), every_s=_LOOK_S)
        return
    old: JobStatus | None = None
    while True:
        new = place.status(name)
        if output is Output.TABLE:
            for sentence in show.changes(old, new):
                print(sentence, flush=True)
        elif old != new:
            if output is Output.JSON:
                print(json.dumps(new.model_dump(mode="json")))
            else:
                print("---")
                show.data(new.model_dump(mode="json"), output)
            sys.stdout.flush()
        if view.ended(new):
            return
        old = new
        time.sleep(_LOOK_S)


def prefix(worker: int, *, colour: bool) -> str:
    """`worker-0 | `, what stands before each line of a worker."""
    text = f"worker-{worker} | "
    return f"\033[{_COLOURS[worker % len(_COLOURS)]}m{text}\033[0m" if colour else text


def logs(
    ctx: typer.Context,
    name: NameArgument = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for a job that has not started; go on until it ends.")
    ] = False,
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this worker, without prefixes.")] = None,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Begin with the last N lines of each worker.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines in which this is found.")] = None,
) -> None:
    """Print what the workers wrote, all of them merged.

    NAME may be a job file, or the URL of a job's output in a store: logs of a machine that is gone are read there.

    \b
    Examples:
      outlast logs -f
      outlast logs cifar10 --worker 1 --tail 20
      outlast logs --grep 'loss|Error'
      outlast logs s3://bucket/runs/cifar10
    """
    try:
        wanted = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise OutlastError(f"--grep {grep!r} is not a regular expression: {error}") from error
    colour = sys.stdout.isatty()

    def text(line: LogLine) -> str:
        return line.text if worker is not None else prefix(line.worker, colour=colour) + line.text

    if url := which.in_store(name):
        from outlast.backends import stored

        if follow:
            raise OutlastError(f"{url} cannot be followed; give the name of the job, in the directory that it runs in")
        lines = stored.logs(url, worker=worker, tail=tail)
    else:
        place = which.backend(ctx)
        lines = place.logs(which.job(place, name), worker=worker, follow=follow, tail=tail)
    for line in lines:
        if wanted is None or wanted.search(line.text):
            print(text(line), flush=follow)


def scale(ctx: typer.Context, words: Annotated[list[str], typer.Argument(hidden=True)]) -> None:
    """Change the number of workers of a job.

    It stays within workers.min and max of the job file. The training saves first and loses no step.

    \b
    Examples:
      outlast scale 3
      outlast scale cifar10 1
    """
    place = which.backend(ctx)
    name, number = which.and_last(place, words, "N")
    if not number.isdecimal():
        raise typer.BadParameter(f"{number!r} is not a number of workers")
    place.scale(name, int(number))
    print(f"{name} is to have {show.count(int(number), 'worker')}")


def suspend(ctx: typer.Context, name: NameArgument = None) -> None:
    """Save, and give the workers back until `outlast resume`.

    \b
    Examples:
      outlast suspend cifar10
    """
    place = which.backend(ctx)
    name = which.job(place, name)
    place.suspend(name)
    print(f"{name} saves and is suspended; go on with: outlast resume {name}")


def resume(ctx: typer.Context, name: NameArgument = None) -> None:
    """Go on with a suspended or interrupted job.

    It runs in the background.

    \b
    Examples:
      outlast resume cifar10
    """
    place = which.backend(ctx)
    name = which.job(place, name)
    place.resume(name)
    print(f"{name} goes on; look at it with: outlast status {name}")


def cancel(ctx: typer.Context, name: NameArgument = None) -> None:
    """End a job for good. What is saved stays.

    \b
    Examples:
      outlast cancel cifar10
    """
    place = which.backend(ctx)
    name = which.job(place, name)
    place.cancel(name)
    print(f"{name} is cancelled; its output stays in {place.output(name)}")
