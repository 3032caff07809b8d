"""What a shared file system of a cluster is: the wish, the thing as it is, and what EFS and FSx for Lustre have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outlast.cloud import aws
from outlast.cloud.network import Allow, Network

Type = Literal["efs", "fsx"]
TYPES: tuple[Type, ...] = ("efs", "fsx")
VOLUME = "outlast:volume"
"""Tag: the name of a file system; its security group has it as well."""


@dataclass(frozen=True)
class Wanted:
    """A file system that a cluster is to have."""

    cluster: str
    region: str
    name: str
    type: Type = "efs"
    allow: Allow = "vpc"
    throughput: str = "elastic"
    """EFS: elastic or bursting."""
    deployment: str = "PERSISTENT_2"
    """FSx: SCRATCH_2, PERSISTENT_1 or PERSISTENT_2."""
    capacity: int = 1200
    """FSx: GiB."""
    per_unit: int = 125
    """FSx, persistent: MB/s for each TiB."""
    s3: str = ""
    """FSx: s3://bucket/prefix, whose objects appear as files, and to which new files are written back."""

    @property
    def what(self) -> str:
        """Names it in sentences."""
        return f"volume {self.name} of {self.cluster} in {self.region}"

    @property
    def group(self) -> str:
        """The name of its security group."""
        return f"outlast-{self.cluster}-{self.name}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags of its parts."""
        return {**aws.tags(self.cluster), VOLUME: self.name, "Name": self.group}


@dataclass(frozen=True)
class Part:
    """What belongs to a file system: a mount target or the access point of EFS, a data repository association of FSx."""

    kind: str
    id: str
    place: str
    """The zone, the directory, or the URL of the repository."""
    state: str
    address: str = ""


@dataclass(frozen=True)
class FileSystem:
    """A file system as it is."""

    type: Type
    id: str
    name: str
    state: str
    """available | creating | updating | deleting | failed ..."""
    size: int
    """Bytes: of EFS what is used, of FSx what there is."""
    parts: tuple[Part, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    """What the CSI driver has to know beside the id."""
    mounted: str = ""
    """EFS: the id of the access point that pods mount it through."""

    @property
    def handle(self) -> str:
        """By what the CSI driver knows it. https://github.com/kubernetes-sigs/aws-efs-csi-driver"""
        return f"{self.id}::{self.mounted}" if self.mounted else self.id


@dataclass(frozen=True)
class Step:
    """What happened to one thing, or would happen."""

    what: str
    """created | changed | unchanged | deleted | kept"""
    kind: str
    """`security group`, `file system`, `mount target`, `access point`"""
    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what:9}  {self.kind} {self.name}" + (f": {self.why}" if self.why else "")


class Service(Protocol):
    """EFS, or FSx for Lustre, as far as one cluster's file systems go."""

    ports: Sequence[tuple[int, int]]
    """Ranges of TCP ports that clients need."""
    among: bool
    """Whether its servers need them among themselves."""

    def all(self) -> list[FileSystem]:
        """The file systems that are ours."""

    def about(self, wanted: Wanted) -> str:
        """What would be made, and what it is billed by."""

    def create(self, wanted: Wanted, net: Network, group: str) -> str:
        """Begin to make a file system; its id. Raises OutlastError if another has what it is known by."""

    def places(self, wanted: Wanted, net: Network) -> list[tuple[str, str]]:
        """The parts that it is to have: (kind, place)."""

    def add(self, id: str, place: str, wanted: Wanted, net: Network, group: str) -> None:
        """Begin to make a part."""

    def remove(self, part: Part) -> None:
        """Begin to delete a part."""

    def delete(self, id: str) -> None:
        """Begin to delete a file system, whose parts are gone."""
