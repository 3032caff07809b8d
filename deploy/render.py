"""Writes what is installed in a cluster into this directory, from outlast.kubernetes.manifests.installed.operator_deployment:

python deploy/render.py

`chart/` holds the same documents for Helm. What an installation may choose is a value there: the templates are the rendered
documents, in which these places hold an expression instead.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from outlast import __version__
from outlast.cli.cluster import render
from outlast.kubernetes.manifests.installed import operator_deployment

HERE = Path(__file__).parent
HEAD = "# Written by `python deploy/render.py` from src/outlast/kubernetes/manifests/installed/operator_deployment.py.\n"
NAMESPACE, IMAGE, REPLICAS, RESOURCES, WATCHER, AFFINITY, LABEL = (
    f"chart-{name}" for name in ("namespace", "image", "replicas", "resources", "watcher", "affinity", "label")
)
"""Stand for values in the documents of which templates are made."""
EXPRESSIONS = {
    NAMESPACE: "{{ .Values.namespace.name | default .Release.Namespace | quote }}",
    IMAGE: "{{ .Values.image | quote }}",
    REPLICAS: "{{ .Values.replicas }}",
    RESOURCES: "{{ .Values.resources | toJson }}",
    WATCHER: "{{ .Values.nodeWatch.resources | toJson }}",
}
CONDITIONS = {
    "namespace.yaml": "namespace.create",
    "crd.yaml": "crds.install",
    "node-watch/node-watch.yaml": "nodeWatch.enabled",
    "monitoring/monitoring.yaml": "monitoring.enabled",
}
"""The value on which a file depends."""
VALUES = """\
# The image of the operator and of the node watcher.
image: {image}
# Pods of the operator: one leads, the others stand by.
replicas: {replicas}
# Resources of each pod of the operator.
resources: {resources}
# Whether the operator avoids spot machines.
onDemand: false
namespace:
  # The operator's namespace. Default: that of the release.
  name: ""
  # Whether the chart makes the operator's namespace, with the restricted Pod Security Standard. Helm makes that of the release.
  create: false
crds:
  # The definitions of ElasticJob. They and all jobs stay when the release is uninstalled.
  install: true
nodeWatch:
  # Also a watcher on each node of AWS, for spot machines and maintenance, in the namespace outlast-node-watch.
  enabled: false
  resources: {watcher}
monitoring:
  # Also a PodMonitor and alerts, where the Prometheus Operator is installed, and a dashboard for Grafana's sidecar.
  enabled: false
  # Labels by which Prometheus selects PodMonitors and rules, such as release: kube-prometheus-stack.
  labels: {{}}
"""


def pages() -> dict[str, str]:
    """The text of each file, by its path below this directory."""
    files = {name: HEAD + render.text(documents) for name, documents in operator_deployment.files().items()}
    return {**files, **{f"chart/{name}": text for name, text in chart().items()}}


def chart() -> dict[str, str]:
    """The text of each file of the chart, by its path below the chart."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    about = {
        "apiVersion": "v2",
        "name": project["name"],
        "description": project["description"],
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "home": project["urls"]["Documentation"],
        "sources": [project["urls"]["Source"]],
    }
    files = operator_deployment.files(operator_namespace=NAMESPACE, image=IMAGE, on_demand=True)
    (operator,), watcher = files["operator.yaml"], files["node-watch/node-watch.yaml"][-1]
    pod = operator["spec"]["template"]["spec"]
    given = {"image": operator_deployment.OPERATOR_IMAGE, "replicas": operator["spec"]["replicas"]}
    given |= {"resources": json.dumps(_replace_resources(operator, RESOURCES))}
    given |= {"watcher": json.dumps(_replace_resources(watcher, WATCHER))}
    operator["spec"]["replicas"] = REPLICAS
    affinity, pod["affinity"] = json.dumps(pod["affinity"]), AFFINITY
    for document in files["monitoring/monitoring.yaml"]:
        document["metadata"]["labels"] = {**document["metadata"]["labels"], LABEL: ""}
    for definition in files["crd.yaml"]:
        definition["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    values = VALUES.format_map(given)
    schema = _schema(yaml.safe_load(values))
    schema["properties"]["global"] = {"type": "object"}  # a chart that has this one as a part hands its own on
    return {
        "Chart.yaml": HEAD + yaml.safe_dump(about, sort_keys=False),
        "values.yaml": HEAD + values,
        "values.schema.json": json.dumps(schema, indent=2) + "\n",
        **{
            f"templates/{name.rpartition('/')[2]}": HEAD + _template(render.text(documents), affinity, CONDITIONS.get(name))
            for name, documents in files.items()
            if not name.endswith("kustomization.yaml")
        },
    }


def _replace_resources(workload: dict[str, Any], by: str) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    resources: dict[str, Any] = container["resources"]
    container["resources"] = by
    return resources


def _template(text: str, affinity: str, condition: str | None) -> str:
    """Make a template of rendered documents."""
    text = text.replace("{{", '{{ "{{" }}')  # Prometheus' and Grafana's own templates
    for name, expression in EXPRESSIONS.items():
        text = re.sub(rf"\b{name}$", lambda _, put=expression: put, text, flags=re.MULTILINE)
    spot = rf"{{{{- if .Values.onDemand }}}}\n\1{affinity}\n{{{{- end }}}}\n"
    text = re.sub(rf"^( *affinity: ){AFFINITY}\n", spot, text, flags=re.MULTILINE)
    labels = "{{- range $name, $value := .Values.monitoring.labels }}\n\\1{{ $name }}: {{ $value | quote }}\n{{- end }}\n"
    text = re.sub(rf"^( *){LABEL}: ''\n", labels, text, flags=re.MULTILINE)
    return f"{{{{- if .Values.{condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text


def _schema(value: Any, *, free: bool = False) -> dict[str, Any]:
    """A JSON Schema of the values: an unknown name or another type is an error. Resources and labels are free."""
    if isinstance(value, dict):
        fields = {name: _schema(each, free=name in ("resources", "labels")) for name, each in value.items()}
        return {"type": "object"} if free else {"type": "object", "additionalProperties": False, "properties": fields}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}


if __name__ == "__main__":
    for name, text in pages().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
