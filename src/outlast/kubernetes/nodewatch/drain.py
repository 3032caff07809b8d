"""Which pods are evicted now from a node that is about to be terminated, and how much time they get to end. Pure.

Pods of DaemonSets, the kubelet's own pods, and pods that have ended stay. A worker that the operator runs leaves by itself
because of the node's taint, unless the deadline is near; Outlast's own pods leave after the workers, which need them. All other
pods are evicted at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.job.contract import Label
from outlast.kubernetes.api import pod_status as podwords

LAST_S = 2.0
"""Margin before the deadline by which a pod must have ended, since the kubelet has to report the end."""
RESERVE_S = 30.0
"""Time before the deadline at which workers that have not left by themselves are evicted."""


@dataclass(frozen=True)
class Step:
    """The eviction of one pod that is due now."""

    pod: Mapping[str, Any]
    grace_s: int
    """Seconds that the pod has to end: its own grace period, or the remaining time if that is shorter."""
    last: bool = False
    """Whether the remaining time is shorter than the pod's own grace period. If a PodDisruptionBudget then forbids the eviction,
    the pod is deleted, as it would be lost with the machine."""


def plan(pods: Sequence[Mapping[str, Any]], deadline: float | None, now: float) -> tuple[list[Step], list[str]]:
    """The evictions that are due, and the pods to wait for, as `namespace/name`. Without a deadline, each pod has its own grace
    period."""
    movable = [pod for pod in pods if _movable(pod)]
    left_s = math.inf if deadline is None else max(0.0, deadline - LAST_S - now)
    workers = [operated(pod) or Label.JOB in _labels(pod) for pod in movable]
    steps, waiting = [], []
    for pod, worker in zip(movable, workers, strict=True):
        ours = not worker and _labels(pod).get("app.kubernetes.io/part-of") == "outlast"
        stays = (operated(pod) or (ours and any(workers))) and left_s > RESERVE_S - LAST_S
        own_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if podwords.terminating(pod) or stays:
            waiting.append(full_name(pod))
        else:
            steps.append(Step(pod, max(1, math.floor(min(own_s, left_s))), left_s < own_s))  # 0 would not let it end at all
    return steps, waiting


def full_name(pod: Mapping[str, Any]) -> str:
    """The name of a pod with its namespace: `namespace/name`."""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def operated(pod: Mapping[str, Any]) -> bool:
    """Whether the operator runs the job of a pod. The operator moves such a pod when it sees the node's taint."""
    return any(each.get("kind") == "ElasticJob" for each in pod["metadata"].get("ownerReferences") or ())


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _movable(pod: Mapping[str, Any]) -> bool:
    meta = pod["metadata"]
    daemon = any(each.get("kind") == "DaemonSet" and each.get("controller") for each in meta.get("ownerReferences") or ())
    return not daemon and "kubernetes.io/config.mirror" not in (meta.get("annotations") or {}) and not podwords.finished(pod)
