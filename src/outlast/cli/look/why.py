"""`outlast why`: showing why a job does not train, with remedies."""

from __future__ import annotations

import typer

from outlast.cli import find_job, tables
from outlast.cli.find_job import ContextOption, NameArgument, NamespaceOption
from outlast.cli.tables import Output, OutputOption


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
