"""`outlast evaluate`: evaluating the model of a job."""

from __future__ import annotations

from typing import Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import find_job, terminal
from outlast.cli.find_job import BestOption, ContextOption, NameArgument, NamespaceOption, StepOption
from outlast.job import contract


def evaluate(
    ctx: typer.Context,
    name: NameArgument = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Further arguments for the job's module.")] = None,
    best: BestOption = False,
    step: StepOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Evaluate the model of a job.

    Runs the module or script of the job with --evaluate in one process; in a cluster, in a separate pod, whose log is shown. A
    script of your own must support --evaluate: a script that ignores its arguments goes on training. With --best or --step,
    --checkpoint=STEP is passed as well, and the checkpoint is fetched if it is only in the store.

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
    place, name = find_job.resolve(ctx, name, namespace, context)
    code = place.evaluate(name, further, show=lambda line: terminal.log([line], prefixed=False))
    if code == 2:  # argparse's
        terminal.say(f"{name} was started with --evaluate and refuses its arguments; a script of your own must take --evaluate")
    raise typer.Exit(code)
