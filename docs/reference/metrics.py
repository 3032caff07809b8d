"""Writes the reference page of the metrics from their table:

python docs/reference/metrics.py > docs/reference/metrics.md
"""

from __future__ import annotations

from outlast.job.prometheus_metrics import OPERATOR, TABLE, WORKER
from outlast.kubernetes.manifests.installed import operator_deployment

HEAD = """\
# Metrics

<!-- Written by `python docs/reference/metrics.py > docs/reference/metrics.md` from src/outlast/job/prometheus_metrics.py. -->

The operator and every worker answer Prometheus at `/metrics` of the port `probes` (8080). Where the Prometheus Operator is
installed, this brings a PodMonitor, alerts, and a dashboard that the sidecar of Grafana's Helm chart finds:

```
kubectl apply -k deploy/monitoring
helm upgrade outlast deploy/chart --reuse-values --set monitoring.enabled=true \\
  --set monitoring.labels.release=kube-prometheus-stack
```

`monitoring.labels` are those by which your Prometheus selects PodMonitors and rules. For a Grafana without the sidecar, import
what this prints:

```
kubectl -n outlast-system get configmap outlast-dashboard -o 'jsonpath={.data.outlast\\.json}'
```

A Prometheus of your own needs `honor_labels: true` for these pods: `namespace` and `job` are those of the job.
"""
SECTIONS = {
    OPERATOR: """\
The leader knows the jobs, a standby none. Counters of one job go on when another operator leads, the others begin at 0
with each process. Goodput and lost time are computed beside rank 0, of jobs that write to a store, every 10 seconds or
less often; a failure counts once training goes on. The cause of lost time is `oom`, `disk`, `hang`, `killed` or
`error`; `lost` for a worker that is gone or unreachable; `interruption` and `change` for what was planned. Recoveries
have the causes of failures, or `lost`.
""",
    WORKER: """\
The agent in each worker's pod answers; on one machine at the address that `outlast status NAME` shows. Metrics with
`rank` are counted by each training process and begin at 0 with it. A summary has `_sum` and `_count`:
`rate(..._sum[5m]) / rate(..._count[5m])` is the mean of the last minutes. Scripts without a session report steps alone,
with `outlast.training.progress`. GPUs are those that NVML shows in the pod, by its numbers.
""",
}


def page() -> str:
    """The page, in Markdown."""
    sections = [HEAD]
    for source, text in SECTIONS.items():
        rows = [
            f"| `{row.name}{'{' + ','.join(row.labels) + '}' if row.labels else ''}` | {row.type} | {row.help} |"
            for row in TABLE
            if row.source == source
        ]
        sections.append("\n".join([f"## {source.capitalize()}", "", text, "| metric | type | |", "|---|---|---|", *rows, ""]))
    _, alerts, _ = operator_deployment.files()["monitoring/monitoring.yaml"]
    rules = [
        f"| `{each['alert']}` | `{each['expr']}` | {each['for']} | {each['labels']['severity']} |"
        for each in alerts["spec"]["groups"][0]["rules"]
    ]
    sections.append("\n".join(["## Alerts", "", "| alert | when | for | severity |", "|---|---|---|---|", *rules, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    print(page(), end="")
