"""Workloads: how many workers the documents of jobs ask for, whatever their kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.kube import dropins


def replicas(workload: Mapping[str, Any]) -> int:
    """How many workers a workload asks for."""
    if (drop_in := dropins.of(workload)) is not None:
        return drop_in.sizes(workload)[1]
    spec = workload.get("spec") or {}
    if workload.get("kind") == "ElasticJob":
        return int((spec.get("workers") or {}).get("replicas", 1))
    if "tasks" in spec:  # of Volcano
        return sum(int(task.get("replicas", 1)) for task in spec["tasks"])
    if workload.get("kind") == "Job":
        return int(spec.get("completions") or spec.get("parallelism") or 1)
    return int(spec.get("replicas", 1))
