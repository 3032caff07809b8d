"""FSx for Lustre: a fast file system in one zone, with a chosen capacity, and on demand a view of a bucket.

https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-fsx-lustre.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.cloud import aws, network
from outlast.cloud.filesystem import VOLUME, FileSystem, Part, Wanted
from outlast.cloud.network import Network
from outlast.errors import OutlastError

PER_UNIT = {"SCRATCH_2": (), "PERSISTENT_1": (50, 100, 200), "PERSISTENT_2": (125, 250, 500, 1000)}
"""Deployment types, and the MB/s for each TiB that one may choose (SSD)."""
_VERSION = "2.15"
"""Of Lustre: the one that clients of current kernels need."""
_REPOSITORY = "data repository association"
_EVENTS = ["NEW", "CHANGED", "DELETED"]


class Fsx:
    """The Lustre file systems of one cluster."""

    ports: Sequence[tuple[int, int]] = ((988, 988), (1018, 1023))
    among: bool = True

    def __init__(self, region: str, cluster: str) -> None:
        self._client, self._cluster = aws.client("fsx", region), cluster

    def all(self) -> list[FileSystem]:
        """The file systems that are ours, with the repositories that they show."""
        pages = self._client.get_paginator("describe_file_systems").paginate()
        return [self._read(each) for page in pages for each in page["FileSystems"] if self._ours(each)]

    def about(self, wanted: Wanted) -> str:
        """What would be made, and what it is billed by."""
        speed = f", {wanted.per_unit} MB/s for each TiB" if PER_UNIT[wanted.deployment] else ""
        return f"FSx for Lustre, {wanted.deployment}, {wanted.capacity} GiB{speed}; billed by its capacity, used or not"

    def create(self, wanted: Wanted, net: Network, group: str) -> str:
        """Begin to make a file system, in the first zone of the network; its id. The token makes it one for some hours."""
        lustre: dict[str, Any] = {"DeploymentType": wanted.deployment, "DataCompressionType": "LZ4"}
        if PER_UNIT[wanted.deployment]:
            lustre["PerUnitStorageThroughput"] = wanted.per_unit
        made = self._client.create_file_system(
            ClientRequestToken=wanted.group[:63],
            FileSystemType="LUSTRE",
            FileSystemTypeVersion=_VERSION,
            StorageCapacity=wanted.capacity,
            StorageType="SSD",
            SubnetIds=[network.one_per_zone(net.subnets)[0].id],
            SecurityGroupIds=[group],
            Tags=aws.listed(wanted.tags),
            LustreConfiguration=lustre,
        )
        return str(made["FileSystem"]["FileSystemId"])

    def places(self, wanted: Wanted, net: Network) -> list[tuple[str, str]]:
        """The bucket, if one is to be shown."""
        return [(_REPOSITORY, wanted.s3)] if wanted.s3 else []

    def add(self, id: str, place: str, wanted: Wanted, net: Network, group: str) -> None:
        """Begin to show a bucket: its objects appear as files, and files that are written or deleted go back to it."""
        self._client.create_data_repository_association(
            ClientRequestToken=f"{id}-{wanted.name}"[:63],
            FileSystemId=id,
            FileSystemPath="/",
            DataRepositoryPath=place,
            BatchImportMetaDataOnCreate=True,
            S3={"AutoImportPolicy": {"Events": _EVENTS}, "AutoExportPolicy": {"Events": _EVENTS}},
            Tags=aws.listed(wanted.tags),
        )

    def remove(self, part: Part) -> None:
        """Begin to end an association; the files stay."""
        self._client.delete_data_repository_association(AssociationId=part.id, DeleteDataInFileSystem=False)

    def delete(self, id: str) -> None:
        """Begin to delete a file system."""
        self._client.delete_file_system(FileSystemId=id)

    def _ours(self, found: Mapping[str, Any]) -> bool:
        tags = aws.mapped(found.get("Tags"))
        return found["FileSystemType"] == "LUSTRE" and aws.ours(tags, self._cluster) and VOLUME in tags

    def _read(self, found: Mapping[str, Any]) -> FileSystem:
        lustre = found.get("LustreConfiguration") or {}
        return FileSystem(
            "fsx",
            found["FileSystemId"],
            aws.mapped(found["Tags"])[VOLUME],
            str(found.get("Lifecycle", "AVAILABLE")).lower(),
            int(found["StorageCapacity"]) << 30,
            tuple(self._repositories(found["FileSystemId"])) if lustre.get("DeploymentType") != "SCRATCH_1" else (),
            {"dnsname": found["DNSName"], "mountname": lustre.get("MountName", "fsx")},
        )

    def _repositories(self, id: str) -> list[Part]:
        found: list[Mapping[str, Any]] = []
        asked: dict[str, Any] = {"Filters": [{"Name": "file-system-id", "Values": [id]}]}
        while asked:
            page = self._client.describe_data_repository_associations(**asked)
            found += page.get("Associations", ())
            asked = {**asked, "NextToken": page["NextToken"]} if page.get("NextToken") else {}
        return [Part(_REPOSITORY, each["AssociationId"], each["DataRepositoryPath"], each["Lifecycle"].lower()) for each in found]


def checked(wanted: Wanted) -> Wanted:
    """The same, if FSx has such file systems. Raises OutlastError."""
    speeds = PER_UNIT[wanted.deployment]
    if speeds and wanted.per_unit not in speeds:
        known = ", ".join(map(str, speeds))
        raise OutlastError(f"--per-unit {wanted.per_unit}: {wanted.deployment} has {known} MB/s for each TiB; choose one of them")
    if wanted.capacity != 1200 and (wanted.capacity <= 0 or wanted.capacity % 2400):
        raise OutlastError(
            f"--capacity {wanted.capacity}: FSx for Lustre has 1200, 2400 or a multiple of 2400 GiB; choose one of them"
        )
    if wanted.s3 and not wanted.s3.startswith("s3://"):
        raise OutlastError(f"--s3 {wanted.s3}: expected s3://bucket/prefix")
    return wanted
