"""A WorkflowTemplate of Argo Workflows whose template `train` submits a job and waits, with its account and rights.

https://argo-workflows.readthedocs.io/en/latest/fields/#template
"""

from __future__ import annotations

import base64
import hashlib

from outlast.contract import Env
from outlast.kube.kinds import WORKFLOW
from outlast.manifests import labels, rbac, volumes
from outlast.manifests.pipelines.outputs import OUTPUTS
from outlast.manifests.pipelines.step import CODE, COMMAND, INPUTS, Step, confined
from outlast.manifests.pipelines.step import namespace as step_namespace
from outlast.manifests.request import Document

ACCOUNT = "outlast-pipeline"
"""ServiceAccount of the steps."""
TEMPLATE = "train"
_OUTPUTS = "/tmp/outputs"
_LABELS = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/part-of": "outlast"}
_RETRY: Document = {
    "limit": "20",
    "retryPolicy": "Always",
    "backoff": {"duration": "30s", "factor": "1"},
    "expression": "lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [-1, 137, 143]",
}
"""A pod that is lost is made again and attaches to the job; a job that has failed (exit code 3) fails the step."""


def documents(step: Step, name: str, namespace: str = "", account: str = ACCOUNT) -> list[Document]:
    """The account, its rights, the code, and the WorkflowTemplate `name`. Raises OutlastError without a namespace."""
    meta: Document = {"namespace": step_namespace(namespace, step.job), "labels": dict(_LABELS)}
    found: list[Document] = [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, **meta}}]
    found += rbac.step(f"{account}-{name}", meta["namespace"], step.kinds, [account])  # other templates need other rights
    code = f"{name}-step-{hashlib.sha256(step.code).hexdigest()[:8]}" if step.code else ""
    if code:
        data = {volumes.archive(step.job.spec.code): base64.b64encode(step.code).decode()}
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": code, **meta}, "immutable": True, "binaryData": data}
        )
    spec = {"entrypoint": TEMPLATE, "serviceAccountName": account, "templates": [_template(step, code, account)]}
    found.append(
        {"apiVersion": WORKFLOW.api_version, "kind": "WorkflowTemplate", "metadata": {"name": name, **meta}, "spec": spec}
    )
    return found


def _template(step: Step, code: str, account: str) -> Document:
    inputs = [{"name": "key", "value": "{{workflow.uid}}", "description": "The run of the pipeline: one job for each"}]
    inputs += [{"name": name, "value": value, "description": about} for name, (value, about) in INPUTS.items()]
    values = {name: f"{{{{inputs.parameters.{name}}}}}" for name in INPUTS}
    mounts = {"tmp": "/tmp", **({"code": CODE} if code else {})}
    scratch: list[Document] = [{"name": "tmp", "emptyDir": {}}]
    container: Document = {
        "image": step.image,
        "command": list(COMMAND),
        "args": [*step.args(values, "{{inputs.parameters.key}}"), "--outputs", _OUTPUTS],
        "env": [
            {"name": Env.POD, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        **confined(mounts),
    }
    if step.secrets:
        container["envFrom"] = [{"secretRef": {"name": name, "optional": True}} for name in step.secrets]
    return {
        "name": TEMPLATE,
        "metadata": {
            "labels": {**_LABELS, "app.kubernetes.io/component": "pipeline-step", **labels.UNMESHED},
        },
        "inputs": {"parameters": inputs},
        "outputs": {
            "parameters": [
                {"name": name, "description": output.about, "valueFrom": {"path": f"{_OUTPUTS}/{name}", "default": ""}}
                for name, output in OUTPUTS.items()
            ]
        },
        "retryStrategy": dict(_RETRY),
        "serviceAccountName": account,
        "securityContext": volumes.security(),
        "container": container,
        "volumes": [*scratch, *([{"name": "code", "configMap": {"name": code}}] if code else [])],
    }
