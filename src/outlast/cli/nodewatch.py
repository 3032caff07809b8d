"""`outlast node-watch`: the process that watches one machine of a cluster for notices of its cloud."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from outlast.cli.which import ContextOption
from outlast.contract import Env


def node_watch(
    node: Annotated[
        str, typer.Option("--node", envvar=Env.NODE, metavar="NAME", help="The node of this machine.", show_default=False)
    ],
    cloud: Annotated[
        Literal["aws", "gcp", "azure"] | None, typer.Option(help="Whose machine it is. Default: by the node's providerID.")
    ] = None,
    poll_interval: Annotated[
        str, typer.Option(envvar="POLL_INTERVAL", metavar="TIME", help="Interval between two questions for notices.")
    ] = "1s",
    ahead: Annotated[
        str, typer.Option(metavar="TIME", help="How long before its deadline a notice is acted on (maintenance comes early).")
    ] = "15m",
    rebalance: Annotated[
        bool, typer.Option("--rebalance/--no-rebalance", help="Also leave when AWS recommends it, before any interruption.")
    ] = True,
    queue: Annotated[
        str, typer.Option(metavar="URL", help="An SQS queue that gets one JSON message about each notice.", show_default=False)
    ] = "",
    notice_url: Annotated[
        str,
        typer.Option(
            envvar="NOTICE_URL",
            metavar="URL",
            help="Ask this address instead of a cloud: 200 is a notice, 404 none.",
            show_default=False,
        ),
    ] = "",
    metadata: Annotated[
        str, typer.Option(metavar="URL", help="Address of the cloud's metadata service.")
    ] = "http://169.254.169.254",
    port: Annotated[
        int, typer.Option(envvar=Env.PROBE_PORT, metavar="PORT", min=0, max=65535, help="Of the probes; 0: any free one.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only log what would be done.")] = False,
    log: Annotated[Literal["json", "text"], typer.Option(help="One JSON document per line, or text for people.")] = "json",
    context: ContextOption = None,
) -> None:
    """Watch a machine for notices of its cloud; move its pods while there is time.

    It runs on each node, where `outlast install --node-watch` puts it. A notice is
    an interruption of a spot machine (AWS, Google, Azure), a rebalance
    recommendation, or scheduled maintenance. Within a second the node is tainted
    (outlast.dev/leaving) and cordoned, with the deadline as an annotation. The
    operator has its workers save and leave. All other pods are evicted, those of
    DaemonSets excepted, with the grace that is left; PodDisruptionBudgets are
    respected until a pod would be lost with the machine. A notice that is
    withdrawn is taken back. It serves /healthz, /readyz and /metrics.

    \b
    Examples:
      outlast node-watch --node ip-10-0-0-1.ec2.internal --dry-run --log text
      outlast node-watch --queue https://sqs.eu-west-1.amazonaws.com/1234/spot
      outlast node-watch --no-rebalance --poll-interval 5s
      outlast node-watch --notice-url http://localhost:8000/notice
    """
    from outlast.nodewatch import process

    options = process.Options(
        node,
        cloud,
        metadata,
        notice_url,
        rebalance,
        queue,
        process.settings(poll_interval, ahead, dry_run=dry_run),
        port,
    )
    process.main(options, text=log == "text", context=context)
