"""A request to render a job: the job, its names, its run and its local files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.base.errors import InvalidJob
from outlast.job import spec
from outlast.kubernetes.manifests.names import Names

Document = dict[str, Any]
"""A Kubernetes document, with its keys in output order."""
OPERATOR_IMAGE = "ghcr.io/outlast/operator:0.1"


@dataclass(frozen=True)
class Request:
    job: spec.Job
    names: Names
    run: str
    """Id of this submission; see `contract.Env.RUN`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of local files that pods need, keyed by path."""
    code: bytes = b""
    """The code archive for the ConfigMap; empty if there is no archive or the ConfigMap already exists."""
    fresh: bool = False
    """Whether to ignore checkpoints; see `contract.Env.FRESH`."""
    agent_image: str = OPERATOR_IMAGE
    """Image from which pods get the agent if their own image lacks Outlast."""
    job_file_in_annotation: bool = False
    """Whether pods have the job file in an annotation instead of in a ConfigMap."""
    key_required: bool = False
    """Whether pods wait for the Secret with the run's key, since other workers have that key; see `contract.Annotation.KEY`."""

    @property
    def spec(self) -> spec.Spec:
        return self.job.spec

    def image(self) -> str:
        """Return the image for the job's pods. Raises InvalidJob if there is none."""
        if self.spec.image is None:
            raise invalid_job(self.job, "image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1")
        return self.spec.image

    def with_spec(self, **fields: Any) -> Request:
        changed = self.spec.model_copy(update=fields)
        return dataclasses.replace(self, job=self.job.model_copy(update={"spec": changed}))

    def with_zero_as_suspended(self) -> Request:
        """Return the request, with a job of 0 workers turned into a suspended job that has the smallest allowed number of
        workers."""
        workers = self.spec.workers
        if workers.replicas:
            return self
        return self.with_spec(suspend=True, workers=workers.model_copy(update={"replicas": workers.allowed()[0]}))

    def limited_to(self, workers: int) -> Request:
        """Return the request with `workers` as both the desired and the maximum number of workers, so that no worker waits for
        more."""
        return self.with_spec(workers=self.spec.workers.model_copy(update={"replicas": workers, "max": workers}))


def invalid_job(job: spec.Job, *sentences: str) -> InvalidJob:
    """Return the error for a valid job that cannot run on Kubernetes."""
    return InvalidJob([(None, sentence) for sentence in sentences], source=job.metadata.name)
