"""What the step of every engine has in common: the job that it submits, its code, and its container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from outlast import spec
from outlast.errors import OutlastError
from outlast.kube.kinds import Kind
from outlast.manifests import install, volumes
from outlast.manifests.request import Document

COMMAND = ("outlast", "pipeline", "step")
CODE = "/tmp/outlast-step"
"""Directory of the archive of code in the step's container."""
INPUTS: Mapping[str, tuple[str, str]] = {
    "workers": ("0", "Number of workers; 0: as in the job file"),
    "set": ("", "Fields of the job file, a KEY=VALUE on each line, as for --set"),
    "args": ("", "Arguments of the script, as in a shell, in place of those in the job file"),
    "on-terminate": ("cancel", "What becomes of the job when the pipeline is terminated: cancel or leave"),
}
"""Inputs that have a default, and what they mean. They are options of `outlast pipeline step`, too."""


@dataclass(frozen=True)
class Step:
    """A step that trains."""

    job: spec.Job
    """Its code is where the step finds it: in its image, in a store, or below `CODE`."""
    topology: str
    kinds: Sequence[Kind]
    """Of the job's documents."""
    code: bytes = b""
    """The archive of code that the step brings along; empty when it needs none."""
    image: str = install.IMAGE

    @property
    def text(self) -> str:
        """The job file, with what its author has set: `workers.max` follows another `workers.replicas`."""
        document = _written(self.job.model_dump(mode="json", by_alias=True, exclude_unset=True))
        return yaml.safe_dump(document, sort_keys=False, width=120)

    @property
    def secrets(self) -> list[str]:
        """Secrets of the job that are variables: with them the step reads the job's store."""
        return [secret.name for secret in self.job.spec.secrets if secret.to is None]

    def args(self, values: Mapping[str, Any], key: Any) -> list[Any]:
        """Arguments of the container. `values` are those of `INPUTS`, and `key` that of the run, in the words of the engine."""
        given = [word for name in INPUTS for word in (f"--{name}", values[name])]
        return ["--job", self.text, "--as", self.topology, "--idempotency-key", key, *given]


def _written(value: Any) -> Any:
    """A JSON value without the empty fields that a job gets when its paths are made absolute."""
    if isinstance(value, dict):
        return {name: kept for name, each in value.items() if (kept := _written(each)) not in (None, [], {})}
    return value


def carried(job: spec.Job) -> spec.Job:
    """A job whose code is shipped in a ConfigMap, with that code in the step's container, which ships it with the job."""
    checksum = volumes.checksum(job.spec.code)
    changed = job.spec.model_copy(update={"code": f"{CODE}/{volumes.archive(job.spec.code)}#sha256={checksum}"})
    return job.model_copy(update={"spec": changed})


def namespace(given: str, job: spec.Job) -> str:
    """The namespace of the steps: the one that is given, else the job's. Raises OutlastError when there is neither."""
    if found := given or job.metadata.namespace:
        return found
    raise OutlastError("the rights of a step name the namespace of its account; say which: -n NAMESPACE")


def confined(mounts: Mapping[str, str]) -> Document:
    """Security context, resources and mounts (name -> path) of the container."""
    return {
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": volumes.confined(),
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
