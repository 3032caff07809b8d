"""`outlast why`: what keeps a job from training, and what to do about it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import show, which
from outlast.cli.show import Output, OutputOption
from outlast.cli.which import NameArgument
from outlast.errors import NoCluster

if TYPE_CHECKING:
    from outlast.diagnosis import Cause

ContextOption = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current one.")
]
NamespaceOption = Annotated[
    str | None, typer.Option("-n", "--namespace", metavar="NAME", help="Namespace in the cluster. Default: the context's.")
]


def why(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why a job does not train: the cause, what was seen of it, and the remedy.

    The most important cause comes first. A job that was run here is looked for here, else, or with -n or --context, in the
    cluster. Exit code 0: something could be said.

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
    from outlast.diagnosis import here

    place = which.backend(ctx)
    known = [status.name for status in place.list()]
    if not (namespace or context) and (name is None or name in known):
        found = which.job(place, name)
        return here.causes(place.status(found), place.events(found), time.time()), {}
    if name is None:
        raise typer.BadParameter("give the name of the job in the cluster")
    from outlast import diagnosis, kube
    from outlast.diagnosis import evidence

    try:
        cluster = kube.connect(context, namespace)
    except NoCluster as error:
        if namespace or context:
            raise
        raise NoCluster(f"no job {name!r} was run here, and it cannot be looked for in a cluster: {error}") from error
    try:
        seen = evidence.see(cluster, name)
    finally:
        cluster.close()
    return diagnosis.causes(seen, time.time()), dict(seen.unseen)
