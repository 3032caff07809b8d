"""`outlast why`: what keeps a job from training, and what to do about it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import typer

from outlast.cli import show, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import ContextOption, NameArgument, NamespaceOption

if TYPE_CHECKING:
    from outlast.diagnosis import Cause


def why(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why a job does not train: the cause, what was seen of it, and the remedy.

    The most important cause comes first. It looks at the job, its pods and their logs, events, nodes, claims, quotas and queues.
    Exit code 0: something could be said.

    \b
    Examples:
      outlast why
      outlast why cifar10 -n team-a
      outlast why cifar10 -o json
    """
    from outlast import diagnosis

    causes, unseen = _asked(ctx, name, namespace, context)
    if output is Output.TABLE:
        print(diagnosis.text(causes, unseen=unseen))
    else:
        show.data({"causes": [dataclasses.asdict(cause) for cause in causes], "unseen": unseen}, output)


def _asked(
    ctx: typer.Context, name: str | None, namespace: str | None, context: str | None
) -> tuple[list[Cause], dict[str, str]]:
    """The causes, and what could not be looked at."""
    from outlast import diagnosis
    from outlast.diagnosis import gather, local_job

    place = which.place(ctx, name, namespace, context)
    found = which.job(place, name)
    if (there := which.in_cluster(place)) is None:
        return local_job.causes(place.status(found), place.events(found), time.time()), {}
    seen = gather.job(there.cluster, found)
    return diagnosis.causes(seen, time.time()), dict(seen.unseen)
