"""EFS: one file system that all zones of a region mount by NFS, through a mount target in each.

It grows with what is written; no size is chosen. https://docs.aws.amazon.com/efs/latest/ug/API_Operations.html

Only root may write into the root directory of a new file system, and workers are not root. So pods mount it through an access
point: a directory that belongs to their user, as whom every pod reads and writes.
https://docs.aws.amazon.com/efs/latest/ug/efs-access-points.html
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from outlast import contract
from outlast.cloud import aws, network
from outlast.cloud.filesystem import VOLUME, FileSystem, Part, Wanted
from outlast.cloud.network import Network
from outlast.errors import OutlastError

_TOKEN = 64
"""The most characters of a creation token."""
_SHARED, _POINT, _TARGET = "/shared", "access point", "mount target"
"""The directory of the access point; kinds of parts."""


class Efs:
    """The file systems of one cluster."""

    ports: Sequence[tuple[int, int]] = ((2049, 2049),)
    among: bool = False

    def __init__(self, region: str, cluster: str) -> None:
        self._client, self._cluster = aws.client("efs", region), cluster

    def all(self) -> list[FileSystem]:
        """The file systems that are ours, with their mount targets."""
        pages = self._client.get_paginator("describe_file_systems").paginate()
        return [self._read(each) for page in pages for each in page["FileSystems"] if self._ours(each)]

    def about(self, wanted: Wanted) -> str:
        """What would be made, and what it is billed by."""
        by = "stored bytes and bytes read and written" if wanted.throughput == "elastic" else "stored bytes"
        return f"EFS, encrypted, {wanted.throughput} throughput; billed by {by}"

    def create(self, wanted: Wanted, net: Network, group: str) -> str:
        """Begin to make a file system; its id. The creation token makes it one, however often it is asked for."""
        try:
            made = self._client.create_file_system(
                CreationToken=token(wanted.group),
                PerformanceMode="generalPurpose",
                ThroughputMode=wanted.throughput,
                Encrypted=True,
                Tags=aws.listed(wanted.tags),
            )
        except self._client.exceptions.FileSystemAlreadyExists as error:
            raise OutlastError(
                f"{wanted.what}: a file system of EFS has the creation token {token(wanted.group)} but not our tags; choose "
                "another --name, or delete it"
            ) from error
        return str(made["FileSystemId"])

    def places(self, wanted: Wanted, net: Network) -> list[tuple[str, str]]:
        """A mount target in each zone of the cluster, and the access point."""
        return [*((_TARGET, each.zone) for each in network.one_per_zone(net.subnets)), (_POINT, _SHARED)]

    def add(self, id: str, place: str, wanted: Wanted, net: Network, group: str) -> None:
        """Begin to make the mount target of a zone, or the access point."""
        if place == _SHARED:
            user = {"Uid": contract.Pod.USER, "Gid": contract.Pod.USER}
            owner = {"OwnerUid": contract.Pod.USER, "OwnerGid": contract.Pod.USER, "Permissions": "0775"}
            self._client.create_access_point(
                FileSystemId=id,
                ClientToken=token(f"{id}{_SHARED}"),
                PosixUser=user,
                RootDirectory={"Path": _SHARED, "CreationInfo": owner},
                Tags=aws.listed(wanted.tags),
            )
            return
        (subnet,) = [each for each in network.one_per_zone(net.subnets) if each.zone == place]
        self._client.create_mount_target(FileSystemId=id, SubnetId=subnet.id, SecurityGroups=[group])

    def remove(self, part: Part) -> None:
        """Begin to delete a mount target, or the access point."""
        if part.kind == _POINT:
            self._client.delete_access_point(AccessPointId=part.id)
        else:
            self._client.delete_mount_target(MountTargetId=part.id)

    def delete(self, id: str) -> None:
        """Begin to delete a file system without mount targets."""
        self._client.delete_file_system(FileSystemId=id)

    def _ours(self, found: Mapping[str, Any]) -> bool:
        tags = aws.mapped(found.get("Tags"))
        return aws.ours(tags, self._cluster) and VOLUME in tags and found["LifeCycleState"] != "deleted"

    def _read(self, found: Mapping[str, Any]) -> FileSystem:
        pages = self._client.get_paginator("describe_mount_targets").paginate(FileSystemId=found["FileSystemId"])
        mounts = [
            Part(
                _TARGET,
                each["MountTargetId"],
                each.get("AvailabilityZoneName", each["SubnetId"]),
                each["LifeCycleState"],
                each.get("IpAddress", ""),
            )
            for page in pages
            for each in page["MountTargets"]
            if each["LifeCycleState"] != "deleted"
        ]
        points = self._points(found["FileSystemId"])
        return FileSystem(
            "efs",
            found["FileSystemId"],
            aws.mapped(found["Tags"])[VOLUME],
            found["LifeCycleState"],
            int(found["SizeInBytes"]["Value"]),
            (*sorted(mounts, key=lambda each: each.place), *points),
            mounted=points[0].id if points else "",
        )

    def _points(self, id: str) -> list[Part]:
        """The access point of ours: one, or none."""
        pages = self._client.get_paginator("describe_access_points").paginate(FileSystemId=id)
        return [
            Part(_POINT, each["AccessPointId"], _SHARED, each["LifeCycleState"])
            for page in pages
            for each in page["AccessPoints"]
            if aws.ours(aws.mapped(each.get("Tags")), self._cluster) and each["LifeCycleState"] != "deleted"
        ]


def token(name: str) -> str:
    """The creation token for a name; long ones are shortened so that they still differ."""
    return name if len(name) <= _TOKEN else f"{name[: _TOKEN - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
