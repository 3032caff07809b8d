"""The alerts and the dashboard: queries that Prometheus can parse, of metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import promql_parser
import pytest

from outlast.job.contract import Pod
from outlast.job.prometheus_metrics import METRICS, TABLE, WORKER
from outlast.kubernetes.manifests import labels
from outlast.kubernetes.manifests.installed import operator_deployment

MONITOR, RULE, DASHBOARD = operator_deployment.files(operator_namespace="here")["monitoring/monitoring.yaml"]
BOARD = json.loads(DASHBOARD["data"]["outlast.json"])
SUFFIXES = {"summary": ("_sum", "_count"), "histogram": ("_sum", "_count", "_bucket")}
SERIES = {f"{row.name}{suffix}": row for row in TABLE for suffix in SUFFIXES.get(row.type, ("",))}
"""The row of the table for each name that a query may use."""


def queries() -> Iterator[tuple[str, str]]:
    """Each query, and the text that shows its labels. Prometheus adds the namespace to what it reads from a worker."""
    for alert in RULE["spec"]["groups"][0]["rules"]:
        yield alert["expr"], " ".join(alert["annotations"].values())
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in BOARD["templating"]["list"]:
        if found := re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]):
            yield found[1], f"{{{{{found[2]}}}}}"


@pytest.mark.parametrize(("query", "shown"), [*queries()])
def test_alerts_and_dashboard_name_only_what_exists(query: str, shown: str) -> None:
    promql_parser.parse(query.replace("$__rate_interval", "5m"))
    rows = [SERIES[name] for name in re.findall(r"\boutlast_\w+", query)]
    assert rows
    used = {*re.findall(r"(\w+)=~", query), *re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", shown)}
    kept = [set(names.split(", ")) for names in re.findall(r"by \(([\w, ]+)\)", query)]
    for row in rows:
        exist = {*row.labels, "le" if row.type == "histogram" else "", "namespace" if row.source == WORKER else ""}
        assert used | set().union(*kept) <= exist
    for names in kept:
        assert set(re.findall(r"\{\{(\w+)\}\}", shown)) <= names, "a legend shows labels that the query keeps"


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len(METRICS) == len(TABLE)
    assert [row.name for row in TABLE if row.name.endswith("_total") != (row.type == "counter")] == []
    assert [row.name for row in TABLE if not re.fullmatch(r"outlast(_[a-z]+[0-9]*)+", row.name) or row.help[-1:] != "."] == []


def test_the_monitor_selects_operator_and_workers_and_the_sidecar_finds_the_dashboard() -> None:
    assert {each["metadata"]["namespace"] for each in (MONITOR, RULE, DASHBOARD)} == {"here"}
    wanted = MONITOR["spec"]["selector"]
    ((component,),) = (wanted["matchExpressions"],)
    operator = operator_deployment.files()["operator.yaml"][0]["spec"]["template"]
    for pod in (operator["metadata"]["labels"], {"app.kubernetes.io/name": "outlast", **labels.selector("train")}):
        assert pod.items() >= wanted["matchLabels"].items()
        assert pod[component["key"]] in component["values"]
    (port,) = operator["spec"]["containers"][0]["ports"]
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == (port["name"], True)
    assert port["containerPort"] == Pod.PROBE_PORT
    assert DASHBOARD["metadata"]["labels"]["grafana_dashboard"] == "1"
