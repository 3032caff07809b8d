"""The model of `cluster.yaml`: every field with its default, its documentation and the rules between fields.

The text below a field is what users read about it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from outlast import units
from outlast.fleet import machines as ec2
from outlast.spec import fields, validation
from outlast.spec.document import Place
from outlast.spec.validation import Checked

NEWEST = "1.34"
"""Kubernetes of new clusters, where a file names none."""
SPOT_PRIORITY, ON_DEMAND_PRIORITY = 60, 20
"""Priorities of spot and on-demand capacity, where a file gives none."""

_GIB = 2**30
Document = dict[str, Any]
"""A document for eksctl, Helm or Kubernetes; its keys are in the order in which they are written."""
Capacity = Literal["spot", "on-demand"]
InstanceType = Annotated[
    str, fields.Pattern(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", "must be an instance type of EC2, e.g. p4d.24xlarge")
]
Zone = Annotated[str, fields.Pattern(r"[a-z]{2}(-[a-z]+)+-[0-9][a-z]", "must be an availability zone, e.g. us-west-2a")]
Chart = Annotated[str, fields.Pattern(r"v?[0-9][0-9A-Za-z.+-]*", "must be a version, e.g. 1.14.1", 63)]
Policy = Literal["cloudWatch", "autoScaler", "ebs", "efs", "fsx", "imageBuilder", "albIngress", "xRay"]
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
Bucket = Annotated[str, fields.Pattern(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "must be the name of a bucket, without s3://", 63)]


def _labels(value: dict[str, str]) -> dict[str, str]:
    broken: list[tuple[Place, str]] = []
    for name, text in value.items():
        if not _LABEL.fullmatch(name):
            broken.append(((name,), f"labels.{name} is no name of a label; write e.g. example.com/team"))
        elif re.search(r"(^|[./])(kubernetes\.io|k8s\.io|karpenter\.sh|karpenter\.k8s\.aws)/", name):
            broken.append(((name,), f"labels.{name} is set by Kubernetes or Karpenter itself; use a domain of your own"))
        elif not re.fullmatch(fields.LABEL_VALUE, text) or len(text) > 63:
            broken.append(((name,), f"labels.{name} ({text}) must be at most 63 letters, digits, -, _ and ."))
    if broken:
        raise validation.Broken(broken)
    return value


def _whole_gib(value: int) -> int:
    if value % _GIB:
        raise ValueError("must be a whole number of GiB, e.g. 100Gi")
    return value


Labels = Annotated[dict[str, str], AfterValidator(_labels)]
Disk = Annotated[fields.Memory, AfterValidator(_whole_gib)]


class Taint(Checked):
    """A taint of nodes."""

    key: Annotated[fields.Text, fields.TAINT_KEY]
    """Key of the taint."""
    value: Annotated[str, fields.Pattern(fields.LABEL_VALUE, "must be at most 63 letters, digits, -, _ and .", 63)] = ""
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"
    """What it does to pods that do not tolerate it."""


class Described(Checked):
    """A type of machine that Outlast does not know."""

    cpus: Annotated[int, Field(strict=True, ge=1)]
    """vCPUs."""
    memory: fields.Memory
    """Memory: `64Gi`."""
    arch: Literal["amd64", "arm64"] = "amd64"
    """Processor: `arm64` for Graviton."""
    accelerator: Literal["", "nvidia.com/gpu", "aws.amazon.com/neuron"] = ""
    """Kubernetes resource of its accelerators."""
    count: fields.Whole = 0
    """How many accelerators it has."""
    efa: fields.Whole = 0
    """How many EFA interfaces it has."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if bool(self.accelerator) != bool(self.count):
            yield ("count",), "accelerator and count belong together; give both, or neither"

    def machine(self) -> ec2.Machine:
        """The same as a machine of the table."""
        return ec2.Machine(self.cpus, self.memory / _GIB, self.arch, self.accelerator, self.count, self.efa)


class Nodes(Checked):
    """Machines of one shape, from one kind of capacity: what a node group and a NodePool have in common."""

    instead: ClassVar = {
        "instanceType": "instanceTypes, a list",
        "spot": "capacity: spot",
        "capacityType": "capacity: spot or on-demand",
        "weight": "priority",
        "volumeSize": "volume, with its unit: 900Gi",
        "privateNetworking": "private: true",
        "efaEnabled": "efa: true",
        "minSize": "min",
        "maxSize": "max",
        "desiredCapacity": "desired",
        "availabilityZones": "zones",
        "limits": "max, a number of nodes",
    }

    name: Annotated[str, fields.label(40)]
    """Name: lower-case letters, digits and dashes, at most 40 characters."""
    instance_types: Annotated[tuple[InstanceType, ...], Field(min_length=1)]
    """Instance types that may be taken. All must have one shape: the same processors, memory and accelerators."""
    capacity: Capacity = "on-demand"
    """`spot` machines are cheaper and can be taken away within two minutes; `on-demand` ones stay."""
    max: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    """Most nodes."""
    priority: Annotated[int, Field(strict=True, ge=1, le=100)] | None = None
    """Where new nodes come from first: the highest priority that fits the pods, up to its `max`. Default: 60 for spot, 20 for
    on-demand, so spot comes first."""
    zones: tuple[Zone, ...] = ()
    """Availability zones. Default: those of the cluster."""
    volume: Disk = 100 * _GIB
    """Size of each node's disk."""
    labels: Labels = Field({})
    """Labels of the nodes."""
    taints: tuple[Taint, ...] = ()
    """Taints of the nodes."""
    efa: fields.Flag = False
    """Whether nodes get Elastic Fabric Adapters. Needs one zone, and machines that have some."""

    @property
    def preference(self) -> int:
        """The priority that counts."""
        return self.priority or (SPOT_PRIORITY if self.capacity == "spot" else ON_DEMAND_PRIORITY)

    @property
    def gib(self) -> int:
        """Size of the disk in GiB."""
        return self.volume // _GIB


class NodeGroup(Nodes):
    """A node group: an Auto Scaling group of EC2."""

    managed: fields.Flag = True
    """Whether EKS manages the group. A group of your own (`false`) has `capacity-optimized` spot machines of all its types."""
    min: fields.Whole = 0
    """Fewest nodes."""
    desired: fields.Whole | None = None
    """Nodes to begin with. Default: `min`."""
    private: fields.Flag = True
    """Whether nodes are in private subnets, without public addresses."""
    instance_prefix: str = ""
    """Prefix of the machines' names."""
    policies: tuple[Policy, ...] = ()
    """Rights of all pods on these nodes, by name. Prefer rights of a ServiceAccount (`s3`)."""
    ssh_key: str = ""
    """File of the public key that may log in by SSH: `~/.ssh/id_rsa.pub`. Default: nobody may."""

    @property
    def first(self) -> int:
        """Nodes to begin with."""
        return self.min if self.desired is None else self.desired

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.min > self.max:
            yield ("min",), f"{self.name}: min ({self.min}) is above max ({self.max}); swap them or raise max"
        elif self.desired is not None and not self.min <= self.desired <= self.max:
            yield ("desired",), f"{self.name}: desired ({self.desired}) must be from min ({self.min}) to max ({self.max})"


class NodePool(Nodes):
    """A NodePool of Karpenter, which starts machines for pending pods and takes them away when they are empty."""

    empty_after: fields.Duration = units.duration("30s")
    """How long a node stays when it has become empty."""


def _addon(value: Any) -> Any:
    """`true` is an add-on with its defaults, a version one with that version, `false` none."""
    if value is True:
        return {}
    return {"version": value} if isinstance(value, str | float) else value or None


class Addon(Checked):
    """An add-on. `true` means its defaults, `"1.2.3"` that version, `false` none."""

    version: Chart | None = None
    """Version: of the Helm chart, or of the EKS add-on. Default: a pinned version of the chart, the newest of an EKS add-on."""


class Queue(Checked):
    """A Queue of Volcano."""

    name: Annotated[fields.Text, fields.object_name(63)]
    """Name of the queue: `scheduling: {queue: ...}` of a job."""
    weight: Annotated[int, Field(strict=True, ge=1)] = 1
    """Its share of the cluster beside other queues."""
    capability: dict[str, str | int | float] = Field({})
    """The most that its jobs may use: `{cpu: 64, nvidia.com/gpu: 8}`. Default: no limit."""
    reclaimable: fields.Flag = True
    """Whether others may take back what it uses beyond its share."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        for name, value in self.capability.items():
            try:
                units.quantity(value)
            except ValueError:
                yield ("capability", name), f"capability.{name} ({value}) is not a quantity; write 64 or 512Gi"


class Volcano(Addon):
    """Volcano, a batch scheduler, and its queues."""

    queues: tuple[Queue, ...] = ()
    """Queues to create, besides Volcano's own `default`."""


class Outlast(Addon):
    """Outlast itself: its operator and, if wanted, an etcd."""

    image: str = ""
    """Image of the operator: one of your own. Default: the published one, of `version`."""
    etcd: fields.Flag = False
    """Whether to install an etcd."""
    etcd_members: Literal[1, 3] = 3
    """Members of the etcd; three survive the loss of a node."""
    etcd_storage: Annotated[str, fields.object_name(253)] = "gp2"
    """StorageClass of its volumes; `none`: no volumes, for one member."""
    etcd_for: tuple[Annotated[str, fields.label(63)], ...] = ()
    """Namespaces whose jobs may use it."""
    node_watch: fields.Flag | None = None
    """Whether a watcher runs on each node, which drains it before it is taken away. Default: where there is spot capacity."""
    node_watch_queue: Annotated[
        str,
        fields.Pattern(
            r"(https://sqs\.[a-z0-9-]+\.amazonaws\.com/[0-9]{12}/[A-Za-z0-9_-]+(\.fifo)?)?",
            "must be the URL of an SQS queue: https://sqs.us-west-2.amazonaws.com/123456789012/interruptions",
        ),
    ] = ""
    """SQS queue that gets a message about each notice. Default: none."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if not self.etcd and self.model_fields_set & {"etcd_members", "etcd_storage", "etcd_for"}:
            yield (), "outlast.etcdMembers, etcdStorage and etcdFor configure an etcd; add etcd: true, or remove them"
        if self.image and self.version:
            yield ("image",), f"outlast.image names its version; remove version: {self.version}"
        if self.etcd_storage == "none" and self.etcd_members > 1:
            yield (
                ("etcdStorage",),
                f"outlast.etcdStorage none goes with etcdMembers: 1 only, not {self.etcd_members}; give a StorageClass",
            )
        if self.node_watch_queue and self.node_watch is False:
            yield ("nodeWatchQueue",), "outlast.nodeWatchQueue is for the watcher of nodes; set nodeWatch: true, or remove it"


On = Annotated[Addon | None, BeforeValidator(_addon)]


class Addons(Checked):
    """What runs in the cluster besides jobs."""

    instead: ClassVar = {"clusterAutoscaler": "autoscaler: true", "containerInsights": "cloudWatch: true"}

    nvidia: On = Addon()
    """NVIDIA's device plugin, on the nodes with NVIDIA's GPUs, if there are any."""
    neuron: On = Addon()
    """AWS's device plugin for Trainium and Inferentia, on the nodes that have them, if there are any."""
    efa: On = Addon()
    """The device plugin for EFA, if a NodePool has it. For node groups eksctl installs it."""
    ebs: On = None
    """Volumes on disks, the EBS CSI driver."""
    efs: On = None
    """Shared volumes on EFS, its CSI driver; see `outlast volume`."""
    fsx: On = None
    """Shared volumes on FSx for Lustre, its CSI driver."""
    metrics_server: On = None
    """metrics-server: `kubectl top`, `outlast top`."""
    cloud_watch: On = None
    """CloudWatch with Container Insights, and detailed metrics of self-managed groups."""
    autoscaler: On = None
    """cluster-autoscaler, which adds nodes to node groups for pending pods."""
    karpenter: On = None
    """Karpenter, which makes nodes of NodePools."""
    volcano: Annotated[Volcano | None, BeforeValidator(_addon)] = None
    """Volcano, a batch scheduler."""
    kueue: On = None
    """Kueue, which admits jobs to queues."""
    prometheus: On = None
    """Prometheus, Alertmanager and Grafana."""
    outlast: Annotated[Outlast | None, BeforeValidator(_addon)] = Outlast()
    """Outlast's operator."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.autoscaler and self.karpenter:
            yield (
                ("karpenter",),
                "addons.autoscaler and addons.karpenter are both on, and both would add nodes for the same pods; keep one",
            )
        etcd = self.outlast
        if etcd and etcd.etcd and etcd.etcd_storage != "none" and not self.ebs:
            yield (
                ("outlast",),
                "addons.outlast.etcd needs volumes; add ebs: true, or {etcdMembers: 1, etcdStorage: none} for one without",
            )


class S3(Checked):
    """Rights of workers on S3. Jobs use them with `template: {spec: {serviceAccountName: reads-s3}}`."""

    namespace: Annotated[str, fields.label(63)] = "default"
    """Namespace of the jobs."""
    service_account: Annotated[fields.Text, fields.object_name(63)] = "reads-s3"
    """ServiceAccount that gets the rights; it is created."""
    by: Literal["pod-identity", "irsa"] = "pod-identity"
    """How pods get them: EKS Pod Identity, or IAM roles for service accounts, which need `oidc: true`."""
    read: tuple[Bucket, ...] = ()
    """Buckets to read. Default, if none is written either: all (AmazonS3ReadOnlyAccess)."""
    write: tuple[Bucket, ...] = ()
    """Buckets to read and write."""


class Cluster(Checked):
    """A cluster on EKS: machines, their order, and what runs beside jobs."""

    instead: ClassVar = {
        "metadata": "name, region and version at the top",
        "nodes": "nodeGroups or nodePools",
        "managedNodeGroups": "nodeGroups",
        "availabilityZones": "zones",
        "withOIDC": "oidc: true",
    }

    name: Annotated[str, fields.label(40)]
    """Name of the cluster: lower-case letters, digits and dashes, at most 40 characters."""
    region: Annotated[str, fields.Pattern(r"[a-z]{2}(-[a-z]+)+-[0-9]", "must be a region of AWS, e.g. us-west-2")]
    """Region of AWS."""
    zones: tuple[Zone, ...] = ()
    """Availability zones, two or more. Default: eksctl chooses."""
    version: Annotated[str, fields.Pattern(r"1\.[0-9]{2}", 'must be a minor version of Kubernetes in quotes, e.g. "1.34"')] = (
        NEWEST
    )
    """Version of Kubernetes, in quotes."""
    oidc: fields.Flag = True
    """Whether the cluster has an OIDC provider, which IAM roles for service accounts need."""
    tags: dict[str, str] = Field({})
    """Tags of everything that is made in AWS, besides our own (`outlast:made-by`, `outlast:cluster`)."""
    machines: dict[str, Described] = Field({})
    """Instance types that Outlast does not know: `{x9.large: {cpus: 2, memory: 8Gi}}`."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Node groups."""
    node_pools: tuple[NodePool, ...] = ()
    """NodePools of Karpenter."""
    addons: Addons = Addons()
    """What runs in the cluster besides jobs."""
    s3: tuple[S3, ...] = ()
    """Rights of workers on S3."""

    @property
    def nodes(self) -> tuple[NodeGroup | NodePool, ...]:
        """All node groups and NodePools, in the order of the file."""
        return (*self.node_groups, *self.node_pools)

    @property
    def watched(self) -> bool:
        """Whether a watcher runs on each node."""
        addon = self.addons.outlast
        if addon is None or addon.node_watch is not None:
            return bool(addon and addon.node_watch)
        return bool(addon.node_watch_queue) or any(nodes.capacity == "spot" for nodes in self.nodes)

    def machine(self, instance_type: str) -> ec2.Machine:
        """What machines of this type have; the model is valid only if all types are known."""
        described = self.machines.get(instance_type)
        found = described.machine() if described else ec2.machine(instance_type)
        if found is None:
            raise KeyError(instance_type)
        return found

    def shape(self, nodes: Nodes) -> ec2.Machine:
        """What each of these nodes has."""
        return self.machine(nodes.instance_types[0])

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        if not {"nodeGroups", "node_groups", "nodePools", "node_pools"} & set(given):
            yield (), "there are no nodes; give nodeGroups, nodePools, or both"

    def rules(self) -> Iterator[tuple[Place, str]]:
        yield from self._zones()
        yield from self._named_twice()
        for list_, nodes in (("nodeGroups", self.node_groups), ("nodePools", self.node_pools)):
            for index, each in enumerate(nodes):
                for below, sentence in self._machines(each):
                    yield (list_, index, *below), sentence
        yield from self._karpenter()
        if not self.oidc:
            for index, rights in enumerate(self.s3):
                if rights.by == "irsa":
                    yield ("s3", index, "by"), "s3.by is irsa, which needs an OIDC provider; set oidc: true, or by: pod-identity"

    def _zones(self) -> Iterator[tuple[Place, str]]:
        if len(self.zones) == 1:
            yield ("zones",), f"zones ({self.zones[0]}) is one; EKS needs at least two for its control plane; add one"
        places: list[tuple[Place, str]] = [(("zones", i), zone) for i, zone in enumerate(self.zones)]
        for list_, nodes in (("nodeGroups", self.node_groups), ("nodePools", self.node_pools)):
            for index, each in enumerate(nodes):
                places += [((list_, index, "zones", i), zone) for i, zone in enumerate(each.zones)]
        for place, zone in places:
            if zone[:-1] != self.region:
                yield place, f"{validation.name(place)} ({zone}) is not in region {self.region}; correct one of them"
            elif self.zones and zone not in self.zones:
                named = ", ".join(self.zones)
                yield place, f"{validation.name(place)} ({zone}) is not one of the cluster's zones ({named}); add it there"

    def _named_twice(self) -> Iterator[tuple[Place, str]]:
        first: dict[str, Place] = {}
        for list_, nodes in (("nodeGroups", self.node_groups), ("nodePools", self.node_pools)):
            for index, each in enumerate(nodes):
                place: Place = (list_, index, "name")
                if first.setdefault(each.name, place) != place:
                    other = validation.name(first[each.name])
                    yield place, f"{validation.name(place)} is {each.name}, as {other} is; name one of them otherwise"

    def _machines(self, nodes: Nodes) -> Iterator[tuple[Place, str]]:
        found = {}
        for index, each in enumerate(nodes.instance_types):
            try:
                found[each] = self.machine(each)
            except KeyError:
                yield (
                    ("instanceTypes", index),
                    f"{nodes.name}: {each} is not known; correct it, or describe it: "
                    f"machines: {{{each}: {{cpus: 8, memory: 32Gi}}}}",
                )
        if not ec2.alike(found.values(), efa=nodes.efa):
            shown = "; ".join(f"{name} has {each}" for name, each in found.items())
            yield (
                ("instanceTypes",),
                f"{nodes.name}: instanceTypes have several shapes ({shown}), and autoscalers plan with one; make a group of each",
            )
        if nodes.efa and (lacking := [name for name, each in found.items() if not each.efa]):
            yield ("efa",), f"{nodes.name}: efa is true, but {', '.join(lacking)} has none; choose other machines, or efa: false"
        if nodes.efa and len(nodes.zones) != 1:
            yield ("efa",), f"{nodes.name}: efa needs one zone, since EFA does not cross zones; set zones: [{self.region}a]"

    def _karpenter(self) -> Iterator[tuple[Place, str]]:
        if self.node_pools and not self.addons.karpenter:
            yield ("nodePools",), "nodePools need Karpenter; add addons: {karpenter: true}, or write nodeGroups"
        home = any(each.managed and each.capacity == "on-demand" and each.first and not each.taints for each in self.node_groups)
        if self.addons.karpenter and not home:
            yield (
                ("addons", "karpenter"),
                "Karpenter runs on a node that it did not make; add a managed on-demand node group without taints and with "
                "desired: 1 or more",
            )
