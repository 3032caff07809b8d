"""Removes a cluster that Outlast has made, and says what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.cloud.clusters import Found
from outlast.errors import OutlastError
from outlast.provision import tools
from outlast.provision.create import Runs
from outlast.provision.tools import Tell


@dataclass(frozen=True)
class Asked:
    """What is known before anything is removed."""

    exists: bool
    """Whether there is a cluster, or the remains of one."""
    jobs: tuple[str, ...] = ()
    """Jobs that have not ended: `namespace/name`."""
    pools: tuple[str, ...] = ()
    """NodePools of ours; their machines are not eksctl's."""
    others: tuple[str, ...] = ()
    """NodePools of others, whose machines would be left without anybody who stops them."""
    reached: bool = True
    """Whether the cluster answered."""


def judged(found: Found, name: str, region: str) -> bool:
    """Whether there is something to remove. Raises OutlastError if it is not ours. Pure."""
    if not (found.status or found.stack):
        return False
    if not found.ours:
        raise OutlastError(
            f"cluster {name} in {region} does not carry the tags outlast:made-by and outlast:cluster: Outlast has not made it, "
            "and does not delete it"
        )
    return True


def look(runs: Runs, exists: bool, reached: bool = True) -> Asked:
    """What is in the cluster, if it answers. `reached`: whether the kubeconfig leads to it; without, nothing is asked of it."""
    if not exists or not reached:
        return Asked(exists, reached=reached)
    pools = runs.ask(("kubectl", "get", "nodepools.karpenter.sh", "-o", "json"))
    jobs = runs.ask(("kubectl", "get", "elasticjobs.outlast.dev", "--all-namespaces", "-o", "json"))
    known = pools.code == 0 or "doesn't have a resource type" in pools.output  # Karpenter is not installed
    reached = known and runs.ask(("kubectl", "get", "--raw", "/readyz")).code == 0
    found = _items(pools.output) if pools.code == 0 else []
    ours = {name for name, labels, _ in found if labels.get("app.kubernetes.io/managed-by") == "outlast"}
    running = [] if jobs.code else [name for name, _, phase in _items(jobs.output) if phase not in ("Succeeded", "Failed")]
    others = [name for name, _, _ in found if name not in ours]
    return Asked(True, tuple(running), tuple(sorted(ours)), tuple(others), reached)


def _items(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Name, labels and state of each object in what kubectl printed."""
    found = []
    for item in tools.items(text):
        head, status = item.get("metadata", {}), item.get("status") or {}
        name = "/".join(filter(None, (head.get("namespace"), head.get("name", ""))))
        found.append((name, head.get("labels") or {}, str(status.get("state", ""))))
    return found


def listed(asked: Asked, name: str, region: str, tagged: Iterable[str]) -> list[str]:
    """What will be removed and what will not, as lines for people."""
    lines = [f"cluster {name} in {region}: control plane, node groups, network, IAM roles of its pods"]
    lines += [f"NodePool {each} and its machines" for each in asked.pools]
    lines += [f"job {each} has not ended, and is deleted" for each in asked.jobs]
    lines += [f"NodePool {each} is not ours: delete it first, or its machines go on and cost money" for each in asked.others]
    if not asked.reached:
        lines.append("the cluster does not answer: machines of NodePools, disks of claims and load balancers may be left behind")
    lines += [f"kept: {each} ({_remove(name, region)})" for each in tagged if _is_volume(each)]
    return lines


def delete(asked: Asked, name: str, region: str, runs: Runs, tell: Tell) -> None:
    """Remove jobs, the machines of NodePools, then the cluster. Again after anything; raises OutlastError when a program fails.

    Karpenter does not drain a node while it has a pod that must not be disrupted, as those of running jobs. It must live until
    its last machine is gone, so the deletion of NodePools is one in the foreground, which waits for that.
    """
    commands: list[tuple[str, ...]] = []
    for job in asked.jobs:
        namespace, _, each = job.partition("/")
        kind = ("kubectl", "delete", "elasticjobs.outlast.dev")
        commands.append((*kind, each, "--namespace", namespace, "--ignore-not-found", "--wait=false"))
    if asked.pools:
        how = ("--cascade=foreground", "--ignore-not-found", "--timeout=15m")
        commands.append(("kubectl", "delete", "nodepools.karpenter.sh", *asked.pools, *how))
    where = ("--name", name, "--region", region)
    commands.append(("eksctl", "delete", "cluster", *where, "--wait", "--disable-nodegroup-eviction"))
    for command in commands:
        tell(" ".join(command))
        ended = runs.run(command)
        if ended.code != 0:
            raise OutlastError(
                f"{command[0]} exited with {ended.code}{ended.why}; run the same command again, which goes on from there"
            )


def _is_volume(arn: str) -> bool:
    """Whether something of ours is that of `outlast volume`."""
    return ":elasticfilesystem:" in arn or ":fsx:" in arn


def _remove(name: str, region: str) -> str:
    """The command that removes a file system."""
    return f"outlast volume delete {name} --region {region}"


def left(name: str, region: str, tagged: Iterable[str], disks: Iterable[str], machines: Iterable[str] = ()) -> list[str]:
    """What is still there, each with how to remove it: ARNs with our tags, machines that nobody stops, and disks of claims."""
    volumes = {arn: _is_volume(arn) for arn in tagged}
    return [
        *(
            f"machine {each} costs money: aws ec2 terminate-instances --region {region} --instance-ids {each}"
            for each in machines
        ),
        *(f"{arn}: {_remove(name, region)}" for arn, volume in volumes.items() if volume),
        *(f"{arn}: carries our tags; look at it in the console" for arn, volume in volumes.items() if not volume),
        *(f"disk {each} of a claim: aws ec2 delete-volume --region {region} --volume-id {each}" for each in disks),
    ]
