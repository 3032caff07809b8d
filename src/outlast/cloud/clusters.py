"""EKS clusters: whether there is one, whose it is, how far its creation is, what carries its tags.

Changes nothing, but for `delete_stack`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    ours = aws.ours(tags if status else marked, name)
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


def stacks(name: str, region: str) -> list[str]:
    """CloudFormation stacks of eksctl for a cluster that carry our tags; that of the cluster itself, which the others need, is
    the last. Raises OutlastError."""
    with aws.in_our_words(f"stacks of cluster {name} in {region}"):
        pages = aws.client("cloudformation", region).get_paginator("describe_stacks").paginate()
        found = [
            each["StackName"]
            for page in pages
            for each in page["Stacks"]
            if each["StackName"].startswith(f"eksctl-{name}-") and aws.ours(aws.mapped(each.get("Tags")), name)
        ]
    return sorted(found, key=lambda each: (each == f"eksctl-{name}-cluster", each))


def delete_stack(stack: str, region: str) -> None:
    """Delete a CloudFormation stack with all that it has made, and wait until it is gone. Raises OutlastError."""
    client = aws.client("cloudformation", region)
    with aws.in_our_words(f"stack {stack} in {region}"):
        client.delete_stack(StackName=stack)
        client.get_waiter("stack_delete_complete").wait(StackName=stack)


def tagged(name: str, region: str) -> list[str]:
    """ARNs of all that carries our tags for a cluster, sorted. Raises OutlastError."""
    wanted = [{"Key": key, "Values": [value]} for key, value in aws.tags(name).items()]
    with aws.in_our_words(f"what carries the tags of cluster {name} in {region}"):
        pages = aws.client("resourcegroupstaggingapi", region).get_paginator("get_resources").paginate(TagFilters=wanted)
        return sorted(each["ResourceARN"] for page in pages for each in page["ResourceTagMappingList"])


def machines(name: str, region: str) -> list[str]:
    """Machines of a cluster that have not ended: those of Karpenter outlive it, unless their NodePools go first. Raises
    OutlastError."""
    alive = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
    with aws.in_our_words(f"machines of cluster {name} in {region}"):
        pages = aws.client("ec2", region).get_paginator("describe_instances").paginate(Filters=[_owned(name), alive])
        return sorted(each["InstanceId"] for page in pages for group in page["Reservations"] for each in group["Instances"])


def disks(name: str, region: str) -> list[str]:
    """Disks that claims in a cluster have made, which outlive it. Raises OutlastError."""
    with aws.in_our_words(f"disks of cluster {name} in {region}"):
        pages = aws.client("ec2", region).get_paginator("describe_volumes").paginate(Filters=[_owned(name)])
        return sorted(each["VolumeId"] for page in pages for each in page["Volumes"])


def _owned(name: str) -> dict[str, Any]:
    """What Kubernetes' own programs have made for a cluster."""
    return {"Name": f"tag:kubernetes.io/cluster/{name}", "Values": ["owned"]}
