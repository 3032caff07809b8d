"""cluster-autoscaler: the priority expander, the tags by which it plans with groups that have no node, its chart's values.

Names of Auto Scaling groups end in letters that AWS chooses, so the expander gets a pattern for each group that fits its name
whatever the letters are, and no other group's. See the README of cluster-autoscaler's provider for AWS, "Auto-Discovery Setup"
and "Scaling a node group to 0". Pure.
"""

from __future__ import annotations

import yaml

from outlast.fleet import capacity, machines
from outlast.fleet.model import Cluster, Document, NodeGroup

EXPANDER = "cluster-autoscaler-priority-expander"
"""The ConfigMap's name, which cluster-autoscaler expects."""
ACCOUNT = "cluster-autoscaler"
_TEMPLATE = "k8s.io/cluster-autoscaler/node-template"


def asg_pattern(cluster: str, group: NodeGroup) -> str:
    """The pattern of the name of a group's Auto Scaling group, as EKS or eksctl's CloudFormation stack gives it."""
    if group.managed:
        return rf"^eks-{group.name}-[0-9a-f]+(-[0-9a-f]+){{4}}$"
    return rf"^eksctl-{cluster}-nodegroup-{group.name}-NodeGroup-[0-9A-Za-z]+$"


def expander(cluster: Cluster) -> Document:
    """The ConfigMap of the priority expander; the highest priority that fits the pods wins."""
    groups = {group.name: group for group in cluster.node_groups}
    priorities: dict[int, list[str]] = {}
    for name, priority in capacity.priorities(cluster).items():
        priorities.setdefault(priority, []).append(asg_pattern(cluster.name, groups[name]))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": EXPANDER,
            "namespace": "kube-system",
            "labels": {"app.kubernetes.io/managed-by": "outlast"},
        },
        "data": {"priorities": yaml.safe_dump(priorities, sort_keys=False, width=1000)},
    }


def tags(cluster: Cluster, group: NodeGroup) -> dict[str, str]:
    """Tags of a group: cluster-autoscaler finds it by them, and knows the nodes of an empty one."""
    machine = cluster.shape(group)
    resources = {**machine.resources, **({machines.EFA: machine.efa} if group.efa else {})}
    return {
        "k8s.io/cluster-autoscaler/enabled": "true",
        f"k8s.io/cluster-autoscaler/{cluster.name}": "owned",
        **{f"{_TEMPLATE}/label/{name}": value for name, value in labels(cluster, group).items()},
        **{f"{_TEMPLATE}/taint/{each.key}": f"{each.value}:{each.effect}" for each in group.taints},
        **{f"{_TEMPLATE}/resources/{name}": str(count) for name, count in resources.items()},
    }


def labels(cluster: Cluster, group: NodeGroup) -> dict[str, str]:
    """Labels of a group's nodes: its own, and what jobs know spot machines by. EKS adds that to managed groups."""
    spot = {"lifecycle": "Ec2Spot"} if group.capacity == "spot" and not group.managed else {}
    return {**spot, **group.labels}


def values(cluster: Cluster) -> Document:
    """Values of the chart."""
    return {
        "autoDiscovery": {"clusterName": cluster.name},
        "awsRegion": cluster.region,
        "fullnameOverride": "cluster-autoscaler",
        "image": {"tag": f"v{cluster.version}.0"},  # plans with the scheduler of this version
        "rbac": {"serviceAccount": {"name": ACCOUNT}},
        "extraArgs": {
            "expander": "priority,least-waste",  # the second chooses between equal priorities
            "skip-nodes-with-local-storage": False,  # workers have an emptyDir at /dev/shm
            "balance-similar-node-groups": False,  # it would undo the order
            "scale-down-unneeded-time": "5m",
            "max-node-provision-time": "10m",  # then the next in the order is asked: spot may have none
        },
    }
