"""A component of Kubeflow Pipelines that submits a job and waits, and the rights of its account.

`kfp.components.load_component_from_text` reads it, of version 2 as of version 1:
https://www.kubeflow.org/docs/components/pipelines/legacy-v1/reference/component-spec/
"""

from __future__ import annotations

import base64

from outlast.manifests import rbac
from outlast.manifests.pipelines.outputs import OUTPUTS
from outlast.manifests.pipelines.step import COMMAND, INPUTS, Step
from outlast.manifests.pipelines.step import namespace as step_namespace
from outlast.manifests.request import Document

ACCOUNTS = ("default-editor", "pipeline-runner")
"""ServiceAccounts of steps: in a profile's namespace, and in an installation for one user."""
ROLE = "outlast-kfp"
"""Beginning of the name of a Role."""
LARGEST = 64 << 10
"""The largest archive of code that is an argument: Linux allows 128 KiB for one, and a third is added by base64."""
_TYPES = {"workers": "Integer"}


def component(step: Step, name: str) -> Document:
    """The component."""
    inputs: list[Document] = [
        {
            "name": "key",
            "type": "String",
            "description": "The run of the pipeline: one job for each. dsl.PIPELINE_JOB_ID_PLACEHOLDER",
        }
    ]
    named = {name: name.replace("-", "_") for name in INPUTS}
    for each, (default, about) in INPUTS.items():
        inputs.append({"name": named[each], "type": _TYPES.get(each, "String"), "default": default, "description": about})
    args = step.args({each: {"inputValue": named[each]} for each in INPUTS}, {"inputValue": "key"})
    if step.code:
        args += ["--code", base64.b64encode(step.code).decode()]
    for each in OUTPUTS:
        args += [each, {"outputPath": each}]
    variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}
    return {
        "name": name,
        "description": f"Trains {step.job.metadata.name} with Outlast, and waits for the end",
        "inputs": inputs,
        "outputs": [{"name": each, "type": output.type, "description": output.about} for each, output in OUTPUTS.items()],
        "implementation": {"container": {"image": step.image, "command": list(COMMAND), "args": args, "env": variables}},
    }


def rights(step: Step, name: str, namespace: str, accounts: tuple[str, ...] = ACCOUNTS) -> list[Document]:
    """What is to be added for a component to the rights of a profile's accounts. Raises OutlastError without a namespace."""
    return rbac.step(f"{ROLE}-{name}", step_namespace(namespace, step.job), step.kinds, accounts)
