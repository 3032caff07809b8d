"""What is asked of the manifests: a job, its names, its run, and the texts of the files that it brings along."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast import spec
from outlast.errors import InvalidJob
from outlast.manifests.names import Names

Document = dict[str, Any]
"""One document for Kubernetes; its keys are in the order in which they are written."""


@dataclass(frozen=True)
class Request:
    """One job to be rendered."""

    job: spec.Job
    names: Names
    run: str
    """Unique id of this submission; see `contract.Env.RUN`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files of this machine that pods need, by path; see `places.files`."""
    code: bytes = b""
    """The archive of code that comes in a ConfigMap, if the job says so; empty when that ConfigMap is made by somebody else."""
    fresh: bool = False
    """Whether it begins from the beginning; see `contract.Env.FRESH`."""
    carried: bool = False
    """Whether each pod carries the job file in an annotation of its own, and no ConfigMap is made."""

    @property
    def spec(self) -> spec.Spec:
        return self.job.spec

    def but(self, **fields: Any) -> Request:
        """The request with other values for fields of `spec`."""
        changed = self.spec.model_copy(update=fields)
        return dataclasses.replace(self, job=self.job.model_copy(update={"spec": changed}))

    def held(self) -> Request:
        """A job that is to have no workers, as one that is suspended, with the fewest that it may have when it goes on."""
        workers = self.spec.workers
        if workers.replicas:
            return self
        return self.but(suspend=True, workers=workers.model_copy(update={"replicas": workers.allowed()[0]}))

    def at_most(self, workers: int) -> Request:
        """The request with no more workers than there will be pods, so that nobody waits for the others."""
        return self.but(workers=self.spec.workers.model_copy(update={"replicas": workers, "max": workers}))


def wrong(job: spec.Job, *sentences: str) -> InvalidJob:
    """The mistakes of a job that is right by itself and cannot be made on Kubernetes."""
    return InvalidJob([(None, sentence) for sentence in sentences], source=job.metadata.name)
