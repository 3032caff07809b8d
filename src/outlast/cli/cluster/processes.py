"""`outlast operator` and `outlast node-watch`: the processes in the pods that `outlast install` creates."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from outlast.base.errors import importing
from outlast.cli import completion, find_job
from outlast.cli.find_job import ContextOption
from outlast.job.contract import Env


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
        str, typer.Option(metavar="TIME", help="Replace the pods of a node that is unreachable for this long.")
    ] = "30s",
    log: Annotated[Literal["json", "text"], typer.Option(help="One JSON document per line, or text for people.")] = "json",
    context: ContextOption = None,
) -> None:
    """Run the ElasticJobs of a cluster, in the operator's pod.

    The operator creates, replaces and removes their pods, and runs in the cluster, where `outlast install` puts it. If there
    are several operators, the one that holds the Lease outlast-operator in its namespace is active; another one takes over when
    it is gone. The operator serves /healthz, /readyz and /metrics on the port in OUTLAST_PROBE_PORT (8080). On SIGTERM it
    finishes its current work and exits. The exit code is 1 if another operator has taken over.

    \b
    Examples:
      outlast operator
      outlast operator --namespace team-a --log text
      outlast operator --lost-after 2m
      outlast operator --context kind-test --log text
    """
    with importing("an operator", "kubernetes"):
        from outlast.kubernetes.operator import main

    limits = main.limits(lost_after)
    main.main(limits, namespace=namespace, workers=workers, text=log == "text", context=context)


def node_watch(
    node: Annotated[str, typer.Option(envvar=Env.NODE, metavar="NAME", help="The node of this machine.")],
    poll_interval: Annotated[
        str, typer.Option(envvar="POLL_INTERVAL", metavar="TIME", help="Interval between checks for notices.")
    ] = "1s",
    rebalance: Annotated[bool, typer.Option(help="Also leave when AWS recommends it, before any interruption.")] = True,
    metadata: Annotated[str, typer.Option(metavar="URL", help="Address of the metadata service.")] = "http://169.254.169.254",
    context: ContextOption = None,
) -> None:
    """Watch an AWS machine for notices, in a pod on its node.

    When a notice comes, the pods of the machine are moved while there is time. The watcher runs on each node, where `outlast
    install --node-watch` puts it. A notice is an interruption of a spot machine, a rebalance recommendation, or scheduled
    maintenance. Within a second the node is tainted (outlast.dev/leaving) and cordoned, with the deadline as an annotation. The
    operator makes the node's workers save and leave. All other pods, except those of DaemonSets, are evicted with the grace
    period that is left; PodDisruptionBudgets are respected until a pod would be lost with the machine. If AWS withdraws a
    notice, these changes to the node are undone.

    \b
    Examples:
      outlast node-watch --node ip-10-0-0-1.ec2.internal
      outlast node-watch --no-rebalance --poll-interval 5s
    """
    import logging
    import signal
    import threading

    from outlast.base.clock import Clock
    from outlast.base.loglines import write_log
    from outlast.kubernetes import api
    from outlast.kubernetes.api import kinds
    from outlast.kubernetes.nodewatch.metadata import Metadata
    from outlast.kubernetes.nodewatch.node_watcher import Watcher

    interval_s = max(0.2, find_job.duration("--poll-interval", poll_interval).total_seconds())
    write_log(text=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    cluster = api.connect(context)
    source = Metadata(metadata.rstrip("/"), rebalance)
    watcher = Watcher(cluster.get(kinds.NODE, node), source, cluster, clock=Clock(), interval_s=interval_s)
    source.read(Clock()())  # a disabled service becomes visible as a container that does not start
    logging.getLogger(__name__).info("node %s is watched every %g s", node, interval_s)
    while not stop.wait(watcher.tick()):
        pass
    cluster.close()
