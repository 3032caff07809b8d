"""The objects by which Prometheus and Grafana show jobs: a PodMonitor, alerts, and a dashboard that Grafana's sidecar finds by
its label. They name metrics of `prometheus_metrics.TABLE` alone. Optional: the kinds are those of the Prometheus Operator.
https://prometheus-operator.dev/docs/api-reference/api/ and https://grafana.com/docs/grafana/latest/dashboards/json-model/
"""

from __future__ import annotations

import json

from outlast.job.contract import OPERATOR_NAMESPACE
from outlast.kubernetes.manifests.render_request import Document

NAME = "outlast"
STALLED_S, UNSAVED_S = 1800, 7200
"""Seconds without a step, and age of the newest checkpoint in seconds, from which there is an alert."""
LOST_SHARE = 0.1
"""Lost steps of an hour, as a share of the steps done in it, from which there is an alert."""
_SIZE = 8
"""Width and height of a panel in units of Grafana's grid, which has 24 columns."""
_SHOWN = '{namespace=~"$namespace", job=~"$job"}'
"""Selector of the jobs that are chosen in the dashboard."""
_RATE = "[$__rate_interval]"


def documents(labels: dict[str, str], namespace: str = OPERATOR_NAMESPACE) -> list[Document]:
    """Return the objects, in the operator's namespace. Jobs are found in all namespaces."""
    meta: Document = {"name": NAME, "namespace": namespace, "labels": dict(labels)}
    dashboard_meta = {**meta, "name": f"{NAME}-dashboard", "labels": {**labels, "grafana_dashboard": "1"}}
    api = {"apiVersion": "monitoring.coreos.com/v1"}
    return [
        {**api, "kind": "PodMonitor", "metadata": meta, "spec": _pod_monitor()},
        {**api, "kind": "PrometheusRule", "metadata": meta, "spec": {"groups": [{"name": NAME, "rules": alerts()}]}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": dashboard_meta, "data": {"outlast.json": json.dumps(dashboard())}},
    ]


def _pod_monitor() -> Document:
    """Return the spec for the pods of the operator and of all workers. `honorLabels`, since their metrics have the labels
    `namespace` and `job` of the job, which Prometheus would else rename."""
    component = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["operator", "worker"]}
    return {
        "namespaceSelector": {"any": True},
        "selector": {"matchLabels": {"app.kubernetes.io/name": "outlast"}, "matchExpressions": [component]},
        "podMetricsEndpoints": [{"port": "probes", "path": "/metrics", "honorLabels": True}],
    }


def alerts() -> list[Document]:
    """Return the alerting rules."""
    job, why = "{{ $labels.namespace }}/{{ $labels.job }}", "outlast why {{ $labels.job }} --namespace {{ $labels.namespace }}"
    steps = "clamp_min(delta(outlast_job_step[1h]), 1)"
    return [
        _alert(
            "OutlastJobStalled", f"outlast_progress_age_seconds > {STALLED_S}", f"{job} makes no progress", f"{why} says why."
        ),
        _alert(
            "OutlastStepsLost",
            f"increase(outlast_lost_steps_total[1h]) > {LOST_SHARE} * {steps}",
            f"{job} has lost many steps in the last hour",
            "{{ $value | humanize }} steps were repeated; outlast report {{ $labels.job }} says after which failures.",
        ),
        _alert(
            "OutlastSaveOld",
            f"outlast_commit_age_seconds > {UNSAVED_S}",
            f"{job} has no new checkpoint for {{{{ $value | humanizeDuration }}}}",
            f"{why} says why.",
        ),
        _alert(
            "OutlastOperatorSilent",
            "absent(outlast_operator_leader == 1)",
            "No operator of Outlast leads",
            "Jobs that train go on, but lost workers are not replaced and new jobs wait. Look at the pods of outlast-operator.",
            severity="critical",
            lasting="5m",
        ),
    ]


def _alert(name: str, expr: str, summary: str, description: str, *, severity: str = "warning", lasting: str = "1m") -> Document:
    texts = {"summary": summary, "description": description}
    return {"alert": name, "expr": expr, "for": lasting, "labels": {"severity": severity}, "annotations": texts}


def _mean(summary: str) -> str:
    """Return the mean of a summary over the last minutes."""
    return f"rate({summary}_sum{_SHOWN}{_RATE}) / rate({summary}_count{_SHOWN}{_RATE})"


PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Goodput", "percentunit", {f"outlast_goodput_ratio{_SHOWN}": "{{job}}"}),
    ("Steps", "none", {f"outlast_job_step{_SHOWN}": "{{job}}"}),
    ("Jobs by state", "none", {"sum by (state) (outlast_jobs)": "{{state}}"}),
    (
        "Training time lost",
        "s",
        {f"sum by (namespace, job, cause) (increase(outlast_lost_seconds_total{_SHOWN}[1h]))": "{{job}} {{cause}}"},
    ),
    ("Steps lost", "none", {f"increase(outlast_lost_steps_total{_SHOWN}[1h])": "{{job}}"}),
    (
        "Recovery, 90 % within",
        "s",
        {"histogram_quantile(0.9, sum by (le, cause) (rate(outlast_recovery_seconds_bucket[1h])))": "{{cause}}"},
    ),
    ("Step", "s", {_mean("outlast_step_seconds"): "{{job}} rank {{rank}}"}),
    ("Waiting for data", "percentunit", {f"rate(outlast_data_stall_seconds_total{_SHOWN}{_RATE})": "{{job}} rank {{rank}}"}),
    ("Steps that a failure would repeat", "none", {f"max by (namespace, job) (outlast_snapshot_age_steps{_SHOWN})": "{{job}}"}),
    (
        "Checkpoint",
        "s",
        {_mean(f"outlast_checkpoint_{what}_seconds"): f"{{{{job}}}} {what}" for what in ("stall", "save", "upload")},
    ),
    ("Age of the newest checkpoint", "s", {f"outlast_commit_age_seconds{_SHOWN}": "{{job}}"}),
    ("Checkpoints to upload", "bytes", {f"max by (namespace, job) (outlast_sync_backlog_bytes{_SHOWN})": "{{job}}"}),
    ("GPU use", "percentunit", {f"outlast_gpu_use_ratio{_SHOWN}": "{{job}} worker {{worker}} GPU {{gpu}}"}),
    (
        "GPU memory",
        "percentunit",
        {f"outlast_gpu_memory_used_bytes{_SHOWN} / outlast_gpu_memory_bytes{_SHOWN}": "{{job}} worker {{worker}} GPU {{gpu}}"},
    ),
    (
        "Restarts and interruptions in an hour",
        "none",
        {
            "sum by (cause) (increase(outlast_restarts_total[1h]))": "restarts: {{cause}}",
            "sum by (cause) (increase(outlast_interruptions_total[1h]))": "interruptions: {{cause}}",
        },
    ),
)
"""Title, unit and queries of each panel; the legend of each query."""


def dashboard() -> Document:
    """Return the dashboard in Grafana's JSON model."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": _SIZE, "w": _SIZE, "x": number * _SIZE % 24, "y": number * _SIZE // 24 * _SIZE},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + each), "expr": expr, "legendFormat": legend}
                for each, (expr, legend) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, queries) in enumerate(PANELS)
    ]
    every = {"includeAll": True, "multi": True, "refresh": 2, "current": {"text": "All", "value": "$__all"}}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        *(
            {"name": name, "type": "query", "datasource": source, "query": f"label_values({metric}, {name})", **every}
            for name, metric in (("namespace", "outlast_job_step"), ("job", 'outlast_job_step{namespace=~"$namespace"}'))
        ),
    ]
    return {
        "uid": NAME,
        "title": "Outlast",
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }
