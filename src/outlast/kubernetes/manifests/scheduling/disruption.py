"""Protects a job from evictions, with a PodDisruptionBudget and with annotations on its pods."""

from __future__ import annotations

from outlast.job import spec
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import labels
from outlast.kubernetes.manifests.render_request import Document

DO_NOT_DISRUPT = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations that keep autoscalers from removing a pod's node just to save costs. They do not prevent interruptions and drains.
https://karpenter.sh/docs/concepts/disruption/#pod-level-controls
https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
"""


def min_available(workers: spec.Workers) -> int:
    """Return how many workers must remain after evictions: `workers.min`, but never all, because then no node could be
    drained."""
    return max(0, min(workers.min, workers.replicas - 1))


def budget(job: str, namespace: str, min_available: int, job_labels: dict[str, str], owner: Document) -> Document:
    """Return a job's PodDisruptionBudget. Workers that are not ready may always be evicted, because otherwise a waiting job would
    block a drain. https://kubernetes.io/docs/tasks/run-application/configure-pdb/#unhealthy-pod-eviction-policy"""
    meta = {"name": job, "namespace": namespace, "labels": dict(job_labels), "ownerReferences": [owner]}
    selector = {"matchLabels": labels.selector(job)}
    fields = {"minAvailable": min_available, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
    return kinds.DISRUPTION_BUDGET.document(meta, spec=fields)
