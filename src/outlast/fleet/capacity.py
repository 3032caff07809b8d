"""In which order capacity is taken: spot to its cap, then on-demand to its cap.

`order` is the one answer. The priority expander of cluster-autoscaler and the weights of Karpenter's NodePools are written from
it: in both the highest number that fits the pending pods wins, until its cap is reached. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.fleet.model import Capacity, Cluster


@dataclass(frozen=True)
class Supply:
    """One node group or NodePool in the order."""

    name: str
    device: str
    """Kubernetes resource of its accelerators; empty without. Pods that need one have no use for the others."""
    capacity: Capacity
    priority: int
    """The higher, the earlier; equal ones have no order between them."""
    most: int
    """Most nodes."""

    def __str__(self) -> str:
        return f"{self.name} ({self.capacity}, at most {self.most})"


def order(cluster: Cluster) -> tuple[Supply, ...]:
    """Where new nodes come from, first to last: NodePools with Karpenter, else node groups. Equal priorities keep the order of
    the file."""
    growing = cluster.node_pools if cluster.addons.karpenter else cluster.node_groups
    found = [Supply(each.name, cluster.shape(each).accelerator, each.capacity, each.preference, each.max) for each in growing]
    return tuple(sorted(found, key=lambda each: -each.priority))


def priorities(cluster: Cluster) -> dict[str, int]:
    """Priority by name, in the order."""
    return {each.name: each.priority for each in order(cluster)}


def sentences(ordered: Iterable[Supply]) -> list[str]:
    """The order for people, a sentence for each kind of device: `nvidia.com/gpu: p3spot (spot, at most 7), then p3od ...`."""
    kinds: dict[str, dict[int, list[str]]] = {}
    for each in ordered:
        kinds.setdefault(each.device, {}).setdefault(each.priority, []).append(str(each))
    return [
        f"{device or 'no accelerator'}: {', then '.join(' or '.join(tier) for tier in tiers.values())}"
        for device, tiers in kinds.items()
    ]
