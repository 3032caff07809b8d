"""The network of an EKS cluster, and the security groups through which its nodes reach a file system.

A security group is known by its name, its VPC and our tags. One of that name without our tags is another's: we neither use nor
change nor delete it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outlast.cloud import aws
from outlast.errors import OutlastError

Allow = Literal["vpc", "cluster"]
"""Who may mount: every machine of the VPC, or only those with the cluster's own security group."""


@dataclass(frozen=True)
class Subnet:
    """One subnet."""

    id: str
    zone: str
    public: bool = False


@dataclass(frozen=True)
class Network:
    """Where a cluster's nodes are."""

    vpc: str
    blocks: tuple[str, ...]
    """The VPC's ranges of IPv4 addresses."""
    subnets: tuple[Subnet, ...]
    group: str = ""
    """The security group that EKS gives to the nodes of managed groups and of Karpenter; empty if it is not known."""
    endpoint: str = ""
    """Address of the API server; empty if it is not known."""


@dataclass(frozen=True)
class Rule:
    """Ports of TCP that a security group opens."""

    low: int
    high: int
    source: str
    """A range of addresses or a security group; empty is the group itself."""

    def __str__(self) -> str:
        ports = self.low if self.low == self.high else f"{self.low}-{self.high}"
        return f"TCP {ports} from {self.source or 'itself'}"


def rules(network: Network, allow: Allow, ports: Sequence[tuple[int, int]], *, among: bool) -> list[Rule]:
    """The rules by which clients reach a file system on these ports, and `among` its servers one another.

    Raises OutlastError when the cluster's own security group is asked for but not known.
    """
    if allow == "cluster" and not network.group:
        raise OutlastError("--allow cluster: the cluster's security group is not known; use --allow vpc")
    sources = [*(network.blocks if allow == "vpc" else [network.group]), *([""] if among else [])]
    return [Rule(low, high, source) for low, high in ports for source in sources]


def of_cluster(region: str, cluster: str) -> Network:
    """The network of an EKS cluster."""
    config = aws.client("eks", region).describe_cluster(name=cluster)["cluster"]
    found = config["resourcesVpcConfig"]
    return _network(region, found["subnetIds"], found.get("clusterSecurityGroupId", ""), config.get("endpoint", ""))


def endpoint(region: str, cluster: str) -> str:
    """The address of the API server of an EKS cluster; empty if it has none yet."""
    return str(aws.client("eks", region).describe_cluster(name=cluster)["cluster"].get("endpoint", ""))


def of_subnets(region: str, subnets: Sequence[str]) -> Network:
    """The network of some subnets, for a cluster that is not one of EKS."""
    return _network(region, subnets)


def one_per_zone(subnets: Sequence[Subnet]) -> tuple[Subnet, ...]:
    """A subnet for each zone: EFS has at most one mount target there, which the whole zone uses. Private ones first."""
    chosen: dict[str, Subnet] = {}
    for each in sorted(subnets, key=lambda each: (each.public, each.id)):
        chosen.setdefault(each.zone, each)
    return tuple(chosen[zone] for zone in sorted(chosen))


def find_group(ec2: Any, vpc: str, name: str) -> Mapping[str, Any] | None:
    """The security group of this name in a VPC."""
    filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    found = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    return found[0] if found else None


def groups(ec2: Any, tags: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """All security groups with these tags."""
    filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
    pages = ec2.get_paginator("describe_security_groups").paginate(Filters=filters)
    return [each for page in pages for each in page["SecurityGroups"]]


def checked(group: Mapping[str, Any], cluster: str) -> str:
    """The id of a security group that is ours. Raises OutlastError for another's."""
    if not aws.ours(aws.mapped(group.get("Tags")), cluster):
        raise OutlastError(
            f"security group {group['GroupName']} ({group['GroupId']}) was not made by Outlast for {cluster}; rename or delete "
            "it, or choose another --name"
        )
    return str(group["GroupId"])


def make_group(ec2: Any, network: Network, tags: Mapping[str, str], name: str) -> str:
    """Make a security group without rules; its id."""
    tagged = [{"ResourceType": "security-group", "Tags": aws.listed(tags)}]
    about = "Nodes of a cluster reach their shared file system"
    made = ec2.create_security_group(GroupName=name, Description=about, VpcId=network.vpc, TagSpecifications=tagged)
    ec2.get_waiter("security_group_exists").wait(GroupIds=[made["GroupId"]])
    return str(made["GroupId"])


def admit(ec2: Any, group: Mapping[str, Any], rules: Sequence[Rule], *, dry_run: bool = False) -> list[str]:
    """Add the rules that a group lacks; what was added, or would be, as sentences."""
    added = []
    for rule in rules:
        ports = (rule.low, rule.high)
        there = [each for each in group.get("IpPermissions", ()) if (each.get("FromPort"), each.get("ToPort")) == ports]
        known = {pair.get("GroupId") for each in there for pair in each.get("UserIdGroupPairs", ())}
        known |= {block.get("CidrIp") for each in there for block in each.get("IpRanges", ())}
        source = rule.source or group["GroupId"]
        if source in known:
            continue
        if not dry_run:
            of = {"IpRanges": [{"CidrIp": source}]} if "/" in source else {"UserIdGroupPairs": [{"GroupId": source}]}
            permission = {"IpProtocol": "tcp", "FromPort": rule.low, "ToPort": rule.high, **of}
            ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[permission])
        added.append(str(rule))
    return added


def _network(region: str, subnets: Sequence[str], group: str = "", endpoint: str = "") -> Network:
    ec2 = aws.client("ec2", region)
    found = ec2.describe_subnets(SubnetIds=list(subnets))["Subnets"]
    vpcs = sorted({each["VpcId"] for each in found})
    if len(vpcs) != 1:
        raise OutlastError(f"the subnets {', '.join(subnets)} are of {len(vpcs)} VPCs; give those of one")
    (vpc,) = ec2.describe_vpcs(VpcIds=vpcs)["Vpcs"]
    blocks = [each["CidrBlock"] for each in vpc.get("CidrBlockAssociationSet", ())] or [vpc["CidrBlock"]]
    known = tuple(Subnet(each["SubnetId"], each["AvailabilityZone"], bool(each.get("MapPublicIpOnLaunch"))) for each in found)
    return Network(vpcs[0], tuple(blocks), known, group, endpoint)
