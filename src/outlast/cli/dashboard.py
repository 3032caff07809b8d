"""`outlast dashboard`: jobs and nodes of a cluster, as the monitoring of its cloud shows them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outlast import units
from outlast.cli import eks, terminal
from outlast.cli.eks import ClusterArgument, Dry, RegionOption
from outlast.cli.which import ContextOption
from outlast.contract import OPERATOR_NAMESPACE
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import kube
    from outlast.cloud.dashboard import Wanted

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Dashboards of a cluster and its jobs.")


@app.callback()
def group() -> None:
    """Dashboards of a cluster and its jobs."""


@app.command()
def cloudwatch(
    cluster: ClusterArgument,
    region: RegionOption = None,
    stalled: Annotated[str, typer.Option(metavar="TIME", help="Alarm when a job makes no progress for so long.")] = "30m",
    unsynced: Annotated[str, typer.Option(metavar="TIME", help="Alarm when its newest checkpoint is older.")] = "2h",
    topic: Annotated[str | None, typer.Option(metavar="ARN", help="SNS topic to which alarms are sent.")] = None,
    role: Annotated[
        str | None, typer.Option(metavar="ARN", help="IAM role for the pods of Container Insights. Default: that of the nodes.")
    ] = None,
    operator: Annotated[
        str, typer.Option(metavar="NAME", help="Namespace of the operator whose metrics are sent.")
    ] = OPERATOR_NAMESPACE,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what this command has made.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask before deleting.")] = False,
    dry_run: Dry = False,
    output: Annotated[
        Literal["json", "yaml"] | None,
        typer.Option("-o", "--output", help="Only print: the dashboard (json), or the agent's Kubernetes objects (yaml)."),
    ] = None,
    context: ContextOption = None,
) -> None:
    """Put a dashboard and alarms into CloudWatch, and switch on what they show.

    The dashboard has CPU of pods, number of nodes and desired capacity of each group as stacked areas, and step, goodput,
    restarts and age of the newest checkpoint of each job. Two alarms are about jobs that stall or do not save. Container
    Insights and the metrics of the Auto Scaling groups are switched on, and CloudWatch's agent is brought into the cluster, which
    reads the operator's metrics. Doing it again changes nothing, or brings it up to date: new node groups get their lines.

    \b
    Examples:
      outlast dashboard cloudwatch do-eks --dry-run
      outlast dashboard cloudwatch do-eks --topic arn:aws:sns:us-west-2:123456789012:oncall
      outlast dashboard cloudwatch do-eks -o json > dashboard.json
      outlast dashboard cloudwatch do-eks --delete
    """
    from outlast.cli import render
    from outlast.cloud import aws, dashboard
    from outlast.cloud import cloudwatch as cloud
    from outlast.manifests import cloudwatch as manifests

    region = aws.region(region)
    limits = (_seconds("--stalled", stalled), _seconds("--unsynced", unsynced))
    with aws.in_our_words(f"dashboard of {cluster} in {region}"):
        groups = {} if output == "yaml" or delete else cloud.groups(region, cluster)
        wanted = dashboard.Wanted(cluster, region, groups, limits[0], limits[1], topic or "")
    settings = dashboard.agent(cluster, region)
    if output == "json":
        print(dashboard.text(dashboard.body(wanted)))
    elif output == "yaml":
        print(render.text([manifests.namespace(), *manifests.documents(settings, operator=operator)]), end="")
    elif delete:
        if not yes and not dry_run:
            terminal.confirm(f"dashboard, alarms and CloudWatch's agent of {cluster} in {region} would be deleted")
        _delete(cluster, region, eks.known(cluster, region, context), operator, dry_run=dry_run)
    else:
        there = eks.connected(cluster, region, eks.endpoint(cluster, region), context, None)
        _create(wanted, there, role or "", operator, dry_run=dry_run)


def _create(wanted: Wanted, there: kube.Cluster, role: str, operator: str, *, dry_run: bool) -> None:
    from outlast.cloud import aws, cloudwatch, dashboard
    from outlast.cluster import cloudwatch_agent

    try:
        for done in cloudwatch_agent.bring(
            there, dashboard.agent(wanted.cluster, wanted.region), operator=operator, dry_run=dry_run
        ):
            print(done, flush=True)
        with aws.in_our_words(f"dashboard of {wanted.cluster} in {wanted.region}"):
            for step in cloudwatch.create(wanted, role=role, dry_run=dry_run):
                print(step, flush=True)
    finally:
        there.close()
    if not wanted.groups:
        terminal.say("the cluster has no Auto Scaling group, so the dashboard has no graph of their capacity; Karpenter has none")
    if dry_run:
        terminal.say("this was a dry run: nothing was changed")


def _delete(cluster: str, region: str, there: kube.Cluster | None, operator: str, *, dry_run: bool) -> None:
    from outlast.cloud import aws, cloudwatch
    from outlast.cluster import cloudwatch_agent

    try:
        for done in cloudwatch_agent.remove(there, operator=operator, dry_run=dry_run) if there else ():
            print(done, flush=True)
        with aws.in_our_words(f"dashboard of {cluster} in {region}"):
            for step in cloudwatch.delete(region, cluster, dry_run=dry_run):
                print(step, flush=True)
    finally:
        if there:
            there.close()
    if dry_run:
        terminal.say("this was a dry run: nothing was changed")


def _seconds(option: str, text: str) -> int:
    try:
        found = units.duration(text)
    except ValueError as error:
        raise OutlastError(f"{option} {text}: {error}") from error
    if found < timedelta(minutes=1):
        raise OutlastError(f"{option} {text}: metrics come once a minute; give a minute or more")
    return int(found.total_seconds())
