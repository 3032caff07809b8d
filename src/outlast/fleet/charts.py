"""Helm charts: where each is from, its pinned version, its values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outlast.fleet import autoscaler, karpenter
from outlast.fleet.model import Cluster, Document, Volcano


def _defaults(_: Cluster) -> Document:
    return {}


def _prometheus(_: Cluster) -> Document:
    """It looks for monitors in all namespaces, whoever has installed them."""
    everywhere = ("podMonitor", "serviceMonitor", "rule", "probe")
    return {"prometheus": {"prometheusSpec": {f"{each}SelectorNilUsesHelmValues": False for each in everywhere}}}


@dataclass(frozen=True)
class Chart:
    """A chart that an add-on stands for."""

    field: str
    """Its field in `addons`."""
    name: str
    """Name of the release."""
    chart: str
    """An `oci://` URL, or its name in `repository`."""
    version: str
    namespace: str
    values: Callable[[Cluster], Document]
    sentence: str
    repository: str = ""


CHARTS = (
    Chart(
        "autoscaler",
        "cluster-autoscaler",
        "cluster-autoscaler",
        "9.46.6",
        "kube-system",
        autoscaler.values,
        "add nodes to node groups for pending pods, in the order of their priorities",
        "https://kubernetes.github.io/autoscaler",
    ),
    Chart(
        "karpenter",
        "karpenter",
        "oci://public.ecr.aws/karpenter/karpenter",
        "1.14.1",
        karpenter.NAMESPACE,
        karpenter.values,
        "make nodes for pending pods, from NodePools in the order of their weights",
    ),
    Chart(
        "volcano",
        "volcano",
        "volcano",
        "1.12.1",
        "volcano-system",
        _defaults,
        "start all workers of a job or none",
        "https://volcano-sh.github.io/helm-charts",
    ),
    Chart(
        "kueue",
        "kueue",
        "oci://registry.k8s.io/kueue/charts/kueue",
        "0.13.4",
        "kueue-system",
        _defaults,
        "admit jobs to queues",
    ),
    Chart(
        "prometheus",
        "prometheus",
        "kube-prometheus-stack",
        "75.15.1",
        "monitoring",
        _prometheus,
        "collect metrics, with Alertmanager and Grafana",
        "https://prometheus-community.github.io/helm-charts",
    ),
)


def wanted(cluster: Cluster) -> list[tuple[Chart, str]]:
    """The charts of the cluster's add-ons and their versions."""
    found = [(chart, getattr(cluster.addons, chart.field)) for chart in CHARTS]
    return [(chart, addon.version or chart.version) for chart, addon in found if addon]


def queues(volcano: Volcano) -> list[Document]:
    """The Queue objects of Volcano, which jobs name in `scheduling.queue`."""
    return [
        {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "Queue",
            "metadata": {"name": queue.name, "labels": {"app.kubernetes.io/managed-by": "outlast"}},
            "spec": {
                "weight": queue.weight,
                "reclaimable": queue.reclaimable,
                **({"capability": {name: str(value) for name, value in queue.capability.items()}} if queue.capability else {}),
            },
        }
        for queue in volcano.queues
    ]
