"""Karpenter: NodePools, their EC2NodeClasses, the controller's rights, its chart's values.

Karpenter's nodes have the role of the node group that Karpenter runs on, so they may join the cluster as its nodes do. The rights
follow https://karpenter.sh/docs/reference/cloudformation/: Karpenter may change only what carries the cluster's tag. Pure.
"""

from __future__ import annotations

from outlast import units
from outlast.fleet import capacity
from outlast.fleet.model import Cluster, Document, NodeGroup, NodePool

NAMESPACE, ACCOUNT = "kube-system", "karpenter"


def home(cluster: Cluster) -> NodeGroup | None:
    """The node group that Karpenter runs on; None without Karpenter."""
    able = (
        each for each in cluster.node_groups if each.managed and each.capacity == "on-demand" and each.first and not each.taints
    )
    return next(able, None) if cluster.addons.karpenter else None


def role(cluster: Cluster) -> str:
    """The IAM role of that group's nodes and of Karpenter's."""
    return f"outlast-{cluster.name}-node"


def documents(cluster: Cluster, tags: dict[str, str]) -> list[Document]:
    """The EC2NodeClass and the NodePool of each, in the order of their weights; `tags` are those of the machines."""
    pools = {pool.name: pool for pool in cluster.node_pools}
    return [
        document
        for name, weight in capacity.priorities(cluster).items()
        for document in (node_class(cluster, pools[name], tags), node_pool(cluster, pools[name], weight))
    ]


def node_pool(cluster: Cluster, pool: NodePool, weight: int) -> Document:
    """The NodePool of karpenter.sh/v1; of those whose nodes fit a pod, the one with the highest weight is used."""
    machine = cluster.shape(pool)
    zones = list(pool.zones or cluster.zones)
    requirements = [
        _in("karpenter.sh/capacity-type", [pool.capacity]),
        _in("node.kubernetes.io/instance-type", list(pool.instance_types)),
        _in("kubernetes.io/arch", [machine.arch]),
        *([_in("topology.kubernetes.io/zone", zones)] if zones else []),
    ]
    taints = [{"key": each.key, **({"value": each.value} if each.value else {}), "effect": each.effect} for each in pool.taints]
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": _meta(pool.name),
        "spec": {
            "weight": weight,
            "limits": {"nodes": str(pool.max), "cpu": str(pool.max * machine.cpus)},  # nodes: newer Karpenters; cpu: all
            "template": {
                **({"metadata": {"labels": dict(pool.labels)}} if pool.labels else {}),
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": pool.name},
                    "requirements": requirements,
                    **({"taints": taints} if taints else {}),
                    "expireAfter": "Never",  # training should not move because a node is a month old
                },
            },
            "disruption": {
                "consolidationPolicy": "WhenEmpty",
                "consolidateAfter": units.duration_text(pool.empty_after),
            },
        },
    }


def node_class(cluster: Cluster, pool: NodePool, tags: dict[str, str]) -> Document:
    """The EC2NodeClass of a NodePool: disk, image, network, role."""
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": _meta(pool.name),
        "spec": {
            "role": role(cluster),
            "amiSelectorTerms": [{"alias": "al2023@latest"}],  # with the drivers of its accelerators
            "subnetSelectorTerms": [
                {"tags": {"alpha.eksctl.io/cluster-name": cluster.name, "kubernetes.io/role/internal-elb": "1"}}
            ],
            "securityGroupSelectorTerms": [{"tags": {"aws:eks:cluster-name": cluster.name}}],
            "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 1},
            "blockDeviceMappings": [
                {
                    "deviceName": "/dev/xvda",
                    "ebs": {"volumeSize": f"{pool.gib}Gi", "volumeType": "gp3", "deleteOnTermination": True},
                }
            ],
            "tags": tags,
        },
    }


def values(cluster: Cluster) -> Document:
    """Values of the chart."""
    group = home(cluster)
    return {
        "settings": {"clusterName": cluster.name},
        "serviceAccount": {"name": ACCOUNT},
        "replicas": 2 if group and group.first > 1 else 1,
        "nodeSelector": {"kubernetes.io/os": "linux", **({"eks.amazonaws.com/nodegroup": group.name} if group else {})},
    }


def policy(cluster: Cluster) -> Document:
    """The IAM policy of the controller."""
    owned = f"kubernetes.io/cluster/{cluster.name}"
    ec2 = f"arn:*:ec2:{cluster.region}:*"
    profiles = "arn:*:iam::*:instance-profile/*"
    made = [f"{ec2}:{kind}/*" for kind in ("fleet", "instance", "volume", "network-interface", "launch-template")]
    made.append(f"{ec2}:spot-instances-request/*")
    used = [f"{ec2}:{kind}/*" for kind in ("security-group", "subnet", "capacity-reservation", "placement-group")]
    used += [f"arn:*:ec2:{cluster.region}::{kind}/*" for kind in ("image", "snapshot")]
    asked, has = {f"aws:RequestTag/{owned}": "owned"}, {f"aws:ResourceTag/{owned}": "owned"}
    launch = ["ec2:RunInstances", "ec2:CreateFleet"]
    changes = ["iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile", "iam:DeleteInstanceProfile"]
    statements = [
        _allow(launch, used),
        _allow(launch, [f"{ec2}:launch-template/*"], has),
        _allow([*launch, "ec2:CreateLaunchTemplate"], made, asked),
        _allow(["ec2:CreateTags"], made, {**asked, "ec2:CreateAction": [*_made_by(launch), "CreateLaunchTemplate"]}),
        _allow(["ec2:CreateTags"], [f"{ec2}:instance/*"], has),
        _allow(["ec2:TerminateInstances", "ec2:DeleteLaunchTemplate"], [made[1], made[4]], has),
        _allow(["ec2:Describe*"], ["*"], {"aws:RequestedRegion": cluster.region}),
        _allow(["ssm:GetParameter"], [f"arn:*:ssm:{cluster.region}::parameter/aws/service/*"]),
        _allow(["pricing:GetProducts", "iam:ListInstanceProfiles"], ["*"]),
        _allow(["iam:GetInstanceProfile"], [profiles]),
        _allow(["iam:PassRole"], [f"arn:*:iam::*:role/{role(cluster)}"], {"iam:PassedToService": "ec2.amazonaws.com"}),
        _allow(["iam:CreateInstanceProfile", "iam:TagInstanceProfile"], [profiles], asked),
        _allow(changes, [profiles], has),
        _allow(["eks:DescribeCluster"], [f"arn:*:eks:{cluster.region}:*:cluster/{cluster.name}"]),
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _made_by(actions: list[str]) -> list[str]:
    return [each.removeprefix("ec2:") for each in actions]


def _allow(actions: list[str], resources: list[str], equal: Document | None = None) -> Document:
    condition = {"Condition": {"StringEquals": equal}} if equal else {}
    return {"Effect": "Allow", "Action": actions, "Resource": resources, **condition}


def _in(key: str, values: list[str]) -> Document:
    return {"key": key, "operator": "In", "values": values}


def _meta(name: str) -> Document:
    return {"name": name, "labels": {"app.kubernetes.io/managed-by": "outlast"}}
