"""`outlast evaluate`: evaluating a job's model."""

from __future__ import annotations

from typing import Annotated

import typer

from outlast.cli import find_job, terminal
from outlast.cli.find_job import BestOption, ContextOption, NameArgument, NamespaceOption, StepOption


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

    Runs the job's module or script with --evaluate in one process; in a cluster, it runs in a separate pod, whose log is shown. A
    script of your own must support --evaluate: a script that ignores this argument would train, and fails if it opens a session.
    With --best or --step, --checkpoint=STEP is passed as well, and the checkpoint is fetched if it is only in the store.

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
    run = find_job.run(ctx, name, namespace, context)
    code = run.evaluate(*further, best=best, step=step, show=lambda line: terminal.log([line], prefixed=False))
    if code == 2:  # argparse's exit code for bad arguments
        terminal.say(f"{run.name} was started with --evaluate and refuses its arguments; a script must take --evaluate")
    raise typer.Exit(code)
