"""How many of a job's workers may be taken away at once by those who ask: drains and evictions."""

from __future__ import annotations

from outlast import spec
from outlast.manifests import labels
from outlast.manifests.request import Document


def least(workers: spec.Workers) -> int:
    """How many workers are left to a job: `workers.min`, but one may always be taken, or a drain of its node would never end. A
    job that needs all of them saves, and waits for the one that is made elsewhere."""
    return max(0, min(workers.min, workers.replicas - 1))


def budget(job: str, namespace: str, least: int, labelled: dict[str, str], owner: Document) -> Document:
    """The PodDisruptionBudget that leaves a job so many workers; `owner` is an ownerReference.

    A worker that is not ready trains nothing, and may be evicted always: a job that waits for one would hold up a drain for ever.
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
