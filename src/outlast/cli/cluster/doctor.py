"""`outlast doctor`: checking that training would work on this machine and in a cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base.errors import ClusterError, NoCluster, OutlastError
from outlast.cli import tables, terminal
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.cli.tables import Output, OutputOption

if TYPE_CHECKING:
    from outlast.kubernetes.diagnosis import Finding


def doctor(
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Try this image, and the network, in pods.")] = None,
    store: Annotated[str, typer.Option(metavar="URL", help="Try to write to this place in a store, from a pod.")] = "",
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Secret with credentials for the store; may be repeated.")
    ] = None,
    network: Annotated[bool, typer.Option(help="Try the network between two pods.")] = True,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=10, help="Timeout of the pods.")] = 300.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check that training would work here, and in a cluster.

    Changes nothing, except that --image creates one or two small pods and deletes them afterwards. The pods test the image, name
    resolution (DNS), the network between nodes (with an all-reduce), and the store. The exit code is 1 if a check fails.

    \b
    Examples:
      outlast doctor
      outlast doctor -n team-a --image ghcr.io/outlast/outlast:0.1
      outlast doctor --image IMAGE --store s3://bucket/runs --secret s3-keys
      outlast doctor --image IMAGE --no-network
    """
    from outlast.kubernetes import diagnosis

    if image is None and (store or secret):
        raise OutlastError("--store and --secret are tried in a pod; say of which image: --image IMAGE")
    findings: list[tuple[str, Finding]] = []
    with terminal.handled(signal.default_int_handler, signal.SIGTERM):  # deletes the pods, as Ctrl-C does
        for section, checks in _sections(image, store, secret or [], network, namespace, context, timeout):
            if output is Output.TABLE:
                print(("\n" if findings else "") + section, flush=True)
            for check in checks:
                findings.append((section, check))
                if output is Output.TABLE:
                    print(diagnosis.line(check), flush=True)
    if output is not Output.TABLE:
        keys = ("where", "name", "outcome", "said", "remedy")
        tables.data([dict(zip(keys, (where, e.name, e.outcome, e.what, e.remedy), strict=True)) for where, e in findings], output)
    if any(check.failed for _, check in findings):
        raise typer.Exit(1)


def _sections(
    image: str | None, store: str, secrets: list[str], network: bool, namespace: str | None, context: str | None, timeout: float
) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Yield the requested sections with their checks. Iterating over the checks runs them."""
    from outlast.kubernetes import api
    from outlast.kubernetes.diagnosis import check_pods, finding, gather_evidence, machine
    from outlast.kubernetes.diagnosis import cluster as judged

    def reached(checks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from checks()
        except ClusterError as error:
            yield finding.Finding("access", str(error), "fix that, and check again")

    yield "This machine", machine.checks()
    try:
        cluster = api.connect(context, namespace)
    except NoCluster as error:
        if namespace or context or image:
            raise
        yield "Cluster", [finding.warned("access", f"not checked: {error}", "nothing, when training is to be on this machine")]
        return
    try:
        where = f"Cluster {cluster.context or cluster.server}, namespace {cluster.namespace}"
        yield where, reached(lambda: judged.checks(gather_evidence.namespace(cluster)))
        if image:
            options = check_pods.Options(image, store, secrets, network, timeout)
            yield f"In pods of {image}", reached(lambda: check_pods.checks(cluster, options))
    finally:
        cluster.close()
