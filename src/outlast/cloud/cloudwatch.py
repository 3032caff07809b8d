"""A cluster's dashboard and alarms in CloudWatch, put there and deleted; and what must be switched on for them to show anything.

That is Container Insights (an add-on of EKS) and the metrics of the Auto Scaling groups. Each step looks first: again, it changes
nothing. `dashboard` says what the dashboard holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outlast.cloud import aws, dashboard
from outlast.cloud.dashboard import Wanted
from outlast.cloud.filesystem import Step
from outlast.errors import OutlastError

ADDON = "amazon-cloudwatch-observability"
_GROUP_METRICS = ("GroupDesiredCapacity", "GroupInServiceInstances", "GroupMinSize", "GroupMaxSize")
_ALARM = (
    "AlarmDescription", "Namespace", "MetricName", "Dimensions", "Statistic", "Period", "EvaluationPeriods",
    "DatapointsToAlarm", "Threshold", "ComparisonOperator", "TreatMissingData", "AlarmActions", "OKActions",
)  # fmt: skip


def groups(region: str, cluster: str) -> dict[str, str]:
    """The Auto Scaling groups of a cluster's nodes, with the names of their node groups."""
    pages = aws.client("autoscaling", region).get_paginator("describe_auto_scaling_groups").paginate(
        Filters=[{"Name": "tag-key", "Values": [f"kubernetes.io/cluster/{cluster}"]}]
    )  # fmt: skip
    found = {}
    for group in (each for page in pages for each in page["AutoScalingGroups"]):
        tags = aws.mapped(group.get("Tags"))
        label = tags.get("eks:nodegroup-name") or tags.get("alpha.eksctl.io/nodegroup-name")
        found[group["AutoScalingGroupName"]] = label or group["AutoScalingGroupName"]
    return found


def create(wanted: Wanted, *, role: str = "", dry_run: bool = False) -> Iterator[Step]:
    """Put dashboard and alarms, and switch on what they show; yields each step. `role`: for the pods of Container Insights."""
    yield _addon(wanted, role, dry_run=dry_run)
    yield from _measured(wanted, dry_run=dry_run)
    client = aws.client("cloudwatch", wanted.region)
    old = _dashboard(client, wanted.name)
    if old is not None and not _ours(old, wanted.cluster):
        raise OutlastError(f"dashboard {wanted.name} exists and was not made by Outlast; rename or delete it")
    new = dashboard.body(wanted)
    if old != new and not dry_run:
        answer = client.put_dashboard(DashboardName=wanted.name, DashboardBody=dashboard.text(new))
        if said := [each["Message"] for each in answer.get("DashboardValidationMessages", ())]:
            raise OutlastError(f"CloudWatch has doubts about dashboard {wanted.name}: {'; '.join(said)}")
    yield Step("created" if old is None else "unchanged" if old == new else "changed", "dashboard", wanted.name)
    there = {each["AlarmName"]: each for each in _alarms(client, wanted.name)}
    for alarm in dashboard.alarms(wanted):
        name = alarm["AlarmName"]
        if name in there and not _tagged(client, there[name], wanted.cluster):
            raise OutlastError(f"alarm {name} exists and was not made by Outlast; rename or delete it")
        same = name in there and all(there[name].get(key) == alarm[key] for key in _ALARM)
        if not same and not dry_run:
            client.put_metric_alarm(**alarm)
        yield Step("unchanged" if same else "changed" if name in there else "created", "alarm", name)


def delete(region: str, cluster: str, *, dry_run: bool = False) -> Iterator[Step]:
    """Delete the dashboard and the alarms, and the add-on if we have added it; yields each step, and what is left."""
    client, name = aws.client("cloudwatch", region), Wanted(cluster, region, {}).name
    old = _dashboard(client, name)
    if old is not None:
        ours = _ours(old, cluster)
        if ours and not dry_run:
            client.delete_dashboards(DashboardNames=[name])
        yield Step("deleted" if ours else "kept", "dashboard", name, "" if ours else "it was not made by Outlast")
    for alarm in _alarms(client, name):
        ours = _tagged(client, alarm, cluster)
        if ours and not dry_run:
            client.delete_alarms(AlarmNames=[alarm["AlarmName"]])
        yield Step("deleted" if ours else "kept", "alarm", alarm["AlarmName"], "" if ours else "it was not made by Outlast")
    eks = aws.client("eks", region)
    if (addon := _installed(eks, cluster)) is None:
        return
    ours = aws.ours(addon.get("tags") or {}, cluster)
    if ours and not dry_run:
        eks.delete_addon(clusterName=cluster, addonName=ADDON)
    yield Step("deleted" if ours else "kept", "add-on", ADDON, "" if ours else "it was not added by Outlast")


def _addon(wanted: Wanted, role: str, *, dry_run: bool) -> Step:
    """Container Insights."""
    eks = aws.client("eks", wanted.region)
    if there := _installed(eks, wanted.cluster):
        return Step("unchanged", "add-on", ADDON, "" if there.get("status") == "ACTIVE" else f"it is {there.get('status')}")
    pods = {"podIdentityAssociations": [{"serviceAccount": "cloudwatch-agent", "roleArn": role}]} if role else {}
    if not dry_run:
        eks.create_addon(clusterName=wanted.cluster, addonName=ADDON, tags=aws.tags(wanted.cluster), **pods)
    needs = "" if role else "Container Insights; the role of the nodes needs the policy CloudWatchAgentServerPolicy (or --role)"
    return Step("created", "add-on", ADDON, needs)


def _measured(wanted: Wanted, *, dry_run: bool) -> Iterator[Step]:
    """The metrics of the groups, which are off by default."""
    client = aws.client("autoscaling", wanted.region)
    if not wanted.groups:
        return
    pages = client.get_paginator("describe_auto_scaling_groups").paginate(AutoScalingGroupNames=sorted(wanted.groups))
    for group in (each for page in pages for each in page["AutoScalingGroups"]):
        on = {each["Metric"] for each in group.get("EnabledMetrics", ())}
        lacks = [each for each in _GROUP_METRICS if each not in on]
        if lacks and not dry_run:
            client.enable_metrics_collection(
                AutoScalingGroupName=group["AutoScalingGroupName"], Granularity="1Minute", Metrics=lacks
            )
        yield Step("changed" if lacks else "unchanged", "metrics of group", group["AutoScalingGroupName"])


def _installed(eks: Any, cluster: str) -> Any:
    try:
        return eks.describe_addon(clusterName=cluster, addonName=ADDON)["addon"]
    except eks.exceptions.ResourceNotFoundException:
        return None


def _dashboard(client: Any, name: str) -> Any:
    """The body of a dashboard; None if there is none of this name."""
    try:
        return json.loads(client.get_dashboard(DashboardName=name)["DashboardBody"])
    except client.exceptions.ClientError as error:
        if not aws.absent(error):
            raise
        return None


def _ours(body: Any, cluster: str) -> bool:
    said = [each.get("properties", {}).get("markdown") for each in body.get("widgets", ())]
    return dashboard.made_by(cluster) in said


def _alarms(client: Any, name: str) -> list[Any]:
    """The alarms whose names are those of ours."""
    wanted = {alarm["AlarmName"] for alarm in dashboard.alarms(Wanted(name.removeprefix("outlast-"), "", {}))}
    return list(client.describe_alarms(AlarmNames=sorted(wanted))["MetricAlarms"])


def _tagged(client: Any, alarm: Any, cluster: str) -> bool:
    return aws.ours(aws.mapped(client.list_tags_for_resource(ResourceARN=alarm["AlarmArn"])["Tags"]), cluster)
