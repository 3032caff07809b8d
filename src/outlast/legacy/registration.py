"""What the rest of Outlast uses of the drop-in for `elastic.pytorch.org`; see `kube.dropins`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from outlast.kube import wire
from outlast.legacy import decide as legacy
from outlast.legacy.pods import definition, end, processes, sizes
from outlast.operator import snapshot
from outlast.operator.cache import CachedJob
from outlast.operator.plan import Plan
from outlast.operator.queues import ClusterFeatures
from outlast.operator.snapshot import Limits

__all__ = ["definition", "end", "processes", "reconcile", "rival", "scaled", "sizes"]

_CONTROLLER = re.compile(r"(^|/)torchelastic/(kubernetes|elasticjob-controller)\b")
"""Images of https://github.com/pytorch/elastic/tree/master/kubernetes."""


def scaled(replicas: int) -> dict[str, Any]:
    """The merge patch of a job's spec for another number of workers."""
    return {"replicaSpecs": {"Worker": {"replicas": replicas}}}


def rival(deployment: dict[str, Any]) -> bool:
    """Whether this Deployment is the archived controller."""
    images = [each.get("image") or "" for each in deployment["spec"]["template"]["spec"]["containers"]]
    return deployment["metadata"]["name"] == "elastic-job-k8s-controller" or any(map(_CONTROLLER.search, images))


def reconcile(limits: Limits, cached: CachedJob, now: float, found: ClusterFeatures) -> Plan:
    """The plan for one ElasticJob of `elastic.pytorch.org`."""
    assert cached.job is not None, "reconcilers are only called for jobs that exist"
    if broken := cached.job.get(wire.UNREADABLE):
        return legacy.unreadable(cached.job, cached.pods, str(broken), now)
    ends: dict[str, float] = {}
    pods = snapshot.pods_of(cached)
    for pod in pods:
        if pod.node_lost is not None:
            ends[pod.node] = max(ends.get(pod.node, 0.0), max(pod.node_lost, cached.since) + limits.lost_s)
    lost = {node for node, end in ends.items() if end <= now}
    leaving = {pod.uid: pod.leave for pod in pods if pod.leave}
    plan = legacy.decide(cached.job, cached.pods, now, lost=lost, leaving=leaving)
    later = [end for end in ends.values() if end > now]
    return dataclasses.replace(plan, requeue_at=min([*later, plan.requeue_at or float("inf")])) if later else plan
