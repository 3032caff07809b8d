"""What a process answers at /metrics, read by Prometheus' own parser."""

from __future__ import annotations

import urllib.request
from collections.abc import Collection, Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from outlast.job.prometheus_metrics import TABLE


def scrape(address: str) -> list[Metric]:
    """Read the metrics of `host:port`; without a host, of this machine."""
    host, _, port = address.rpartition(":")
    with urllib.request.urlopen(f"http://{host or '127.0.0.1'}:{port}/metrics", timeout=60) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def check(families: Iterable[Metric], source: str, *, missing: Collection[str] = ()) -> None:
    """Assert that these are the table's metrics of a process, except for some, with their types, texts and labels."""
    rows = {row.name.removesuffix("_total"): row for row in TABLE if row.source == source and row.name not in missing}
    found = {each.name: (each.type, each.documentation) for each in families}
    assert found == {name: (row.type, row.help) for name, row in rows.items()}
    labels = {(each.name, *sorted(sample.labels.keys() - {"le"})) for each in families for sample in each.samples}
    assert labels == {(name, *sorted(row.labels)) for name, row in rows.items()}
