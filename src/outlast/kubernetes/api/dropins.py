"""Lists drop-ins: job kinds from other projects, which the operator runs in place of those projects' controllers.

The rest of Outlast uses drop-ins only through this module. To remove a kind, delete its package and its entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from outlast.kubernetes.api.kinds import ELASTIC_JOB, LEGACY_JOB, Kind

Document = Mapping[str, Any]


@dataclass(frozen=True)
class DropIn:
    kind: Kind
    container: str
    index: str
    """Label with the worker's index, on pods that the replaced controller created."""
    module: str

    @property
    def functions(self) -> ModuleType:
        """The drop-in's functions: sizes, processes, final_state, scale_patch, is_replaced_controller, definition and reconcile.
        The package is imported on first use."""
        return importlib.import_module(self.module)


DROP_INS: list[DropIn] = [
    DropIn(LEGACY_JOB, "elasticjob-worker", "replica-index", "outlast.kubernetes.torchelastic.adapter"),
]
KINDS = tuple(each.kind for each in DROP_INS)
ELASTIC_JOBS = (ELASTIC_JOB, *KINDS)
"""Kinds of jobs that the operator runs. An object of these kinds has the job's name, and its fields may have any shape."""


def has(workload: Document) -> bool:
    """Return whether a drop-in runs this workload. If so, the workload's pods have no agent."""
    return _entry(workload) is not None


def of(workload: Document) -> ModuleType | None:
    """Return the functions of the drop-in that runs this workload, or None if no drop-in does."""
    entry = _entry(workload)
    return entry.functions if entry else None


def _entry(workload: Document) -> DropIn | None:
    identity = (workload.get("apiVersion"), workload.get("kind"))
    return next((each for each in DROP_INS if (each.kind.api_version, each.kind.kind) == identity), None)
