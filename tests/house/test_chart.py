"""deploy/chart, rendered by Helm's own library: the same documents as `outlast install` applies, for every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.kubernetes.jobs import installation
from outlast.kubernetes.manifests.installed import operator_deployment

helm = pytest.importorskip("helm_python", reason="has Helm's library for amd64 only")
CHART = Path(__file__).parents[2] / "deploy" / "chart"
IMAGE = "registry:5000/operator@sha256:1"
Document = dict[str, Any]


def rendered(values: Document, *, namespace: str = "outlast-system") -> dict[tuple[str, str], Document]:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="outlast", namespace=namespace).values()
    return named([each for text in texts for each in yaml.safe_load_all(text) if each])


def named(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, {}),
        ({"onDemand": True, "image": IMAGE}, {"on_demand": True, "image": IMAGE}),
        ({"namespace": {"name": "123"}, "nodeWatch": {"enabled": True}}, {"namespace": "123", "watch": True}),
    ],
)
def test_the_chart_is_what_is_installed(values: Document, options: Document) -> None:
    values = {**values, "namespace": {"create": True, **values.get("namespace", {})}}
    found = rendered(values)
    for (kind, _), document in found.items():
        if kind == "CustomResourceDefinition":
            assert document["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}, "all jobs would go with it"
    assert found == named(installation.documents(**options))


def test_monitoring_is_made_where_it_is_wanted() -> None:
    """Helm leaves the templates of alerts and dashboard as they are."""
    found = rendered({"monitoring": {"enabled": True, "labels": {"release": "prometheus"}}})
    documents = operator_deployment.files()["monitoring/monitoring.yaml"]
    for document in documents:
        document["metadata"]["labels"]["release"] = "prometheus"
    assert found.items() >= named(documents).items()


def test_values_reach_the_documents_and_others_are_refused() -> None:
    given = {"replicas": 3, "resources": {"limits": {"memory": "1Gi"}}, "crds": {"install": False}}
    found = rendered(given, namespace="team")
    spec = found["Deployment", "outlast-operator"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], container["resources"]["limits"]) == (3, {"memory": "1Gi"})
    assert {each["metadata"].get("namespace", "team") for each in found.values()} == {"team"}
    assert {kind for kind, _ in found} & {"Namespace", "CustomResourceDefinition", "DaemonSet"} == set()
    for wrong, sentence in (({"nodewatch": {}}, "'nodewatch' not allowed"), ({"replicas": "two"}, "got string, want integer")):
        with pytest.raises(helm.HelmValuesError, match=sentence):
            rendered(wrong)


def test_helm_finds_nothing_wrong() -> None:
    assert [each for each in helm.lint(CHART, strict=True)["messages"] if each["severity"] > 1] == []
