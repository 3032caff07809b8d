"""`examples/aws`: files that eksctl, CloudFormation, kubectl and Helm apply, each checked by what its maker has published."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from published_schemas import ROOT, validate

AWS = ROOT / "examples" / "aws"
REGION = "us-west-2"
Document = dict[str, Any]

CLUSTERS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(AWS.glob("*.yaml"))}
STACKS = sorted(file.stem for file in (AWS / "stacks").glob("*.yaml"))
MANIFESTS = sorted(file.stem for file in (AWS / "kubernetes").glob("*.yaml"))
every_cluster = pytest.mark.parametrize("config", CLUSTERS.values(), ids=CLUSTERS)


def groups(config: Document) -> list[Document]:
    return [*config.get("managedNodeGroups", ()), *config.get("nodeGroups", ())]


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((AWS / "kubernetes" / f"{name}.yaml").read_text()))


# --------------------------------------------------------------------------------------------------------------------- eksctl


@every_cluster
def test_eksctl_takes_the_cluster(config: Document) -> None:
    schema = jsonschema.Draft7Validator(json.loads((ROOT / "tests/shared/published/eksctl.json").read_text()))
    assert [f"{error.json_path}: {error.message}" for error in schema.iter_errors(config)] == []
    assert len(config["availabilityZones"]) == 2, "stacks/efs.yaml has a mount target in each of two zones"
    addons = {each["name"]: each for each in config["addons"]}
    assert {"eks-pod-identity-agent", "aws-efs-csi-driver"} <= addons.keys()
    disks = json.loads(addons["aws-ebs-csi-driver"]["configurationValues"])
    assert disks == {"defaultStorageClass": {"enabled": True}}, "else claims that name no class stay Pending"
    for group in groups(config):
        assert not group.get("efaEnabled") or len(group["availabilityZones"]) == 1, "EFA does not cross zones"
        assert "ssh" in group or group["privateNetworking"]


# ------------------------------------------------------------------------------------------------------ Kubernetes, Karpenter


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_and_karpenter_take_the_manifests(name: str) -> None:
    for document in documents(name):
        if "volcano" not in document["apiVersion"]:
            validate(document)


def test_karpenter_never_moves_a_training_pod() -> None:
    for pool in [each for each in documents("node-pools") if each["kind"] == "NodePool"]:
        disruption = pool["spec"]["disruption"]
        assert (pool["spec"]["template"]["spec"]["expireAfter"], disruption["consolidationPolicy"]) == ("Never", "WhenEmpty")
        assert disruption["budgets"] == [{"nodes": "0", "reasons": ["Drifted"]}]


# ------------------------------------------------------------------------------------------------------------- CloudFormation


@pytest.mark.slow  # as importing it is
def test_cfn_lint_has_nothing_to_say_of_the_stacks() -> None:
    from cfnlint.api import ManualArgs, lint

    config = ManualArgs(regions=[REGION])
    found = {name: [str(each) for each in lint((AWS / "stacks" / f"{name}.yaml").read_text(), config=config)] for name in STACKS}
    assert found == {name: [] for name in STACKS}
    wrong = (AWS / "stacks" / "efs.yaml").read_text().replace("Encrypted: true", "Encrypt: true")
    assert [each.rule.id for each in lint(wrong, config=config)] == ["E3002"]


# ----------------------------------------------------------------------------------------------------------------- the pages


def test_what_pages_and_examples_name_exists_and_claims_and_accounts_have_the_names_that_jobs_use() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += [file for file in (ROOT / "examples").rglob("*.*") if file.suffix != ".pyc"]
    named = {word for page in pages for word in re.findall(r"examples/aws/[\w/.-]+\.yaml", page.read_text())}
    assert {each for each in named if not (ROOT / each).exists()} == set()
    assert {f"examples/aws/{file.relative_to(AWS)}" for file in AWS.rglob("*.yaml")} <= named
    claims = [each for name in ("efs", "fsx") for each in documents(name) if each["kind"] == "PersistentVolumeClaim"]
    assert {each["metadata"]["name"] for each in claims} == {"efs-pvc", "fsx-pvc"}
    (storage_class,) = [each for each in documents("efs") if each["kind"] == "StorageClass"]
    assert storage_class["parameters"]["provisioningMode"] == "efs-ap", "else claims with a size stay Pending"
    associations = [each for config in CLUSTERS.values() for each in config["iam"].get("podIdentityAssociations", ())]
    accounts = {each["serviceAccountName"] for each in associations if each.get("createServiceAccount")}
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "imagenet.yaml").read_text())["spec"]
    assert {job["template"]["spec"]["serviceAccountName"]} == accounts == {"trainer"}
