"""The nodes of a cluster by the group that they belong to, from what kubectl prints."""

from __future__ import annotations

from collections import Counter

from outlast.provision import tools

ASK = ("kubectl", "get", "nodes", "-o", "json")
_LABELS = ("karpenter.sh/nodepool", "alpha.eksctl.io/nodegroup-name", "eks.amazonaws.com/nodegroup")
"""Where the name of a node's group is."""


def counted(text: str) -> dict[str, int]:
    """Ready nodes of each group; of text that is no list of nodes none."""
    groups: Counter[str] = Counter()
    for node in tools.items(text):
        labels = node.get("metadata", {}).get("labels") or {}
        ready = {each["type"]: each["status"] for each in (node.get("status") or {}).get("conditions") or ()}.get("Ready")
        if ready == "True":
            groups[next((labels[label] for label in _LABELS if label in labels), "")] += 1
    return dict(groups)
