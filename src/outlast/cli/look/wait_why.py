"""`outlast wait | why`: waiting for a job to reach a step or state, or to end, and showing why it does not train."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outlast.base.errors import OutlastError
from outlast.cli import find_job, status_page, tables
from outlast.cli.find_job import ContextOption, NameArgument, NamespaceOption
from outlast.cli.tables import Output, OutputOption


def wait(
    ctx: typer.Context,
    name: NameArgument = None,
    what: Annotated[
        str, typer.Option("--for", metavar="WHAT", help="step=N, or a state such as Running. Default: that it has succeeded.")
    ] = "Succeeded",
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="Give up after this time, such as 10m.")] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Wait until a job reaches a step or a state.

    By default, this waits until the job has succeeded. The exit code is 1 if the job fails, is cancelled or stops first, and the
    first error of the first failed rank is printed. After --timeout, the exit code is 124, and the job goes on.

    \b
    Examples:
      outlast wait
      outlast wait cifar10 --for step=1000 --timeout 1h
      outlast wait cifar10 -n team-a --for Running
    """
    from outlast.job.status import State

    options: dict[str, Any] = {"until": what}
    if what.startswith("step="):
        if not what.removeprefix("step=").isdecimal():
            raise OutlastError(f"--for {what}: expected step=N with a whole number")
        options = {"step": int(what.removeprefix("step="))}
    elif what not in list(State):
        raise OutlastError(f"--for {what}: expected step=N or one of {', '.join(State)}")
    if timeout is not None:
        options["timeout"] = find_job.duration("--timeout", timeout).total_seconds()
    run = find_job.run(ctx, name, namespace, context)
    status = run.wait(**options)
    print(f"{run.name}: {status_page.state(status)}, step {status.step}")


def why(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why a job does not train, and what to do about it.

    The most important cause comes first, and each cause comes with the evidence and a remedy. The command looks at the job, its
    pods and their logs, events, nodes, claims, quotas and queues. The exit code is 0 if the job could be examined.

    \b
    Examples:
      outlast why
      outlast why cifar10 -n team-a
      outlast why cifar10 -o json
    """
    found = find_job.run(ctx, name, namespace, context).why()
    if output is Output.TABLE:
        print(found)
        return
    rows = [{"rule": e.name, "what": e.what, "evidence": e.evidence, "remedy": e.remedy, "wrong": e.failed} for e in found.causes]
    tables.data({"causes": rows, "unseen": found.unseen}, output)
