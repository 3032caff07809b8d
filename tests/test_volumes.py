"""`outlast volume`: EFS and FSx for Lustre. AWS is moto, behind a proxy; the cluster has no server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas
from typer.main import get_command

from fake_cluster import Document, FakeCluster
from faults import Exchange, Fault, Proxy, Request, lost, reset
from outlast import kube
from outlast.cli import volume
from outlast.cloud import aws, efs, fsx, network, volumes
from outlast.cloud.filesystem import FileSystem, Step, Wanted
from outlast.cloud.network import Network, Rule, Subnet
from outlast.cloud.volumes import Patience
from outlast.errors import OutlastError
from outlast.kube import kinds
from outlast.manifests import storage
from servers import REGION, Place

AT_ONCE = Patience(timeout_s=60, poll_s=0)


# What is decided


def test_a_zone_gets_one_mount_target_in_a_private_subnet() -> None:
    there = [
        Subnet("c", "us-west-2b"),
        Subnet("a", "us-west-2a", public=True),
        Subnet("d", "us-west-2a"),
        Subnet("b", "us-west-2b"),
    ]
    assert network.one_per_zone(there) == (Subnet("d", "us-west-2a"), Subnet("b", "us-west-2b"))


def test_who_may_mount_is_the_vpc_or_the_nodes_of_the_cluster() -> None:
    net = Network("vpc-1", ("10.0.0.0/16", "100.64.0.0/16"), (), group="sg-nodes")
    nfs = [(2049, 2049)]
    assert network.rules(net, "vpc", nfs, among=False) == [Rule(2049, 2049, "10.0.0.0/16"), Rule(2049, 2049, "100.64.0.0/16")]
    assert network.rules(net, "cluster", nfs, among=True) == [Rule(2049, 2049, "sg-nodes"), Rule(2049, 2049, "")]
    with pytest.raises(OutlastError, match="--allow cluster: the cluster's security group is not known; use --allow vpc"):
        network.rules(Network("vpc-1", (), ()), "cluster", nfs, among=False)


def a_share(**fields: Any) -> storage.Shared:
    return storage.Shared(**{"type": "efs", "id": "fs-1", "name": "efs", "namespace": "default", "storage_class": "efs-sc",
                             "volume": "efs-pv", "claim": "efs-pvc", **fields})  # fmt: skip


@pytest.mark.parametrize("share", [a_share(), a_share(type="fsx", attributes={"dnsname": "a.b", "mountname": "c"})])
def test_what_kubernetes_gets_is_what_it_takes(share: storage.Shared) -> None:
    for document in storage.documents(share):
        schemas.validate(document, "1.36", strict=True)
    _, volume, claim = storage.documents(share)
    assert (volume["spec"]["claimRef"]["name"], claim["spec"]["volumeName"]) == ("efs-pvc", "efs-pv")
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"] == {"storage": "5Gi"}
    assert volume["spec"]["csi"]["driver"] == f"{share.type}.csi.aws.com"
    through = storage.volume(dataclasses.replace(share, id=f"{share.id}::fsap-1"))
    assert storage.differs(through, volume) == "", "a volume of before there was an access point stays in use"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 3000}, "--capacity 3000: FSx for Lustre has 1200, 2400 or a multiple of 2400 GiB; choose one of them"),
        ({"per_unit": 200}, "--per-unit 200: PERSISTENT_2 has 125, 250, 500, 1000 MB/s for each TiB; choose one of them"),
        ({"s3": "bucket"}, "--s3 bucket: expected s3://bucket/prefix"),
    ],
)
def test_what_lustre_cannot_be_is_said(options: dict[str, Any], said: str) -> None:
    assert fsx.checked(Wanted("c", "r", "fsx", "fsx", capacity=4800, per_unit=250))
    with pytest.raises(OutlastError) as caught:
        fsx.checked(Wanted("c", "r", "fsx", "fsx", **options))
    assert str(caught.value) == said


def test_a_long_name_has_a_token_that_efs_takes() -> None:
    assert efs.token("outlast-do-eks-efs") == "outlast-do-eks-efs"
    one, two = efs.token("a" * 90 + "1"), efs.token("a" * 90 + "2")
    assert len(one) == len(two) == 64
    assert one != two


# Against AWS


@dataclass
class Eks:
    """A cluster in two zones, with a public and a private subnet in the first; a region of AWS of our own making."""

    proxy: Proxy
    name: str
    vpc: str
    subnets: list[str]
    associations: dict[str, Any] = field(default_factory=dict)
    """Data repositories of Lustre, which moto does not know."""

    def client(self, service: str) -> Any:
        return aws.client(service, REGION)

    @property
    def net(self) -> Network:
        return network.of_cluster(REGION, self.name)

    def wanted(self, **fields: Any) -> Wanted:
        return Wanted(**{"cluster": self.name, "region": REGION, "name": "efs", **fields})

    def create(self, dry_run: bool = False, **fields: Any) -> tuple[list[str], FileSystem | None]:
        wanted = self.wanted(**fields)
        with aws.in_our_words(wanted.what):
            steps = list(volumes.create(wanted, self.net, lambda _: None, dry_run=dry_run, patience=AT_ONCE))
        made = [each for each in steps if isinstance(each, FileSystem)]
        return [str(each) for each in steps if isinstance(each, Step)], made[0] if made else None

    def delete(self, name: str = "efs") -> None:
        with aws.in_our_words("it"):
            for each in volumes.listed(REGION, self.name, name):
                list(volumes.delete(each, REGION, self.name, lambda _: None, patience=AT_ONCE))
            list(volumes.delete_groups(REGION, self.name, name, lambda _: None, patience=AT_ONCE))

    def left(self) -> list[str]:
        """What of ours is there, its rules and zones with it, without ids."""
        found = [
            f"{each['GroupName'].removeprefix(f'outlast-{self.name}-')} "
            + " ".join(sorted(f"{rule['FromPort']}-{rule['ToPort']}" for rule in each["IpPermissions"]))
            for each in network.groups(self.client("ec2"), aws.tags(self.name))
        ]
        there = volumes.listed(REGION, self.name)
        return found + [f"{each.type} {each.state} {' '.join(part.place for part in each.parts)}" for each in there]


@pytest.fixture
def eks(aws_proxy: Proxy, moto: Place, monkeypatch: pytest.MonkeyPatch) -> Eks:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    aws_proxy.fault = lambda _: None
    aws_proxy.forget()
    ec2 = aws.client("ec2", REGION)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"]["SubnetId"]
        for n, zone in enumerate("aab")
    ]
    ec2.modify_subnet_attribute(SubnetId=subnets[0], MapPublicIpOnLaunch={"Value": True})
    name = f"do-eks-{uuid.uuid4().hex[:8]}"
    aws.client("eks", REGION).create_cluster(
        name=name, roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig={"subnetIds": subnets}
    )
    there = Eks(aws_proxy, name, vpc, subnets)
    aws_proxy.fault = lambda request: repositories(there, request)
    return there


def repositories(eks: Eks, request: Request) -> Fault | None:
    """FSx's data repository associations."""
    target = request.headers.get("x-amz-target", "").rpartition(".")[2]
    if "DataRepositoryAssociation" not in target:
        return None
    asked = json.loads(request.body)
    answer: dict[str, Any] = {}
    if target.startswith("Create"):
        path = asked["DataRepositoryPath"]
        made = {"AssociationId": f"dra-{len(path):017}", "FileSystemId": asked["FileSystemId"], "DataRepositoryPath": path}
        eks.associations[made["AssociationId"]] = {**made, "Lifecycle": "AVAILABLE"}
        answer = {"Association": made}
    elif target.startswith("Delete"):
        del eks.associations[asked["AssociationId"]]
    else:
        (id,) = asked["Filters"][0]["Values"]
        answer = {"Associations": [each for each in eks.associations.values() if each["FileSystemId"] == id]}
    return lambda exchange: exchange.reply(200, [("Content-Type", "application/x-amz-json-1.1")], json.dumps(answer).encode())


def changes(request: Request) -> bool:
    """Whether a request would change something in AWS."""
    target = request.headers.get("x-amz-target", "").rpartition(".")[2]
    reads = b"Action=Describe" in request.body or target.startswith("Describe")
    return request.method != "GET" and not reads


EFS = ["efs 2049-2049", f"efs available {REGION}a {REGION}b /shared"]
LUSTRE = ["efs 1018-1023 988-988", "fsx available s3://data"]


def test_twice_is_once(eks: Eks) -> None:
    told, made = eks.create()
    assert [each.partition(" ")[0] for each in told] == ["created"] * 5
    assert made
    assert [part.place for part in made.parts] == [f"{REGION}a", f"{REGION}b", "/shared"]
    (point,) = eks.client("efs").describe_access_points(FileSystemId=made.id)["AccessPoints"]
    assert made.handle == f"{made.id}::{point['AccessPointId']}"
    assert (point["PosixUser"]["Uid"], point["RootDirectory"]["CreationInfo"]["OwnerUid"]) == (1000, 1000), "workers can write"
    before = eks.left()
    assert before == EFS
    eks.proxy.forget()
    again, same = eks.create()
    assert {each.split()[0] for each in again} == {"unchanged"}
    assert (same, eks.left()) == (made, before)
    assert not [each for each in eks.proxy.requests if changes(each)]
    with pytest.raises(OutlastError, match="is of type efs; choose another --name for one of type fsx"):
        eks.create(type="fsx")


@pytest.mark.parametrize(
    ("how", "calls", "ways", "left"),
    [
        ({}, 6, [lost], EFS),
        pytest.param({}, 6, [reset], EFS, marks=pytest.mark.slow),
        pytest.param({"type": "fsx", "s3": "s3://data"}, 7, [reset, lost], LUSTRE, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_any_call_is_completed_by_the_next(
    eks: Eks, how: dict[str, Any], calls: int, ways: list[Fault], left: list[str]
) -> None:
    """The connection breaks at each call that changes something, before AWS hears it or before its answer comes; nothing after it
    is done."""
    for at, last in [(at, last) for at in range(calls) for last in ways]:
        with cut_off(eks, at, last):
            eks.create(**how)
        eks.create(**how)
        assert eks.left() == left, (at, last)
        eks.delete()


@contextlib.contextmanager
def cut_off(eks: Eks, at: int, last: Fault = reset) -> Iterator[None]:
    """The connection breaks at the call number `at` that changes something, and at each call after it."""
    base, left = eks.proxy.fault, [at]

    def fault(request: Request) -> Fault | None:
        if left[0] < 0:
            return reset
        left[0] -= changes(request)
        return last if left[0] < 0 else base(request)

    eks.proxy.fault = fault
    with pytest.raises(OutlastError, match="AWS cannot be reached"):
        yield
    eks.proxy.fault = base


@pytest.mark.parametrize(("how", "calls"), [({}, (0, 1, 1, 1)), ({"type": "fsx", "s3": "s3://data"}, (0, 1, 1))])
def test_a_deletion_that_was_cut_off_is_completed(eks: Eks, how: dict[str, Any], calls: tuple[int, ...]) -> None:
    """At the mount targets or the association, at the file system, at the security group."""
    eks.create(**how)
    for at in calls:
        with cut_off(eks, at):
            eks.delete()
    eks.delete()
    assert eks.left() == []


def test_lustre_shows_a_bucket(eks: Eks) -> None:
    how: dict[str, Any] = {"type": "fsx", "s3": "s3://data"}
    told, made = eks.create(**how)
    assert made
    assert set(made.attributes) == {"dnsname", "mountname"}
    assert eks.left() == LUSTRE
    assert "FSx for Lustre, PERSISTENT_2, 1200 GiB, 125 MB/s for each TiB; billed by its capacity, used or not" in told[1]
    assert {each.split()[0] for each in eks.create(**how)[0]} == {"unchanged"}


def test_a_dry_run_makes_nothing(eks: Eks) -> None:
    eks.proxy.forget()
    told, made = eks.create(dry_run=True)
    assert [each.split()[:3] for each in told] == [
        ["created", "security", "group"],
        ["created", "file", "system"],
        ["created", "mount", "target"],
        ["created", "mount", "target"],
        ["created", "access", "point"],
    ]
    assert made is None
    assert not [each for each in eks.proxy.requests if changes(each)]


def test_what_others_have_made_is_neither_used_nor_deleted(eks: Eks) -> None:
    ec2, client = eks.client("ec2"), eks.client("efs")
    taken = ec2.create_security_group(GroupName=eks.wanted().group, Description="theirs", VpcId=eks.vpc)["GroupId"]
    with pytest.raises(OutlastError, match=rf"\({taken}\) was not made by Outlast for {eks.name}; rename or delete it"):
        eks.create()
    theirs = client.create_file_system(CreationToken=eks.wanted(name="b").group)["FileSystemId"]
    with pytest.raises(OutlastError, match=r"has the creation token outlast-.*-b but not our tags; choose another --name"):
        eks.create(name="b")
    client.create_file_system(
        CreationToken=f"other-{eks.name}", Tags=[{"Key": "outlast:cluster", "Value": eks.name}, {"Key": "Name", "Value": "efs"}]
    )
    eks.create(name="c")
    eks.delete("b")
    eks.delete("c")
    assert eks.left() == []
    assert ec2.describe_security_groups(GroupIds=[taken])["SecurityGroups"]
    assert client.describe_file_systems(FileSystemId=theirs)["FileSystems"]
    assert client.describe_file_systems(CreationToken=f"other-{eks.name}")["FileSystems"]


def refused(code: str, message: str) -> Fault:
    def fault(exchange: Exchange) -> None:
        body = json.dumps({"ErrorCode": code, "message": message}).encode()
        exchange.reply(403, [("x-amzn-ErrorType", code), ("Content-Type", "application/json")], body)

    return fault


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "AccessDeniedException",
            r"volume efs of .* in us-east-1: the credentials do not .*; it needs elasticfilesystem:CreateFil",
        ),
        ("FileSystemLimitExceeded", r"a quota of the account is reached in us-east-1 .*, or have the quota raised"),
    ],
)
def test_what_is_denied_is_named_and_what_was_made_is_used_later(eks: Eks, code: str, said: str) -> None:
    base = eks.proxy.fault

    def fault(request: Request) -> Fault | None:
        return refused(code, "no") if request.path.startswith("/2015-02-01/file") and changes(request) else base(request)

    eks.proxy.fault = fault
    with pytest.raises(OutlastError, match=said):
        eks.create()
    eks.proxy.fault = base
    assert eks.create()[0][0].startswith("unchanged  security group")


def test_a_security_group_waits_for_the_interfaces_that_have_it(eks: Eks) -> None:
    eks.create()
    base, left = eks.proxy.fault, [2]

    def fault(request: Request) -> Fault | None:
        if b"Action=DeleteSecurityGroup" in request.body and left[0]:
            left[0] -= 1
            body = (
                "<Response><Errors><Error><Code>DependencyViolation</Code><Message>in use</Message></Error></Errors></Response>"
            )
            return lambda exchange: exchange.reply(400, [("Content-Type", "text/xml")], body.encode())
        return base(request)

    eks.proxy.fault = fault
    eks.delete()
    assert (left, eks.left()) == ([0], [])


# The command


class Cluster(FakeCluster):
    """Binds claims to the volumes that they name."""

    def put(self, document: Document) -> Document:
        made = super().put(document)
        if document["kind"] == "PersistentVolumeClaim" and (named := document["spec"].get("volumeName")):
            self.documents["persistentvolumes", "", named]["status"] = {"phase": "Bound"}
        return made

    def patch(self, kind: kinds.Kind, name: str, change: Any, **_: Any) -> None:
        claim = self.documents[kind.resource, "", name]["spec"]["claimRef"]
        for key in change["spec"]["claimRef"]:
            claim.pop(key, None)
        self.documents[kind.resource, "", name]["status"] = {"phase": "Available"}


Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cluster(eks: Eks, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    there = Cluster(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}},
        {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "efs.csi.aws.com"}},
    )
    there.server = network.endpoint(REGION, eks.name)
    monkeypatch.setattr(kube, "connect", lambda *_: there)
    return there


COMMAND = get_command(volume.app)
"""Made once: `cli.main` makes all commands of Outlast, each time."""


@pytest.fixture
def outlast(capsys: pytest.CaptureFixture[str]) -> Outlast:
    def call(*words: str) -> tuple[int, str, str]:
        code, said = 0, ""
        try:
            COMMAND(list(words), standalone_mode=False)
        except OutlastError as error:
            code, said = error.exit_code, f"Error: {error}\n"
        out, err = capsys.readouterr()
        return code, out, err + said

    return call


def test_the_workshops_volume_is_created_seen_and_deleted(outlast: Outlast, eks: Eks, cluster: Cluster) -> None:
    code, out, err = outlast("create", eks.name, "--dry-run")
    assert (code, eks.left(), len(cluster.documents)) == (0, [], 2)
    assert "created    PersistentVolumeClaim efs-pvc in default" in out
    assert "nothing was changed" in err
    code, out, err = outlast("create", eks.name)
    assert (code, eks.left()) == (0, EFS)
    volume = cluster.get(kinds.VOLUME, "efs-pv")
    ((found,),) = [volumes.listed(REGION, eks.name)]
    assert volume["spec"]["csi"]["volumeHandle"] == found.handle
    again = outlast("create", eks.name)[1].splitlines()
    assert {line.split()[0] for line in again} == {"unchanged"}
    pod = {"metadata": {"name": "train-0"}, "spec": {"volumes": [{"persistentVolumeClaim": {"claimName": "efs-pvc"}}]}}
    cluster.put({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "train-0", "namespace": "default"}})
    ((shown,),) = [json.loads(outlast("status", eks.name, "-o", "json")[1])]
    assert (shown["state"], len(shown["parts"])) == ("available", 3)
    assert shown["claims"] == [
        {"volume": "efs-pv", "namespace": "default", "name": "efs-pvc", "phase": "Bound", "pods": ["train-0"]}
    ]
    assert "default/efs-pvc Bound (1 pod)" in outlast("status", eks.name)[1]
    code, _, err = outlast("delete", eks.name, "--yes")
    assert (code, err) == (
        2,
        f"Error: file system {found.id} is in use by train-0 (claim efs-pvc in default); end them, and delete it then\n",
    )
    cluster.delete(kinds.POD, "train-0", namespace="default")
    assert "add --yes to confirm" in outlast("delete", eks.name)[2]
    assert outlast("delete", eks.name, "--dry-run")[0] == 0
    assert eks.left() == EFS
    code, out, _ = outlast("delete", eks.name, "--yes")
    assert (code, eks.left(), len(cluster.documents)) == (0, [], 2)
    assert [line.split()[1] for line in out.splitlines()] == [
        "PersistentVolumeClaim", "PersistentVolume", "StorageClass", "mount", "mount", "access", "file", "security",
    ]  # fmt: skip
    assert outlast("delete", eks.name)[2] == f"Error: {eks.name} has no volume in {REGION}\n"
    assert "has no volume" in outlast("status", eks.name)[1]


def test_objects_that_lead_elsewhere_stop_it_before_anything_is_made(outlast: Outlast, eks: Eks, cluster: Cluster) -> None:
    theirs = storage.volume(a_share(id="fs-theirs", name="theirs"))
    cluster.put(theirs)
    code, _, err = outlast("create", eks.name)
    assert (code, eks.left()) == (2, [])
    assert "PersistentVolume efs-pv exists: its file system is fs-theirs, not (the id of efs); choose another --pv, or" in err
    cluster.server = "https://other.example.com"
    eks.client("efs").create_file_system(CreationToken=f"{eks.name}-b", Tags=aws.listed(eks.wanted(name="b").tags))
    code, out, err = outlast("status", eks.name)
    assert (code, "claims are not shown: the kubeconfig leads to https://other" in err, "b     efs" in out) == (0, True, True)
    assert "the kubeconfig leads to https://other.example.com, and cluster" in outlast("create", eks.name)[2]
    code, _, err = outlast("create", "do-eks", "--region", REGION)
    assert (code, err.partition(": it does")[0]) == (2, f"Error: cluster do-eks in {REGION}")
    cluster.delete(kinds.VOLUME, "efs-pv")
    assert "there is no namespace team" in outlast("create", eks.name, "-n", "team", "--subnet", eks.subnets[0])[2]


def test_what_others_have_in_the_cluster_stays(outlast: Outlast, eks: Eks, cluster: Cluster) -> None:
    cluster.put(storage.storage_class(a_share(name="theirs")))
    del cluster.documents["storageclasses.storage.k8s.io", "", "efs-sc"]["metadata"]["labels"]
    assert "unchanged  StorageClass efs-sc" in outlast("create", eks.name)[1]
    (found,) = volumes.listed(REGION, eks.name)
    cluster.put(storage.volume(a_share(id=f"{found.id}::fsap-1", name="theirs", volume="their-pv")))
    assert "PersistentVolume their-pv leads to file system" in outlast("delete", eks.name, "--yes")[2]
    cluster.delete(kinds.VOLUME, "their-pv")
    assert outlast("delete", eks.name, "--yes")[0] == 0
    assert cluster.find(kinds.STORAGE_CLASS, "efs-sc")


def test_a_volume_whose_claim_was_deleted_can_be_claimed_again(outlast: Outlast, eks: Eks, cluster: Cluster) -> None:
    outlast("create", eks.name)
    cluster.delete(kinds.CLAIM, "efs-pvc", namespace="default")
    volume = cluster.documents["persistentvolumes", "", "efs-pv"]
    volume["status"], volume["spec"]["claimRef"]["uid"] = {"phase": "Released"}, "gone"
    out = outlast("create", eks.name)[1]
    assert "changed    PersistentVolume efs-pv: its claim was deleted; it can be claimed again" in out
    assert "created    PersistentVolumeClaim efs-pvc in default" in out
    assert "uid" not in cluster.get(kinds.VOLUME, "efs-pv")["spec"]["claimRef"]


def test_objects_can_be_printed_for_others_to_apply_and_a_cluster_may_be_gone(
    outlast: Outlast, eks: Eks, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "connect", None)
    code, out, err = outlast("create", eks.name, "-o", "yaml", "--class", "slow", "--size", "20Gi")
    (found,) = volumes.listed(REGION, eks.name)
    kind, volume, claim = yaml.safe_load_all(out)
    assert (code, volume["spec"]["csi"]["volumeHandle"]) == (0, found.handle)
    assert (kind["metadata"]["name"], claim["spec"]["resources"]["requests"]["storage"]) == ("slow", "20Gi")
    assert "outlast | created    file system" in err
    eks.client("eks").delete_cluster(name=eks.name)
    code, _, err = outlast("delete", eks.name, "--yes")
    assert (code, eks.left()) == (0, [])
    assert f"EKS in {REGION} knows no cluster {eks.name}: only AWS is asked" in err
