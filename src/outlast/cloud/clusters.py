"""EKS clusters: whether there is one, whose it is, how far its creation is, what carries its tags. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.cloud import aws


@dataclass(frozen=True)
class Found:
    """A cluster as AWS has it."""

    status: str
    """ACTIVE, CREATING, DELETING, FAILED, UPDATING; empty if there is none."""
    version: str
    ours: bool
    """Whether it carries our tags."""
    stack: str
    """Status of the CloudFormation stack by which eksctl makes it; empty if there is none."""
    why: str
    """What CloudFormation says of that."""


def account(region: str) -> str:
    """The account that the credentials belong to. Raises OutlastError."""
    with aws.in_our_words("AWS"):
        return str(aws.client("sts", region).get_caller_identity()["Account"])


def find(name: str, region: str) -> Found:
    """A cluster by its name. Raises OutlastError."""
    status, version = "", ""
    tags: dict[str, str] = {}
    with aws.in_our_words(f"cluster {name} in {region}"):
        try:
            found = aws.client("eks", region).describe_cluster(name=name)["cluster"]
            status, version, tags = found["status"], found["version"], found.get("tags") or {}
        except Exception as error:
            if not aws.absent(error):
                raise
        stack, why, marked = _stack(f"eksctl-{name}-cluster", region)
    ours = aws.ours(tags or marked, name)
    return Found(status, version, ours, stack, why)


def _stack(name: str, region: str) -> tuple[str, str, dict[str, str]]:
    """Status, reason and tags of a stack; empty ones if there is none."""
    try:
        (found,) = aws.client("cloudformation", region).describe_stacks(StackName=name)["Stacks"]
    except Exception as error:
        if not aws.absent(error) and "does not exist" not in str(error):  # CloudFormation has no code of its own for it
            raise
        return "", "", {}
    return found["StackStatus"], found.get("StackStatusReason", ""), aws.mapped(found.get("Tags"))


def tagged(name: str, region: str) -> list[str]:
    """ARNs of all that carries our tags for a cluster, sorted. Raises OutlastError."""
    wanted = [{"Key": key, "Values": [value]} for key, value in aws.tags(name).items()]
    with aws.in_our_words(f"what carries the tags of cluster {name} in {region}"):
        pages = aws.client("resourcegroupstaggingapi", region).get_paginator("get_resources").paginate(TagFilters=wanted)
        return sorted(each["ResourceARN"] for page in pages for each in page["ResourceTagMappingList"])


def disks(name: str, region: str) -> list[str]:
    """Disks that claims in a cluster have made, which outlive it. Raises OutlastError."""
    owned = {"Name": f"tag:kubernetes.io/cluster/{name}", "Values": ["owned"]}
    with aws.in_our_words(f"disks of cluster {name} in {region}"):
        pages = aws.client("ec2", region).get_paginator("describe_volumes").paginate(Filters=[owned])
        return sorted(each["VolumeId"] for page in pages for each in page["Volumes"])
