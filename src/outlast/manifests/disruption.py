"""The PodDisruptionBudget of a job, for drains and other evictions."""

from __future__ import annotations

from outlast import spec
from outlast.manifests import labels
from outlast.manifests.request import Document


def least(workers: spec.Workers) -> int:
    """Smallest number of workers that evictions must leave: `workers.min`, but one may always be evicted, or a drain of its node
    would never end. A job that needs all of them saves, and waits for the replacement."""
    return max(0, min(workers.min, workers.replicas - 1))


def budget(job: str, namespace: str, least: int, labelled: dict[str, str], owner: Document) -> Document:
    """The PodDisruptionBudget; `owner` is an ownerReference.

    A worker that is not ready does not train and may always be evicted, or a job that waits would block a drain for ever.
    https://kubernetes.io/docs/tasks/run-application/configure-pdb/#unhealthy-pod-eviction-policy
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": job, "namespace": namespace, "labels": dict(labelled), "ownerReferences": [owner]},
        "spec": {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels.selector(job)},
        },
    }
