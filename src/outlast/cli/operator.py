"""`outlast operator`: the process that makes ElasticJobs real in a cluster."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from outlast.cli.which import ContextOption


class Log(enum.StrEnum):
    """How the log is written."""

    JSON = "json"
    TEXT = "text"


def operator(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only jobs in this one. Default: all.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Jobs that are looked at at once.")] = 8,
    lost_after: Annotated[
        str, typer.Option(metavar="TIME", help="How long a node may not answer before its pods are given up and replaced.")
    ] = "30s",
    log: Annotated[Log, typer.Option(help="One JSON document a line, or text for people.")] = Log.JSON,
    context: ContextOption = None,
) -> None:
    """Make the ElasticJobs of a cluster train: make, replace and remove their pods.

    It runs in the cluster; `outlast install` brings it there. Of several, one
    acts, holding the Lease outlast-operator in its namespace; the others take
    over when it is gone. It serves /healthz, /readyz and /metrics on the port
    in OUTLAST_PROBE_PORT (8080). SIGTERM ends what has begun, and then it.
    The exit code is 1 when another one has taken over.

    \b
    Examples:
      outlast operator
      outlast operator --namespace team-a --log text
      outlast operator --lost-after 2m
      outlast operator --context kind-test --log text
    """
    from outlast.operator import process

    limits = process.limits(lost_after)
    process.main(limits, namespace=namespace, workers=workers, text=log is Log.TEXT, context=context)
