"""Shared file systems of a cluster on AWS: EFS and FSx for Lustre, made, listed and deleted.

    for step in volumes.create(wanted, network, say): ...     yields what it does, and at the end the file system

Each step looks first and makes only what is missing, so that a second run changes nothing and completes one that was cut off. A
file system is known by our tags (`outlast:volume` has its name), which it carries from its creation on: there is no moment at
which it exists without them. Deletion goes the other way round, each part when the one before is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outlast.cloud import aws, efs, fsx, network
from outlast.cloud.filesystem import TYPES, VOLUME, FileSystem, Service, Step, Type, Wanted
from outlast.cloud.network import Network
from outlast.errors import OutlastError

_READY, _FAILED = ("available", "updating"), ("failed", "error", "misconfigured", "misconfigured_unavailable")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Patience:
    """How long changes are waited for."""

    timeout_s: float = 1800.0
    """FSx takes about ten minutes."""
    poll_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def service(type: Type, region: str, cluster: str) -> Service:
    """EFS or FSx, for what is ours there."""
    return efs.Efs(region, cluster) if type == "efs" else fsx.Fsx(region, cluster)


def listed(region: str, cluster: str, name: str = "") -> list[FileSystem]:
    """The file systems of a cluster that are ours; only those of a name, if one is given."""
    found = [each for type in TYPES for each in service(type, region, cluster).all()]
    return sorted((each for each in found if name in ("", each.name)), key=lambda each: each.name)


def names(region: str, cluster: str) -> list[str]:
    """The names of all volumes of a cluster, also of those of which only a security group is left."""
    groups = network.groups(aws.client("ec2", region), aws.tags(cluster))
    left = {aws.mapped(each.get("Tags")).get(VOLUME, "") for each in groups}
    return sorted({each.name for each in listed(region, cluster)} | left - {""})


def create(
    wanted: Wanted, net: Network, say: Say, *, dry_run: bool = False, patience: Patience = Patience()
) -> Iterator[Step | FileSystem]:
    """Make what is missing, and yield each step; at the end the file system, if there is one.

    Raises OutlastError; what was made until then stays, and the next run goes on from there.
    """
    there = service(wanted.type, wanted.region, wanted.cluster)
    _check(wanted)
    group = ""
    for step in _group(wanted, net, there, dry_run=dry_run):
        group = step.name.partition(" ")[0]
        yield step
    found = _find(there, wanted.name)
    if found:
        yield Step("unchanged", "file system", found.id, "" if found.state in _READY else f"it is {found.state}")
    elif dry_run:
        yield Step("created", "file system", wanted.name, there.about(wanted))
    else:
        yield Step("created", "file system", there.create(wanted, net, group), there.about(wanted))
    if not dry_run:
        found = _available(there, wanted, say, patience)
    has = {each.place: each for each in (found.parts if found else ())}
    for kind, place in there.places(wanted, net):
        if place in has:
            yield Step("unchanged", kind, f"{has[place].id} ({place})")
            continue
        if found and not dry_run:
            there.add(found.id, place, wanted, net, group)
        yield Step("created", kind, place)
    if found:
        yield found if dry_run else _available(there, wanted, say, patience)


def delete(
    found: FileSystem, region: str, cluster: str, say: Say, *, dry_run: bool = False, patience: Patience = Patience()
) -> Iterator[Step]:
    """Delete a file system that is ours: its parts, and when they are gone the file system; then `delete_groups` can follow.

    Yields each step. Raises OutlastError; the next run goes on from there.
    """
    there = service(found.type, region, cluster)
    for part in found.parts:
        if not dry_run and part.state != "deleting":
            there.remove(part)
        yield Step("deleted", part.kind, f"{part.id} ({part.place})")
    if not dry_run:
        waiting = f"what belongs to file system {found.id} is being deleted"
        _until(lambda: not getattr(_find(there, found.name), "parts", ()), waiting, say, patience)
        if (now := _find(there, found.name)) and now.state != "deleting":
            there.delete(found.id)
        _until(lambda: _find(there, found.name) is None, f"file system {found.id} is being deleted", say, patience)
    yield Step("deleted", "file system", found.id)


def delete_groups(
    region: str, cluster: str, name: str, say: Say, *, dry_run: bool = False, patience: Patience = Patience()
) -> Iterator[Step]:
    """Delete the security groups of a file system that is gone."""
    ec2 = aws.client("ec2", region)
    for group in network.groups(ec2, {**aws.tags(cluster), VOLUME: name}):
        if not dry_run:
            waiting = f"security group {group['GroupId']} is still in use by a network interface"
            _until(lambda id=group["GroupId"]: _group_gone(ec2, id), waiting, say, patience)  # type: ignore[misc]
        yield Step("deleted", "security group", f"{group['GroupId']} {group['GroupName']}")


def _check(wanted: Wanted) -> None:
    """Raises OutlastError when the cluster has a file system of this name that is of another type."""
    for other in TYPES:
        if other != wanted.type and _find(service(other, wanted.region, wanted.cluster), wanted.name):
            raise OutlastError(f"{wanted.what} is of type {other}; choose another --name for one of type {wanted.type}")


def _find(there: Service, name: str) -> FileSystem | None:
    return next((each for each in there.all() if each.name == name), None)


def _group(wanted: Wanted, net: Network, there: Service, *, dry_run: bool) -> Iterator[Step]:
    """The security group, with all its rules. Its id begins the step's name."""
    ec2 = aws.client("ec2", wanted.region)
    needed = network.rules(net, wanted.allow, there.ports, among=there.among)
    found = network.find_group(ec2, net.vpc, wanted.group)
    if found is None and dry_run:
        yield Step("created", "security group", wanted.group, ", ".join(map(str, needed)))
        return
    id = network.checked(found, wanted.cluster) if found else network.make_group(ec2, net, wanted.tags, wanted.group)
    added = network.admit(ec2, found or {"GroupId": id}, needed, dry_run=dry_run)
    what = "created" if found is None else "changed" if added else "unchanged"
    yield Step(what, "security group", f"{id} {wanted.group}", ", ".join(added))


def _group_gone(ec2: Any, id: str) -> bool:
    """Delete a security group; False while a network interface has it: those go a little later than the file system."""
    try:
        ec2.delete_security_group(GroupId=id)
    except ec2.exceptions.ClientError as error:
        if aws.code(error) == "DependencyViolation":
            return False
        if not aws.absent(error):
            raise
    return True


def _available(there: Service, wanted: Wanted, say: Say, patience: Patience) -> FileSystem:
    """Wait until the file system and its parts are available."""
    found: list[FileSystem] = []

    def ready() -> bool:
        now = _find(there, wanted.name)
        if now is None:
            return False  # AWS lists what was just made a moment later
        states = [now.state, *(each.state for each in now.parts)]
        if broken := [each for each in states if each in _FAILED]:
            raise OutlastError(
                f"{wanted.what}: {now.id} is {broken[0]}; the console of AWS says why. Delete it with outlast volume delete "
                f"{wanted.cluster} --name {wanted.name}, and create it again"
            )
        if "deleting" in states:
            raise OutlastError(f"{wanted.what} is being deleted; create it again when it is gone")
        found[:] = [now]
        return all(each in _READY for each in states)

    _until(ready, f"{wanted.what} is being made", say, patience)
    return found[0]


def _until(done: Callable[[], bool], waiting: str, say: Say, patience: Patience) -> None:
    """Wait until something is so, and say once in a minute what for. Raises OutlastError after the timeout."""
    begun = patience.clock()
    said = begun - 60
    while not done():
        now = patience.clock()
        if now - begun > patience.timeout_s:
            raise OutlastError(f"{waiting}, for {now - begun:.0f} s now; run this again to wait longer")
        if now - said >= 60:
            said = now
            say(f"{waiting} ({now - begun:.0f} s)")
        patience.sleep(patience.poll_s)
