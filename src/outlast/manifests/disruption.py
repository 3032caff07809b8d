"""How many of a job's workers may be taken away at once by those who ask: drains and evictions."""

from __future__ import annotations

from outlast.manifests import labels
from outlast.manifests.request import Document


def budget(job: str, namespace: str, least: int, labelled: dict[str, str], owner: Document) -> Document:
    """The PodDisruptionBudget that leaves a job its `workers.min`; `owner` is an ownerReference.

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
