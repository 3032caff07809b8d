"""`outlast node-watch`: the process that watches one AWS machine of a cluster for notices."""

from __future__ import annotations

from typing import Annotated

import typer

from outlast.cli.which import ContextOption
from outlast.job.contract import Env


def node_watch(
    node: Annotated[str, typer.Option(envvar=Env.NODE, metavar="NAME", help="The node of this machine.")],
    poll_interval: Annotated[
        str, typer.Option(envvar="POLL_INTERVAL", metavar="TIME", help="Interval between two questions for notices.")
    ] = "1s",
    rebalance: Annotated[bool, typer.Option(help="Also leave when AWS recommends it, before any interruption.")] = True,
    metadata: Annotated[str, typer.Option(metavar="URL", help="Address of the metadata service.")] = "http://169.254.169.254",
    context: ContextOption = None,
) -> None:
    """Watch an AWS machine for notices, in a pod on its node.

    When one comes, its pods are moved while there is time.
    It runs on each node, where `outlast install --node-watch` puts it. A notice is
    an interruption of a spot machine, a rebalance recommendation, or scheduled
    maintenance. Within a second the node is tainted (outlast.dev/leaving) and
    cordoned, with the deadline as an annotation. The operator has its workers save
    and leave. All other pods are evicted, those of DaemonSets excepted, with the
    grace that is left; PodDisruptionBudgets are respected until a pod would be
    lost with the machine. A notice that is withdrawn is taken back.

    \b
    Examples:
      outlast node-watch --node ip-10-0-0-1.ec2.internal
      outlast node-watch --no-rebalance --poll-interval 5s
    """
    import logging
    import signal
    import threading

    from outlast.base import units
    from outlast.base.clock import Clock
    from outlast.base.errors import OutlastError
    from outlast.base.loglines import write_log
    from outlast.kubernetes import api
    from outlast.kubernetes.nodewatch.metadata import Metadata
    from outlast.kubernetes.nodewatch.watch import Watcher

    try:
        every_s = max(0.2, units.duration(poll_interval).total_seconds())
    except ValueError as error:
        raise OutlastError(f"--poll-interval {poll_interval} {error}") from error
    write_log(text=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    cluster = api.connect(context)
    source = Metadata(metadata.rstrip("/"), rebalance)
    watcher = Watcher(cluster.get(api.NODE, node), source, cluster, clock=Clock(), every_s=every_s)
    source.read(Clock()())  # a service that is switched off is said by a container that does not start
    logging.getLogger(__name__).info("node %s is watched every %g s", node, every_s)
    while not stop.wait(watcher.tick()):
        pass
    cluster.close()
