"""The dashboard and the alarms of a cluster in CloudWatch, as values. Pure; `cloudwatch` puts them there.

Above are three stacked areas for the fleet: CPU used by pods, number of nodes, desired capacity of each Auto Scaling group. Below
is what the operator says of jobs: step, goodput, restarts, age of the newest checkpoint.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.cloud import aws

NAMESPACE = "Outlast"
"""Of the metrics that come from the operator."""
DIMENSIONS = ("ClusterName", "namespace", "training_job")
"""Of a job's metrics; those of all jobs of a cluster have only the first."""
METRICS = (
    "outlast_job_step",
    "outlast_goodput_ratio",
    "outlast_job_restarts",
    "outlast_progress_age_seconds",
    "outlast_commit_age_seconds",
)
"""The operator's metrics that are sent."""
PERIOD_S = 60
_WIDE, _HALF, _HEIGHT = 24, 12, 6
"""Sizes in a grid of 24 columns."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What a cluster is to have in CloudWatch."""

    cluster: str
    region: str
    groups: Mapping[str, str]
    """Auto Scaling groups, with the names of their node groups."""
    stalled_s: int = 1800
    """A job that makes no progress for so long raises an alarm."""
    unsynced_s: int = 7200
    """So does one whose newest checkpoint is older than this."""
    topic: str = ""
    """ARN of the SNS topic that alarms are sent to; none if empty."""

    @property
    def name(self) -> str:
        """The dashboard's name, and the beginning of the alarms'."""
        return f"outlast-{self.cluster}"


def made_by(cluster: str) -> str:
    """The text by which a dashboard is known to be ours."""
    return f"Made by `outlast dashboard cloudwatch {cluster}`; changes are overwritten."


def body(wanted: Wanted) -> Document:
    """The dashboard: its widgets."""
    cluster = ["ClusterName", wanted.cluster]
    groups = [
        ["AWS/AutoScaling", "GroupDesiredCapacity", "AutoScalingGroupName", name, {"label": label}]
        for name, label in sorted(wanted.groups.items())
    ]
    fleet: list[tuple[str, list[Any]]] = [
        ("CPU used by pods (%)", [["ContainerInsights", "pod_cpu_utilization", *cluster]]),
        ("Nodes", [["ContainerInsights", "cluster_node_count", *cluster]]),
        *([("Desired capacity of node groups", groups)] if groups else []),
    ]
    jobs = [
        ("Step", "outlast_job_step"),
        ("Goodput (share of the wall time)", "outlast_goodput_ratio"),
        ("Restarts", "outlast_job_restarts"),
        ("Age of the newest checkpoint (s)", "outlast_commit_age_seconds"),
    ]
    widgets: list[Document] = [
        {"type": "text", "x": 0, "y": 0, "width": _WIDE, "height": 1, "properties": {"markdown": made_by(wanted.cluster)}}
    ]
    for title, metrics in fleet:
        widgets.append(_graph(wanted, title, metrics, (0, 1 + _HEIGHT * (len(widgets) - 1), _WIDE), stacked=True))
    below = 1 + _HEIGHT * len(fleet)
    for place, (title, metric) in enumerate(jobs):
        at = (_HALF * (place % 2), below + _HEIGHT * (place // 2), _HALF)
        widgets.append(_graph(wanted, title, [[{"expression": _search(wanted.cluster, metric), "id": f"job{place}"}]], at))
    return {"widgets": widgets}


def alarms(wanted: Wanted) -> list[Document]:
    """The alarms, as PutMetricAlarm takes them. Each is about the job of the cluster for which it is worst."""
    found = []
    for word, metric, limit_s, about in (
        ("stalled", "outlast_progress_age_seconds", wanted.stalled_s, "A job makes no progress"),
        ("unsynced", "outlast_commit_age_seconds", wanted.unsynced_s, "The newest checkpoint of a job is old"),
    ):
        found.append(
            {
                "AlarmName": f"{wanted.name}-{word}",
                "AlarmDescription": f"{about} (more than {limit_s} s); outlast why NAME says the reason.",
                "Namespace": NAMESPACE,
                "MetricName": metric,
                "Dimensions": [{"Name": "ClusterName", "Value": wanted.cluster}],
                "Statistic": "Maximum",
                "Period": PERIOD_S,
                "EvaluationPeriods": 3,
                "DatapointsToAlarm": 3,
                "Threshold": float(limit_s),
                "ComparisonOperator": "GreaterThanThreshold",
                "TreatMissingData": "notBreaching",  # no job trains
                "AlarmActions": [wanted.topic] if wanted.topic else [],
                "OKActions": [wanted.topic] if wanted.topic else [],
                "Tags": aws.listed(aws.tags(wanted.cluster)),
            }
        )
    return found


def agent(cluster: str, region: str) -> Document:
    """The settings of CloudWatch's agent: what it scrapes becomes log lines in the embedded metric format, and those metrics.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/ContainerInsights-Prometheus-Setup-configure.html
    """
    declared = {
        "source_labels": ["service"],
        "label_matcher": "^outlast-operator$",
        "dimensions": [[DIMENSIONS[0]], list(DIMENSIONS)],
        "metric_selectors": [f"^{name}$" for name in METRICS],
    }
    prometheus = {
        "cluster_name": cluster,
        "log_group_name": f"/aws/containerinsights/{cluster}/prometheus",
        "prometheus_config_path": "/etc/prometheusconfig/prometheus.yaml",
        "emf_processor": {
            "metric_declaration_dedup": True,
            "metric_namespace": NAMESPACE,
            "metric_declaration": [declared],
        },
    }
    return {
        "agent": {"region": region},
        "logs": {"metrics_collected": {"prometheus": prometheus}, "force_flush_interval": 5},
    }


def text(document: Document) -> str:
    """JSON with its keys in order, so that the same settings are the same text."""
    return json.dumps(document, sort_keys=True)


def _graph(wanted: Wanted, title: str, metrics: list[Any], at: tuple[int, int, int], *, stacked: bool = False) -> Document:
    """A graph over time; `at`: column, row, width."""
    x, y, width = at
    properties = {
        "title": title,
        "view": "timeSeries",
        "stacked": stacked,
        "region": wanted.region,
        "stat": "Average",
        "period": PERIOD_S,
        "metrics": metrics,
    }
    return {"type": "metric", "x": x, "y": y, "width": width, "height": _HEIGHT, "properties": properties}


def _search(cluster: str, metric: str) -> str:
    """A line for each job, whatever jobs there are."""
    schema = ",".join([NAMESPACE, *DIMENSIONS])
    return f"SEARCH('{{{schema}}} MetricName=\"{metric}\" ClusterName=\"{cluster}\"', 'Maximum', {PERIOD_S})"
