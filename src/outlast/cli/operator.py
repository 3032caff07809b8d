"""`outlast operator`: the process that runs ElasticJobs in a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from outlast.cli import completion
from outlast.cli.which import ContextOption


def operator(
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Only jobs in this namespace. Default: all.",
            autocompletion=completion.namespaces,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of jobs reconciled at the same time.")] = 8,
    lost_after: Annotated[
        str, typer.Option(metavar="TIME", help="How long a node may be unreachable before its pods are replaced.")
    ] = "30s",
    log: Annotated[Literal["json", "text"], typer.Option(help="One JSON document per line, or text for people.")] = "json",
    context: ContextOption = None,
) -> None:
    """Run the ElasticJobs of a cluster, in the operator's pod.

    It creates, replaces and removes their pods, and runs in the cluster, where `outlast install` puts it. One of several
    operators is active, holding the Lease outlast-operator in its namespace; another
    takes over when it is gone. It serves /healthz, /readyz and /metrics on the
    port in OUTLAST_PROBE_PORT (8080). On SIGTERM it finishes its present work and
    exits. The exit code is 1 when another one has taken over.

    \b
    Examples:
      outlast operator
      outlast operator --namespace team-a --log text
      outlast operator --lost-after 2m
      outlast operator --context kind-test --log text
    """
    try:
        from outlast.kubernetes.operator import process
    except ModuleNotFoundError as error:
        from outlast.kubernetes.api import login

        if (error.name or "").startswith("outlast"):
            raise  # a module of ours: a bug
        raise login.not_installed(error) from error

    limits = process.limits(lost_after)
    process.main(limits, namespace=namespace, workers=workers, text=log == "text", context=context)
