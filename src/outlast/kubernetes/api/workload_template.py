"""Reads workloads, the objects that define jobs of any kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.kubernetes.api import dropins


def replicas(workload: Mapping[str, Any]) -> int:
    if (drop_in := dropins.of(workload)) is not None:
        return int(drop_in.sizes(workload)[1])
    spec = workload.get("spec") or {}
    if workload.get("kind") == "ElasticJob":
        return int((spec.get("workers") or {}).get("replicas", 1))
    if workload.get("kind") == "Job":
        return int(spec.get("completions") or spec.get("parallelism") or 1)
    return int(spec.get("replicas", 1))


def template(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload's pod template. An ElasticJob's template has only the fields that its job file sets."""
    spec = workload.get("spec") or {}
    fields: dict[str, Any] = spec.get("template") or {}
    return fields
