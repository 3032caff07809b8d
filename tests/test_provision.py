"""Clusters are made and removed step by step: cut off anywhere, the same command goes on; what is not ours is never touched."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast import fleet
from outlast.cli import cluster as planned
from outlast.cli import provision
from outlast.cloud import aws, clusters
from outlast.cloud.clusters import Found
from outlast.errors import OutlastError
from outlast.fleet.steps import Check
from outlast.provision import create, delete, nodes, tools
from outlast.provision.create import World
from outlast.provision.tools import Ran

NAME, REGION = "do-eks", "eu-north-1"
"""A region of its own: other tests leave things in theirs."""


class Cut(Exception):
    """The machine of the user goes off."""


class Fake:
    """The programs, and what they have made."""

    def __init__(self, plan: fleet.Plan) -> None:
        self.steps = {step.command: step for step in plan.steps}
        self.made: list[str] = []
        self.cut: tuple[int, bool] | None = None
        """At which command the machine goes off, and whether that had its effect."""
        self.answers: dict[tuple[str, ...], Ran] = {}

    def ask(self, command: tuple[str, ...]) -> Ran:
        if command[0] == "done?":
            return Ran(0, "yes" if command[1] in self.made else "no")
        return self.answers.get(command, Ran(1, "error: the server doesn't have this resource type"))

    def run(self, command: tuple[str, ...]) -> Ran:
        step = self.steps[command]
        cut, self.cut = (self.cut, None) if self.cut and self.cut[0] == len(self.made) else (None, self.cut)
        if not cut or cut[1]:
            assert step.repeatable or step.key not in self.made, f"{step.key} must not be run twice"
            self.made.append(step.key)
        if cut:
            raise Cut
        return Ran(0, "")

    def find(self) -> Found:
        return Found("ACTIVE", "1.34", True, "CREATE_COMPLETE", "") if "cluster" in self.made else Found("", "", False, "", "")


def a_plan() -> fleet.Plan:
    plan = fleet.plan(fleet.preset("workshop"))
    steps = [dataclasses.replace(each, check=each.check and Check(("done?", each.key), ("yes",))) for each in plan.steps]
    return dataclasses.replace(plan, steps=tuple(steps))


def test_a_creation_that_is_cut_off_anywhere_goes_on_and_a_second_one_changes_nothing() -> None:
    plan = a_plan()
    unasked = [step.key for step in plan.steps if step.check is None and step.key != "cluster"]
    for at in range(len(plan.steps)):
        for effect in (False, True):
            fake, said = Fake(plan), list[str]()
            fake.cut = at, effect
            world = World(fake, fake.find, said.append)
            with pytest.raises(Cut):
                create.create(plan, world)
            create.create(plan, world)
            assert list(dict.fromkeys(fake.made)) == [step.key for step in plan.steps], "all of it, in order"
            again = {key for key in fake.made if fake.made.count(key) > 1}
            assert again <= set(unasked), "only what cannot be asked is repeated"
            before = len(fake.made)
            assert create.create(plan, world) == len(unasked) == len(fake.made) - before


def test_a_step_that_fails_is_named_with_the_last_word_of_its_program() -> None:
    plan = a_plan()

    class Broken(Fake):
        def run(self, command: tuple[str, ...]) -> Ran:
            return Ran(3, "2026 waiting\nError: no capacity in us-west-2a") if self.made else super().run(command)

    fake = Broken(plan)
    with pytest.raises(OutlastError) as failed:
        create.create(plan, World(fake, fake.find, lambda _: None))
    assert str(failed.value) == (
        f"eksctl exited with 3 at step 2 of {len(plan.steps)}, kubeconfig: Error: no capacity in us-west-2a; "
        "mend it and run the same command again, which goes on from there"
    )


def test_a_chart_that_a_killed_helm_has_locked_is_told_from_others() -> None:
    plan = fleet.plan(fleet.load(Path(__file__).parents[1] / "examples/fleets/gpu-karpenter.yaml"))
    steps = [each for each in plan.steps if each.key == "chart/karpenter"]

    class Locked(Fake):
        def run(self, command: tuple[str, ...]) -> Ran:
            return Ran(1, "Error: UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress")

    with pytest.raises(OutlastError, match="`helm rollback karpenter --namespace kube-system`, or `helm uninstall karpenter --n"):
        create.create(dataclasses.replace(plan, steps=tuple(steps)), World(Locked(plan), Locked(plan).find, lambda _: None))


def test_the_files_of_another_cluster_are_not_replaced(file: Path) -> None:
    plan, text = fleet.plan(fleet.load(file)), file.read_text()
    planned.write(plan, file.parent, text)
    twin = dataclasses.replace(plan, region="us-west-2")
    with pytest.raises(
        OutlastError, match=f"has the files of cluster do-eks in {REGION}, and not of do-eks in us-west-2; give an"
    ):
        planned.write(twin, file.parent, text)


@pytest.mark.parametrize(
    ("status", "stack", "ours", "expected"),
    [
        ("", "", False, "absent"),
        ("CREATING", "CREATE_IN_PROGRESS", True, "making"),
        ("", "CREATE_IN_PROGRESS", True, "making"),
        ("ACTIVE", "CREATE_IN_PROGRESS", True, "making"),
        ("ACTIVE", "CREATE_COMPLETE", True, "made"),
        ("UPDATING", "UPDATE_COMPLETE", True, "made"),
        ("ACTIVE", "", False, "there is a cluster do-eks already, and Outlast has not made it; give yours another name"),
        ("DELETING", "DELETE_IN_PROGRESS", True, "cluster do-eks is being deleted (DELETE_IN_PROGRESS); wait until that is over"),
        ("", "ROLLBACK_COMPLETE", True, "the creation of cluster do-eks has failed: ROLLBACK_COMPLETE (no VPC left); run"),
    ],
)
def test_how_far_a_cluster_is(status: str, stack: str, ours: bool, expected: str) -> None:
    found = Found(status, "1.34", ours, stack, "no VPC left.")
    if expected in ("absent", "making", "made"):
        assert create.stage(found, NAME) == expected
    else:
        with pytest.raises(OutlastError) as refused:
            create.stage(found, NAME)
        assert str(refused.value).startswith(expected)


def test_a_cluster_that_an_earlier_call_began_is_waited_for() -> None:
    plan, said, slept = a_plan(), list[str](), list[float]()
    looks = iter([Found("CREATING", "", True, "CREATE_IN_PROGRESS", "")] * 3)
    fake = Fake(plan)

    def find() -> Found:
        found = next(looks, None)
        if found is None and "cluster" not in fake.made:
            fake.made.append("cluster")
        return found or fake.find()

    create.create(plan, World(fake, find, said.append, slept.append))
    assert slept == [create.WAIT_S] * 3
    assert fake.made.count("cluster") == 1
    assert said[0] == "cluster do-eks is being made by an earlier call: waiting for it"


@pytest.fixture
def account(moto: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Clients of an account of its own."""
    return functools.partial(aws.client, region=REGION)


def a_cluster(account: Callable[[str], Any], tags: dict[str, str]) -> None:
    vpc = {"subnetIds": ["subnet-1", "subnet-2"]}
    account("eks").create_cluster(name=NAME, roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig=vpc, tags=tags)


def test_a_cluster_of_ours_is_removed_and_what_it_leaves_is_named(account: Callable[[str], Any]) -> None:
    efs, ec2 = account("efs"), account("ec2")
    disk: Any = functools.partial(ec2.create_volume, AvailabilityZone=f"{REGION}a", Size=1)
    owned = [{"ResourceType": "volume", "Tags": [{"Key": f"kubernetes.io/cluster/{NAME}", "Value": "owned"}]}]
    theirs, left = disk()["VolumeId"], disk(TagSpecifications=owned)["VolumeId"]
    ours = efs.create_file_system(CreationToken="ours", Tags=aws.listed(aws.tags(NAME)))["FileSystemId"]
    another = efs.create_file_system(CreationToken="theirs", Tags=aws.listed(aws.tags("another")))["FileSystemId"]
    a_cluster(account, aws.tags(NAME))
    try:
        found = clusters.find(NAME, REGION)
        assert (found.status, found.ours) == ("ACTIVE", True)
        assert delete.judged(found, NAME, REGION)
        fake = Fake(a_plan())
        pools = [
            {"metadata": {"name": "gpu", "labels": {"app.kubernetes.io/managed-by": "outlast"}}},
            {"metadata": {"name": "x"}},
        ]
        jobs = [{"metadata": {"namespace": "a", "name": "j"}, "status": {"state": "Running"}}]
        fake.answers = {
            ("kubectl", "get", "nodepools.karpenter.sh", "-o", "json"): Ran(0, json.dumps({"items": pools})),
            ("kubectl", "get", "elasticjobs.outlast.dev", "--all-namespaces", "-o", "json"): Ran(0, json.dumps({"items": jobs})),
            ("kubectl", "get", "--raw", "/readyz"): Ran(0, "ok"),
        }
        asked = delete.look(fake, True)
        assert asked == delete.Asked(True, ("a/j",), ("gpu",), ("x",))
        said = delete.listed(asked, NAME, REGION, [f"arn:aws:elasticfilesystem:{REGION}:1:file-system/{ours}"])
        assert said[1:] == [
            "NodePool gpu and its machines",
            "job a/j has not ended, and is deleted",
            "NodePool x is not ours: delete it first, or its machines go on and cost money",
            f"kept: arn:aws:elasticfilesystem:{REGION}:1:file-system/{ours} (outlast volume delete {NAME} --region {REGION})",
        ]
        ran: list[tuple[str, ...]] = []
        fake.run = lambda command: ran.append(command) or Ran(0, "")  # type: ignore[method-assign,func-returns-value]
        delete.delete(asked, NAME, REGION, fake, lambda _: None)
        assert [command[:3] for command in ran] == [
            ("kubectl", "delete", "elasticjobs.outlast.dev"),
            ("kubectl", "delete", "nodepools.karpenter.sh"),
            ("eksctl", "delete", "cluster"),
        ]
        assert ran[0][3:6] == ("j", "--namespace", "a"), "Karpenter drains no node that has a pod of a running job"
        assert ran[1][3:5] == ("gpu", "--cascade=foreground"), "Karpenter must live until its last machine is gone"
        assert clusters.disks(NAME, REGION) == [left]
        assert clusters.machines(NAME, REGION) == []
        remains = delete.left(NAME, REGION, clusters.tagged(NAME, REGION), clusters.disks(NAME, REGION), ["i-1"])
        assert remains[0] == f"machine i-1 costs money: aws ec2 terminate-instances --region {REGION} --instance-ids i-1"
        assert remains[-1] == f"disk {left} of a claim: aws ec2 delete-volume --region {REGION} --volume-id {left}"
        assert theirs not in " ".join(remains)
        assert all(arn.split(":")[2] in ("elasticfilesystem", "eks") for arn in clusters.tagged(NAME, REGION))
    finally:
        account("eks").delete_cluster(name=NAME)
        for each in (theirs, left):
            ec2.delete_volume(VolumeId=each)
        for each in (ours, another):
            efs.delete_file_system(FileSystemId=each)


def test_nothing_is_asked_of_a_cluster_that_cannot_be_found_out_about() -> None:
    fake = Fake(a_plan())
    fake.answers = {("kubectl", "get", "--raw", "/readyz"): Ran(0, "ok")}
    assert delete.look(fake, True, reached=False) == delete.Asked(True, reached=False), "kubectl might ask another cluster"
    denied = {("kubectl", "get", "nodepools.karpenter.sh", "-o", "json"): Ran(1, "Error from server (Forbidden)")}
    fake.answers |= denied
    assert not delete.look(fake, True).reached, "nobody knows of its machines"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (made := tmp_path / "cluster.yaml").write_text(fleet.preset_text("workshop").replace("us-west-2", REGION))
    return made


def test_of_a_cluster_without_control_plane_the_stacks_of_ours_are_deleted(
    account: Callable[[str], Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """eksctl does not, whatever it is told: such a creation could neither go on nor be taken back."""
    client = account("cloudformation")
    template = json.dumps({"Resources": {"topic": {"Type": "AWS::SNS::Topic"}}})
    mine, theirs = aws.listed(aws.tags(NAME)), aws.listed(aws.tags(f"{NAME}-2"))
    for name, tags in (("cluster", mine), ("nodegroup-wks", mine), ("2-cluster", theirs), ("addon-x", [])):
        client.create_stack(StackName=f"eksctl-{NAME}-{name}", TemplateBody=template, Tags=tags)
    provision.delete(file, None, dry_run=True)
    assert clusters.stacks(NAME, REGION) == [f"eksctl-{NAME}-nodegroup-wks", f"eksctl-{NAME}-cluster"], (
        "the last is needed longest"
    )
    a_cluster(account, {"team": "them"})
    with pytest.raises(OutlastError, match="Outlast has not made it, and does not delete it"):
        provision.delete(file, None, yes=True)  # made by others, after ours was gone
    account("eks").delete_cluster(name=NAME)
    capsys.readouterr()
    provision.delete(file, None, yes=True)
    assert f"outlast | cluster {NAME} is gone\noutlast | nothing is left" in capsys.readouterr().err
    there = {each["StackName"] for each in client.describe_stacks()["Stacks"]}
    assert there == {f"eksctl-{NAME}-2-cluster", f"eksctl-{NAME}-addon-x"}
    for each in there:
        client.delete_stack(StackName=each)


def test_a_cluster_of_others_is_neither_made_nor_removed(
    account: Callable[[str], Any], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_cluster(account, {"team": "them"})
    try:
        with pytest.raises(OutlastError, match="Outlast has not made it, and does not delete it"):
            provision.delete(file, None, yes=True)
        with pytest.raises(OutlastError, match="give yours another name"):
            create.stage(clusters.find(NAME, REGION), NAME)
    finally:
        account("eks").delete_cluster(name=NAME)
    provision.delete(file, None, yes=True)
    assert capsys.readouterr().err.splitlines()[-1] == "outlast | nothing is left"


def script(path: Path, name: str, text: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{text}\n")
    (path / name).chmod(0o755)


def test_programs_that_are_missing_or_old_are_named_all_at_once(tmp_path: Path) -> None:
    script(tmp_path, "eksctl", "echo 0.150.0")
    script(tmp_path, "kubectl", "echo 'Client Version: v1.36.2'; echo 'Kustomize Version: v5.7.1'")
    with pytest.raises(OutlastError) as refused:
        tools.check(("eksctl", "kubectl", "helm", "outlast"), str(tmp_path))
    assert str(refused.value) == (
        f"{tmp_path}/eksctl is 0.150, 0.200 is needed (https://eksctl.io/installation); "
        "helm is not installed (get 3.14 or newer: https://helm.sh/docs/intro/install)"
    )
    script(tmp_path, "eksctl", "echo 0.215.0-dev+xyz")
    script(tmp_path, "helm", "echo v3.18.4+gd80839c")
    tools.check(("eksctl", "kubectl", "helm"), str(tmp_path))


def test_a_program_runs_in_the_directory_of_the_plan_with_its_kubeconfig(tmp_path: Path) -> None:
    said: list[str] = []
    runs = tools.Tools(tmp_path, {"PATH": "/usr/bin:/bin", "KUBECONFIG": "/k"}, said.append)
    ended = runs.run(("sh", "-c", "echo $KUBECONFIG; pwd; echo oops >&2; exit 3"))
    assert (ended.code, said) == (3, ["/k", str(tmp_path), "oops"])
    assert ended.output.splitlines()[-1] == "oops"
    assert runs.ask(("sh", "-c", "echo '{}'")) == Ran(0, "{}\n")
    assert runs.run(("outlast", "version")).code == 0, "this installation's"


def test_programs_do_not_take_the_cluster_that_they_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    environ = tools.environment(tmp_path / "kubeconfig")
    assert environ["KUBECONFIG"] == str(tmp_path / "kubeconfig")
    assert not [name for name in environ if name.startswith("KUBERNETES_SERVICE_")]


def test_nodes_are_counted_by_their_group() -> None:
    def node(label: str, value: str, ready: str = "True") -> dict[str, Any]:
        return {"metadata": {"labels": {label: value}}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}

    items = [
        node("alpha.eksctl.io/nodegroup-name", "cpu"),
        node("eks.amazonaws.com/nodegroup", "cpu"),
        node("karpenter.sh/nodepool", "gpu"),
        node("karpenter.sh/nodepool", "gpu", "Unknown"),
    ]
    assert nodes.counted(json.dumps({"items": items})) == {"cpu": 2, "gpu": 1}
    assert nodes.counted("error: connection refused") == {}
