"""CloudWatch's agent, as a pod that scrapes the operator: what a cluster needs so that metrics of jobs reach CloudWatch.

It runs in the namespace in which AWS's instructions have it, as it does not fit the restricted one of the operator, with an
account of its own, which may look for the operator's pods and nothing else. In AWS it has the rights of that account's Pod
Identity, or those of the node: the policy CloudWatchAgentServerPolicy.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/ContainerInsights-Prometheus-Setup.html
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml

from outlast import contract
from outlast.contract import OPERATOR_NAMESPACE
from outlast.manifests.request import Document

NAME = "outlast-cloudwatch"
NAMESPACE = "amazon-cloudwatch"
"""That of the add-on for Container Insights as well."""
IMAGE = "public.ecr.aws/cloudwatch-agent/cloudwatch-agent:1.300056.0b1123"
"""The version in AWS's instructions."""
LABELS = {
    "app.kubernetes.io/name": "outlast",
    "app.kubernetes.io/component": "cloudwatch",
    "app.kubernetes.io/managed-by": "outlast",
    "app.kubernetes.io/part-of": "outlast",
}
_SETTINGS, _SCRAPE = "cwagentconfig.json", "prometheus.yaml"


def namespace() -> Document:
    """The agent's namespace, where it does not exist: others run there as well, so it has no label of ours."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


def documents(settings: Mapping[str, Any], *, operator: str = OPERATOR_NAMESPACE, image: str = IMAGE) -> list[Document]:
    """The objects, in the order of creation; `settings` are the agent's, `operator` is the operator's namespace."""
    config = {_SETTINGS: json.dumps(settings, indent=2), _SCRAPE: yaml.safe_dump(scrape(operator))}
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return [
        _document("v1", "ServiceAccount", NAMESPACE),
        _document("rbac.authorization.k8s.io/v1", "Role", operator, rules=[pods]),
        _document("rbac.authorization.k8s.io/v1", "RoleBinding", operator, roleRef=role, subjects=[account]),
        _document("v1", "ConfigMap", NAMESPACE, data=config),
        _document("apps/v1", "Deployment", NAMESPACE, spec=_deployment(config, image)),
    ]


def scrape(namespace: str) -> Document:
    """What is scraped: the pods of the operator, once a minute. A job's own label `job` becomes `training_job`, as Prometheus
    sets `job` itself."""
    operator = {
        "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"],
        "regex": "operator",
        "action": "keep",
    }
    port = {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": "probes", "action": "keep"}
    return {
        "global": {"scrape_interval": "1m", "scrape_timeout": "10s"},
        "scrape_configs": [
            {
                "job_name": "outlast-operator",
                "metrics_path": "/metrics",
                "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [namespace]}}],
                "relabel_configs": [operator, port, {"target_label": "service", "replacement": "outlast-operator"}],
                "metric_relabel_configs": [{"source_labels": ["exported_job"], "target_label": "training_job"}],
            }
        ],
    }


def _deployment(config: Mapping[str, str], image: str) -> Document:
    selected = {key: LABELS[key] for key in ("app.kubernetes.io/name", "app.kubernetes.io/component")}
    changed = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
    container = {
        "name": "agent",
        "image": image,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1000Mi"}},
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/cwagentconfig"},
            {"name": "scrape", "mountPath": "/etc/prometheusconfig"},
        ],
    }
    spec = {
        "serviceAccountName": NAME,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": name, "configMap": {"name": NAME, "items": [{"key": file, "path": file}]}}
            for name, file in (("settings", _SETTINGS), ("scrape", _SCRAPE))
        ],
    }
    # Another configuration is another pod: the agent reads its files once.
    annotations = {f"{contract.GROUP}/config": changed}
    return {
        "replicas": 1,
        "selector": {"matchLabels": selected},
        "template": {"metadata": {"labels": dict(LABELS), "annotations": annotations}, "spec": spec},
    }


def _document(api_version: str, kind: str, namespace: str, **fields: Any) -> Document:
    meta = {"name": NAME, "namespace": namespace, "labels": dict(LABELS)}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}
