"""Kinds of jobs that are not Outlast's and that the operator runs in place of another controller: one entry for each package that
adds such a kind.

    if (drop_in := dropins.of(workload)) is not None:
        drop_in.sizes(workload)

The rest of Outlast uses drop-ins only through this module, and names none: to remove a kind, delete its package and its entry
here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from outlast.kubernetes.api.kinds import LEGACY_JOB, Kind

Document = Mapping[str, Any]


class Functions(Protocol):
    """The functions of a drop-in's `registration` module."""

    def sizes(self, job: Document, /) -> tuple[int, int, int]:
        """The minimum, desired and maximum number of workers."""

    def processes(self, job: Document, /) -> int:
        """Number of processes in each worker."""

    def end(self, job: Document, /) -> str | None:
        """`Succeeded` or `Failed`; None while the job has not ended."""

    def scaled(self, replicas: int, /) -> dict[str, Any]:
        """The merge patch that gives a job's spec another number of workers."""

    def rival(self, deployment: Document, /) -> bool:
        """Whether this Deployment is the controller that the operator replaces."""

    def definition(self) -> dict[str, Any]:
        """The CustomResourceDefinition of this kind of job."""

    def reconcile(self, limits: Any, known: Any, now: float, features: Any, /) -> Any:
        """A reconciler for the operator, see `operator.reconcilers`."""


@dataclass(frozen=True)
class DropIn:
    """One kind of job, and the package that implements it."""

    kind: Kind
    container: str
    """Name of the container that runs the training, in pods with several containers."""
    index: str
    """Label with the index of a worker, on pods that Outlast has not made."""
    rival: str
    """Namespace and usual name (`namespace/name`) of the Deployment of the controller that the operator replaces."""
    module: str

    @property
    def functions(self) -> Functions:
        """The functions of the drop-in's package, which is imported on first use."""
        return cast(Functions, importlib.import_module(self.module))


DROP_INS: list[DropIn] = [
    DropIn(
        LEGACY_JOB,
        "elasticjob-worker",
        "replica-index",
        "elastic-job/elastic-job-k8s-controller",
        "outlast.kubernetes.torchelastic.adapter",
    ),
]


KINDS = tuple(each.kind for each in DROP_INS)


def has(workload: Document) -> bool:
    """Whether a drop-in runs this workload."""
    return (workload.get("apiVersion"), workload.get("kind")) in [(kind.api_version, kind.kind) for kind in KINDS]


def of(workload: Document) -> Functions | None:
    """The functions for this workload; None if no drop-in runs it."""
    names = (workload.get("apiVersion"), workload.get("kind"))
    return next((each.functions for each in DROP_INS if (each.kind.api_version, each.kind.kind) == names), None)
