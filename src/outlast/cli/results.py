"""`outlast report | evaluate`: what a run has cost and what its model can do."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from outlast.cli import show, terminal, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import ContextOption, NameArgument, NamespaceOption


def report(ctx: typer.Context, name: NameArgument = None, output: OutputOption = Output.TABLE) -> None:
    """Show where the time of a job went.

    How much was training, and how much was lost to replayed steps, checkpoints, recovery; and what happened when.

    \b
    Examples:
      outlast report
      outlast report cifar10 -o json
    """
    from outlast.report import goodput, text

    place = which.backend(ctx)
    name = which.job(place, name)
    status, events = place.status(name), place.events(name)
    driven = status.launcher is not None or next(iter(events), None) is None
    account = goodput.buckets(events, time.time() if driven else None)
    if output is not Output.TABLE:
        show.data({"name": name, "run": status.run, **text.as_json(account)}, output)
    elif terminal.colours(sys.stdout):
        console = terminal.console()
        console.print(text.rich(account, name, console.width))
    else:
        sys.stdout.write(text.plain(account, name))


def evaluate(
    ctx: typer.Context,
    name: NameArgument = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Further arguments for the job's module.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Evaluate the model of a job.

    Runs the module of the job with --evaluate, in one process; in a cluster, in a pod of its own, whose log is shown.

    \b
    Examples:
      outlast evaluate
      outlast evaluate cifar10 -- --batch=512
      outlast evaluate cifar10 -n team-a
    """
    further = list(args or ())
    if name is not None and name.startswith("-"):
        further.insert(0, name)
        name = None
    place = which.place(ctx, name, namespace, context)
    raise typer.Exit(place.evaluate(which.job(place, name), further))
