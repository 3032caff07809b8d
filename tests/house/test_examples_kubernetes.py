"""Every example for Kubernetes is right, and every command beside it renders what Kubernetes takes."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import pytest
import yaml
from kubernetes_validate import utils as schemas

from minors import NEWEST
from outlast import cli
from outlast.job import spec

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in (ROOT / "examples" / "kubernetes").glob("*.yaml") if file.stem != "etcd-server")
COMMANDS = [
    (file.stem, line.partition("|")[0])
    for file in FILES
    for line in re.findall(r"^#   outlast (render \S+.*)$", file.read_text(), flags=re.M)
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_is_right_and_named_like_its_file(file: Path) -> None:
    job = spec.load(file, code=True)
    assert job.metadata.name == file.stem
    assert job.spec.image
    assert spec.parse(spec.dump(job)) == job
    assert next(line.split()[1] for name, line in COMMANDS if name == file.stem) == f"examples/kubernetes/{file.name}"


MACHINES = {"g5.2xlarge": (8, 32, 1), "g6.2xlarge": (8, 32, 1), "p4d.24xlarge": (96, 1152, 8), "p5.48xlarge": (192, 2048, 8)}
"""Type of machine -> vCPUs, GiB, devices: https://aws.amazon.com/ec2/instance-types/"""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_that_names_a_machine_fits_on_it(file: Path) -> None:
    wanted = spec.load(file, code=True).spec
    named = wanted.node_selector.get("node.kubernetes.io/instance-type", "")
    for machine in filter(None, named.split(",")):
        cpus, gib, devices = MACHINES[machine]
        # what is left to pods: kubelets reserve some 80m cores and 6 % of the memory, DaemonSets take their part
        assert (wanted.resources.cpu or 0) <= cpus - 0.5, machine
        assert (wanted.resources.memory or 0) <= gib * 0.9 * 2**30, machine
        assert (wanted.resources.gpu or 0) <= devices, machine


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[command.removeprefix("render ") for _, command in COMMANDS])
def test_a_command_of_an_example_renders(name: str, command: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(command))
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    documents = list(yaml.safe_load_all(printed.out))
    assert {each["metadata"]["labels"]["outlast.dev/job"] for each in documents} == {name}
    for document in documents:
        if "." not in document["apiVersion"] or "k8s.io" in document["apiVersion"]:
            schemas.validate(document, NEWEST, strict=True)


@pytest.mark.parametrize(("name", "pods"), [("two-numbers", "completions"), ("statefulset", "replicas")])
def test_two_numbers_make_512_ranks_of_4(name: str, pods: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    found = []
    for _, command in [each for each in COMMANDS if each[0] == name]:
        with pytest.raises(SystemExit):
            cli.main(shlex.split(command))
        made = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
        (container,) = made["spec"]["template"]["spec"]["containers"]
        found.append(made["spec"][pods] * container["resources"]["limits"]["nvidia.com/gpu"])
    assert found == [4, 512]


HAND_MADE = [
    document
    for file in ("two", "third")
    for document in yaml.safe_load_all((ROOT / "examples" / "pods" / f"{file}.yaml").read_text())
]


def test_pods_made_by_hand_differ_in_their_names_alone() -> None:
    names = [each["metadata"].pop("name") for each in copy.deepcopy(HAND_MADE)]
    assert names == ["hand-made-1", "hand-made-2", "hand-made-3"]
    first, *others = [{**each, "metadata": {**each["metadata"], "name": ""}} for each in HAND_MADE]
    assert others == [first, first]
    schemas.validate(HAND_MADE[0], NEWEST, strict=True)
