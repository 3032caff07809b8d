"""The workshop on one page: what `validate` prints is what the page shows, and its job is what the page says.

`test_readme` checks that all its verbs, options and links exist, `test_aws_files` the files that AWS's tools apply."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "eks-workshop.md").read_text()
JOB = "examples/workshop/cifar10.yaml"
IMAGENET = "examples/kubernetes/imagenet.yaml"

Outlast = Callable[..., tuple[int, str, str]]


def test_the_job_fits_its_machines(outlast: Outlast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    code, out, _ = outlast("validate", JOB)
    assert code == 0
    assert re.search(rf"^outlast validate {JOB} +# {re.escape(out.splitlines()[0])}$", PAGE, flags=re.M)
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


@pytest.mark.parametrize(
    ("dataset", "shown_in", "job", "below"),
    [
        ("cifar10", "docs/guide/eks-workshop.md", JOB, "cifar-10-batches-py"),
        ("tiny-imagenet-200", IMAGENET, IMAGENET, "tiny-imagenet-200"),
    ],
)
def test_data_land_where_the_job_and_the_manifests_of_others_read_them(dataset: str, shown_in: str, job: str, below: str) -> None:
    """`below` is the directory that the archive unpacks to."""
    (command,) = re.findall(rf"outlast data get {dataset} --on kubernetes .*", (ROOT / shown_in).read_text())
    claim, mounted, to = re.findall(r"--claim (\S+):(\S+) --to (\S+)", command)[0]
    spec = yaml.safe_load((ROOT / job).read_text())["spec"]
    assert f"{to}/{below}" in spec["args"]
    (volume,) = [each for each in spec["volumes"] if each["to"] == mounted]
    assert (volume["claim"], volume.get("subPath")) == (claim, None)
