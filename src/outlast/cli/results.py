"""`outlast report | evaluate`: where the time of a run went, and how good its model is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import contract, units
from outlast.cli import show, terminal, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import ContextOption, NameArgument, NamespaceOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.ledger import Event


def report(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where the time of a job went.

    How much was training, how much was lost to replayed steps, waiting for data, checkpoints and recovery, and what happened
    when. The report of a job in a cluster needs its output in a store. NAME may be a job file, or the URL of a job's output in a
    store.

    \b
    Examples:
      outlast report
      outlast report cifar10 -o json
      outlast report cifar10 -n team-a
      outlast report s3://bucket/runs/cifar10
    """
    from outlast.report import goodput, text

    name, run, events, runs, told = _ledger(ctx, name, namespace, context)
    driven = runs or next(iter(events), None) is None
    account = goodput.buckets(events, time.time() if driven else None)
    if told is not None and units.percent(told) != units.percent(account.goodput):
        said = f"the operator reads no ledger; it estimates a goodput of {units.percent(told)}, which status and list show"
        terminal.say(said)
    if output is not Output.TABLE:
        show.data({"name": name, "run": run, **text.as_json(account)}, output)
    elif terminal.colours(sys.stdout):
        console = terminal.console()
        console.print(text.rich(account, name, console.width))
    else:
        sys.stdout.write(text.plain(account, name))


def _ledger(
    ctx: typer.Context, name: str | None, namespace: str | None, context: str | None
) -> tuple[str, str, Iterable[Event], bool, float | None]:
    """The job's name, its run, its ledger, whether it is active, and the goodput that an operator has estimated."""
    if url := which.in_store(name):
        from outlast.runs import output

        place, record = which.recorded(url)
        return record.job, record.run, output.events(place), not record.ended, None
    backend, name = which.found(ctx, name, namespace, context)
    status, events = backend.status(name), backend.events(name)
    if which.in_cluster(backend) is None:
        return name, status.run, events, status.launcher is not None, None
    return name, status.run, events, status.state.active, status.goodput


def evaluate(
    ctx: typer.Context,
    name: NameArgument = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Further arguments for the job's module.", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, by its metric.")] = False,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this step.", show_default=False)] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Evaluate the model of a job.

    Runs the module or script of the job with --evaluate in one process; in a cluster in a pod of its own, whose log is shown.
    A script of your own must know --evaluate: one that ignores its arguments goes on training.
    With --best or --step it gets --checkpoint=STEP as well, and the checkpoint is fetched if it is only in the store.

    \b
    Examples:
      outlast evaluate
      outlast evaluate cifar10 --best
      outlast evaluate cifar10 -- --batch=512
      outlast evaluate cifar10 -n team-a
    """
    further = list(args or ())
    if name is not None and name.startswith("-"):
        further.insert(0, name)
        name = None
    if best and step is not None:
        raise OutlastError(f"--best and --step {step} name two checkpoints; leave one of them out")
    if best or step is not None:
        further.insert(0, f"{contract.EVALUATED}{'best' if best else step}")
    place, name = which.found(ctx, name, namespace, context)
    raise typer.Exit(place.evaluate(name, further, show=lambda line: terminal.log([line], prefixed=False)))
