"""Plans which pods to evict from a node that is about to be terminated, and with which grace periods. Pure.

DaemonSets' pods, static pods and finished pods stay. The operator moves its own workers, so they are evicted only near the
deadline. Outlast's own pods leave after the workers, which need them. All other pods are evicted at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.job.contract import Label
from outlast.kubernetes.api import pod_status

END_MARGIN_S = 2.0
"""Time between a pod's end and the deadline, in seconds. During this time, the kubelet reports the end."""
WORKER_RESERVE_S = 30.0
"""How long before the deadline the remaining workers are evicted, in seconds."""


@dataclass(frozen=True)
class Step:
    """One pod's eviction, which is due now."""

    pod: Mapping[str, Any]
    grace_s: int
    """The configured grace period, or the remaining time if that is shorter, in seconds."""
    last: bool = False
    """True if the remaining time is shorter than the configured grace period. The pod is then deleted if it cannot be evicted."""


def plan(pods: Sequence[Mapping[str, Any]], deadline: float | None, now: float) -> tuple[list[Step], list[str]]:
    """Return the evictions that are due, and the pods to wait for, as `namespace/name`."""
    evictable = [pod for pod in pods if _evictable(pod)]
    remaining_s = math.inf if deadline is None else max(0.0, deadline - END_MARGIN_S - now)
    workers = [_moved_by_operator(pod) or Label.JOB in _labels(pod) for pod in evictable]
    steps, waiting = [], []
    for pod, worker in zip(evictable, workers, strict=True):
        outlast_pod = not worker and _labels(pod).get("app.kubernetes.io/part-of") == "outlast"
        stays = (_moved_by_operator(pod) or (outlast_pod and any(workers))) and remaining_s > WORKER_RESERVE_S - END_MARGIN_S
        grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if pod_status.terminating(pod) or stays:
            waiting.append(full_name(pod))
        else:
            steps.append(Step(pod, max(1, math.floor(min(grace_s, remaining_s))), remaining_s < grace_s))  # 0 would kill the pod
    return steps, waiting


def full_name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _moved_by_operator(pod: Mapping[str, Any]) -> bool:
    return any(each.get("kind") == "ElasticJob" for each in pod["metadata"].get("ownerReferences") or ())


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _evictable(pod: Mapping[str, Any]) -> bool:
    meta = pod["metadata"]
    daemon_pod = any(each.get("kind") == "DaemonSet" and each.get("controller") for each in meta.get("ownerReferences") or ())
    return (
        not daemon_pod and "kubernetes.io/config.mirror" not in (meta.get("annotations") or {}) and not pod_status.finished(pod)
    )
