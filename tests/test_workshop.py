"""The workshop on one page: what its commands print is what the page shows, and its job is what the page says.

AWS is moto; the cluster has no server. `test_readme` checks that all its verbs, options and links exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

from fake_cluster import FakeCluster
from outlast import kube
from outlast.cloud import aws, network
from servers import Place

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "guide" / "eks-workshop.md").read_text(), flags=re.M | re.S)
"""(language, text)"""
JOB = "examples/workshop/cifar10.yaml"
NAME, REGION = "do-eks", "us-west-2"

Outlast = Callable[..., tuple[int, str, str]]


def shown(beginning: str, language: str = "") -> str:
    """The block of output that begins so."""
    (found,) = [text for each, text in BLOCKS if each == language and text.startswith(beginning)]
    return str(found)


@pytest.fixture
def there(moto: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The workshop's cluster, with its network, in two zones."""
    monkeypatch.chdir(ROOT)
    ec2, eks = aws.client("ec2", REGION), aws.client("eks", REGION)
    vpc = ec2.create_vpc(CidrBlock="192.168.0.0/16")["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"192.168.{n}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"]["SubnetId"]
        for n, zone in enumerate("ab")
    ]
    role = "arn:aws:iam::123456789012:role/eks"
    eks.create_cluster(name=NAME, roleArn=role, resourcesVpcConfig={"subnetIds": subnets})
    cluster = FakeCluster(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}},
        {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "efs.csi.aws.com"}},
    )
    cluster.server = network.endpoint(REGION, NAME)
    monkeypatch.setattr(kube, "connect", lambda *_: cluster)
    yield
    eks.delete_cluster(name=NAME)


def test_the_plan_is_the_one_on_the_page(outlast: Outlast, tmp_path: Path) -> None:
    code, out, _ = outlast("cluster", "plan", "--preset", "workshop", "--to", tmp_path / NAME)
    assert (code, out) == (0, shown("do-eks in us-west-2"))
    again = outlast("cluster", "create", tmp_path / NAME / "cluster.yaml", "--to", tmp_path / NAME, "--dry-run")
    assert again[:2] == (0, out)
    cluster = yaml.safe_load((tmp_path / NAME / "cluster.yaml").read_text())
    cluster["addons"]["outlast"]["image"] = "123456789012.dkr.ecr.us-west-2.amazonaws.com/operator:1"
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(cluster))
    image = "outlast install --wait --image 123456789012.dkr.ecr.us-west-2.amazonaws.com/operator:1 --etcd"
    assert image in outlast("cluster", "plan", tmp_path / "ours.yaml")[1]
    cluster["addons"]["outlast"]["version"] = "0.2"
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(cluster))
    code, _, err = outlast("cluster", "plan", tmp_path / "ours.yaml")
    assert (code, "outlast.image names its version; remove version: 0.2" in err) == (2, True)


def test_the_volume_is_the_one_on_the_page(outlast: Outlast, there: None) -> None:
    code, out, err = outlast("volume", "create", NAME, "--region", REGION, "--dry-run")
    assert (code, out) == (0, shown("created    security group"))
    assert err == "outlast | this was a dry run: nothing was changed\n"


def test_when_all_is_gone_a_deletion_says_so(outlast: Outlast, moto: Place) -> None:
    assert outlast("cluster", "delete", "--preset", "workshop") == (0, "", shown("outlast | there is no cluster"))


def test_the_job_is_the_example_and_fits_its_machines(outlast: Outlast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / JOB).read_text().endswith(shown("apiVersion", "yaml"))
    code, out, _ = outlast("validate", JOB)
    assert (code, out.splitlines()[0] + "\n") == (0, shown("cifar10: ok"))
    pods: dict[str, Any] = {}
    for topology in ("elasticjob", "indexed-job"):
        code, out, err = outlast("render", JOB, "--as", topology)
        assert code == 0, err
        for document in yaml.safe_load_all(out):
            if document["kind"] != "ElasticJob":
                schemas.validate(document, "1.34", strict=True)
            pods |= {"pod": document["spec"]["template"]["spec"]} if document["kind"] == "Job" else {}
    (worker,) = pods["pod"]["containers"]
    claimed = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pods["pod"]["volumes"]
        if "persistentVolumeClaim" in each
    }
    mounts = {each["mountPath"]: claimed[each["name"]] for each in worker["volumeMounts"] if each["name"] in claimed}
    assert mounts == {"/efs-shared": "efs-pvc", "/out": "efs-pvc"}
    assert (worker["image"], worker["resources"]["requests"]["cpu"]) == (
        "123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch-cpu:1",
        "14",
    )
    assert pods["pod"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "c5.4xlarge"}
    more = ["--set", "output=s3://my-bucket/runs", "--set", "workers.replicas=4"]
    assert outlast("render", JOB, *more)[0] == 0
