"""A cluster as the `ClusterConfig` of eksctl (v1alpha5): https://docs.aws.amazon.com/eks/latest/eksctl/schema.html. Pure.

Add-ons that EKS offers are in it, rights of pods too; charts and manifests are not.
"""

from __future__ import annotations

import re

from outlast.cloud import aws
from outlast.fleet import autoscaler, karpenter
from outlast.fleet.model import S3, Cluster, Document, NodeGroup

_ADDONS = {
    "ebs": "aws-ebs-csi-driver",
    "efs": "aws-efs-csi-driver",
    "fsx": "aws-fsx-csi-driver",
    "metrics_server": "metrics-server",
    "cloud_watch": "amazon-cloudwatch-observability",
}
"""Names in EKS of the add-ons that it offers."""
NODE_WATCH = "outlast-node-watch"
"""Namespace and ServiceAccount of the watcher of nodes."""
_WITHOUT_RIGHTS = {"metrics_server"}
ALWAYS = ("vpc-cni", "kube-proxy", "coredns", "eks-pod-identity-agent")
"""EKS's add-ons that every cluster has."""
_READ = ("s3:GetObject", "s3:GetObjectAttributes")
_WRITE = (*_READ, "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")


def made_by(cluster: Cluster) -> dict[str, str]:
    """The tags of everything that is made in AWS for this cluster, by which it is known as ours."""
    return {**cluster.tags, **aws.tags(cluster.name)}


def config(cluster: Cluster) -> Document:
    """The whole ClusterConfig."""
    irsa = [_irsa(rights) for rights in cluster.s3 if rights.by == "irsa"]
    associations = _associations(cluster)
    return {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {
            "name": cluster.name,
            "region": cluster.region,
            "version": cluster.version,
            "tags": made_by(cluster),
        },
        **({"availabilityZones": list(cluster.zones)} if cluster.zones else {}),
        "autoModeConfig": {"enabled": False},  # node groups and NodePools are ours; eksctl warns that its default will change
        "iam": {
            "withOIDC": cluster.oidc,
            **({"serviceAccounts": irsa} if irsa else {}),
            **({"podIdentityAssociations": associations} if associations else {}),
        },
        "addons": [{"name": name} for name in ALWAYS] + [_addon(cluster, field) for field in addons(cluster)],
        **_groups(cluster, "managedNodeGroups", managed=True),
        **_groups(cluster, "nodeGroups", managed=False),
    }


def addons(cluster: Cluster) -> dict[str, str]:
    """Field and EKS's name of the add-ons of EKS that the cluster has, besides those that every cluster has."""
    return {field: name for field, name in _ADDONS.items() if getattr(cluster.addons, field)}


def _addon(cluster: Cluster, field: str) -> Document:
    version = getattr(cluster.addons, field).version
    return {
        "name": _ADDONS[field],
        **({"version": version} if version else {}),
        **({} if field in _WITHOUT_RIGHTS else {"useDefaultPodIdentityAssociations": True}),
    }


# ---------------------------------------------------------------------------------------------------------------- node groups


def _groups(cluster: Cluster, name: str, *, managed: bool) -> Document:
    found = [_group(cluster, group) for group in cluster.node_groups if group.managed == managed]
    return {name: found} if found else {}


def _group(cluster: Cluster, group: NodeGroup) -> Document:
    labels = autoscaler.labels(cluster, group)
    scaled = {"propagateASGTags": True} if cluster.addons.autoscaler and group.managed and (labels or group.taints) else {}
    return {
        "name": group.name,
        **(_managed_types(group) if group.managed else _own_types(cluster, group)),
        **({"instancePrefix": group.instance_prefix} if group.instance_prefix else {}),
        "minSize": group.min,
        "desiredCapacity": group.first,
        "maxSize": group.max,
        "volumeSize": group.gib,
        "volumeType": "gp3",
        "privateNetworking": group.private,
        **({"availabilityZones": list(group.zones or cluster.zones)} if group.zones or cluster.zones else {}),
        "efaEnabled": group.efa,
        **({"ssh": {"allow": True, "publicKeyPath": group.ssh_key}} if group.ssh_key else {}),
        **({"labels": labels} if labels else {}),
        **({"taints": [_taint(each.key, each.value, each.effect) for each in group.taints]} if group.taints else {}),
        "tags": {**made_by(cluster), **(autoscaler.tags(cluster, group) if cluster.addons.autoscaler else {})},
        **scaled,
        **_iam(cluster, group),
    }


def _managed_types(group: NodeGroup) -> Document:
    spot = group.capacity == "spot"
    if len(group.instance_types) == 1 and not spot:
        return {"instanceType": group.instance_types[0]}
    return {"instanceTypes": list(group.instance_types), **({"spot": True} if spot else {})}


def _own_types(cluster: Cluster, group: NodeGroup) -> Document:
    """Types of a self-managed group, all of one kind of capacity; spot from the pools with most to spare."""
    detailed = {"asgMetricsCollection": [{"granularity": "1Minute"}]} if cluster.addons.cloud_watch else {}
    if group.capacity == "on-demand" and len(group.instance_types) == 1:
        return {"instanceType": group.instance_types[0], **detailed}
    spot = group.capacity == "spot"
    return {
        "instancesDistribution": {
            "instanceTypes": list(group.instance_types),
            "onDemandBaseCapacity": 0,
            "onDemandPercentageAboveBaseCapacity": 0 if spot else 100,
            **({"spotAllocationStrategy": "capacity-optimized"} if spot else {}),
        },
        **detailed,
    }


def _taint(key: str, value: str, effect: str) -> Document:
    return {"key": key, **({"value": value} if value else {}), "effect": effect}


def _iam(cluster: Cluster, group: NodeGroup) -> Document:
    policies = {"withAddonPolicies": dict.fromkeys(group.policies, True)} if group.policies else {}
    home = karpenter.home(cluster)
    role = {"instanceRoleName": karpenter.role(cluster)} if home and group.name == home.name else {}
    return {"iam": {**role, **policies}} if role or policies else {}


# --------------------------------------------------------------------------------------------------------------------- rights


def _associations(cluster: Cluster) -> list[Document]:
    """Rights of pods by EKS Pod Identity."""

    def to(namespace: str, account: str, **rights: object) -> Document:
        return {"namespace": namespace, "serviceAccountName": account, **rights, "tags": made_by(cluster)}

    found: list[Document] = []
    if cluster.addons.autoscaler:
        found.append(to("kube-system", autoscaler.ACCOUNT, wellKnownPolicies={"autoScaler": True}))
    if cluster.addons.karpenter:
        found.append(to(karpenter.NAMESPACE, karpenter.ACCOUNT, permissionPolicy=karpenter.policy(cluster)))
    outlast = cluster.addons.outlast
    if outlast and outlast.node_watch_queue:
        region, account, name = re.findall(r"https://sqs\.([a-z0-9-]+)\.[^/]+/([0-9]+)/(.+)", outlast.node_watch_queue)[0]
        send = _policy([_allowed(("sqs:SendMessage",), [f"arn:aws:sqs:{region}:{account}:{name}"])])
        found.append(to(NODE_WATCH, NODE_WATCH, permissionPolicy=send))
    for each in cluster.s3:
        if each.by == "pod-identity":
            rights = _s3(each, arns="permissionPolicyARNs", policy="permissionPolicy")
            found.append(to(each.namespace, each.service_account, createServiceAccount=True, **rights))
    return found


def _irsa(rights: S3) -> Document:
    return {
        "metadata": {"name": rights.service_account, "namespace": rights.namespace},
        **_s3(rights, arns="attachPolicyARNs", policy="attachPolicy"),
    }


def _s3(rights: S3, *, arns: str, policy: str) -> Document:
    if not rights.read and not rights.write:
        return {arns: ["arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess"]}
    listed = sorted({*rights.read, *rights.write})
    statements = [_allowed(("s3:ListBucket", "s3:GetBucketLocation"), [f"arn:aws:s3:::{each}" for each in listed])]
    if only := sorted(set(rights.read) - set(rights.write)):
        statements.append(_allowed(_READ, [f"arn:aws:s3:::{each}/*" for each in only]))
    if rights.write:
        statements.append(_allowed(_WRITE, [f"arn:aws:s3:::{each}/*" for each in rights.write]))
    return {policy: _policy(statements)}


def _policy(statements: list[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": statements}


def _allowed(actions: tuple[str, ...], resources: list[str]) -> Document:
    return {"Effect": "Allow", "Action": list(actions), "Resource": resources}
