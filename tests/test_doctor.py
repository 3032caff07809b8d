"""`outlast doctor`: what it makes of answers, the pods that it makes, what runs in them; and, marked `cluster`, all of it."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

import fake
import ports
from fake_cluster import Document, FakeCluster
from outlast import __version__, accelerators, cli, doctor, kube, manifests, spec
from outlast.doctor import Check, inside, inspection, machine
from outlast.doctor import cluster as asked
from outlast.errors import Forbidden, Refused, Unanswered
from outlast.kube import kinds
from outlast.launch import bytecode

IMAGE = "docker.io/library/outlast:test"
MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]


# This machine


def test_this_machine_can_run_this_test() -> None:
    found = {check.name: check.outcome for check in machine.checks()}
    assert {name: found[name] for name in ("python", "outlast", "torch", "store", "kubernetes")} == dict.fromkeys(
        ("python", "outlast", "torch", "store", "kubernetes"), "pass"
    )


def test_a_python_that_is_too_old_is_told() -> None:
    assert machine.python((3, 9)) == doctor.failed("python", "3.9; 3.11 or newer is needed", "install Python 3.11")


def test_what_torch_answers_is_judged() -> None:
    assert machine.judged_torch("2.13.0|True|8|NVIDIA H100") == doctor.passed("torch", "2.13.0, 8 × NVIDIA H100")
    assert machine.judged_torch("2.13.0|True|None|None") == doctor.passed("torch", "2.13.0, no GPU")
    assert machine.judged_torch("2.13.0|False|None|None").outcome == "fail"


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    assert machine.torch(str(python)) == doctor.failed(
        "torch", "ModuleNotFoundError: No module named torch", "pip install 'outlast[train]'"
    )


def test_an_extra_that_is_not_there_says_what_needs_it() -> None:
    assert machine.installed("moon", ("lunar_lander",), "landing") == doctor.warned(
        "moon", "lunar_lander is not installed: needed for landing", "pip install 'outlast[moon]'"
    )


def test_a_disk_that_is_nearly_full_is_told(tmp_path: Path) -> None:
    (check,) = machine.free(tmp_path, "disk", 2**62, "free some")
    assert (check.outcome, check.remedy) == ("warn", "free some")


@pytest.mark.parametrize(("written", "together"), [("1\n", True), ("0\n", False), (None, False)])
def test_a_kernel_that_kills_a_container_as_a_whole_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, together: bool
) -> None:
    if written:
        (tmp_path / "memory.oom.group").write_text(written)
    found = inspection.killed_together(str(tmp_path / "memory.oom.group"))
    assert found == together
    monkeypatch.setattr(inspection, "killed_together", lambda: found)
    monkeypatch.setattr(machine, "torch", lambda _: doctor.passed("torch", ""))
    told = {check.name: (check.outcome, check.said.partition(",")[0]) for check in machine.checks()}
    said = "when this container's memory runs out"
    assert told.get("out of memory") == (("warn", said) if together else None)


# A cluster


@pytest.mark.parametrize(
    ("version", "outcome"),
    [("v1.36.2", "pass"), ("v1.34.0-eks-1", "pass"), ("v1.31.1", "warn"), ("v1.24.0", "fail")],
)
def test_the_servers_version_is_judged(version: str, outcome: str) -> None:
    assert asked.server(version).outcome == outcome


def test_a_kubectl_of_another_age_is_told() -> None:
    assert asked.skew("v1.36.0", "v1.35.1").outcome == "pass"
    assert asked.skew("v1.32.4-dispatcher", "v1.36.2").outcome == "warn"


def a_namespace(**labels: str) -> Document:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team", "labels": labels}}


def test_a_namespace_is_judged() -> None:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    assert asked.namespace(a_namespace(**level), "team").said.startswith("team, Pod Security level restricted")
    assert asked.namespace(a_namespace(), "team").outcome == "pass"
    assert asked.namespace("you may not", "team").outcome == "pass"
    assert asked.namespace(None, "team") == doctor.failed(
        "namespace", "team does not exist", "make it (kubectl create namespace team), or choose one with -n"
    )
    going = a_namespace()
    going["metadata"]["deletionTimestamp"] = "2026-11-21T16:00:00Z"
    assert asked.namespace(going, "team").outcome == "fail"


def test_rights_that_submit_needs_fail_and_others_warn() -> None:
    assert asked.rights([]).outcome == "pass"
    create, *_, last = asked.RIGHTS
    assert asked.rights([create, last]).said == "you may not create jobs.batch"
    assert asked.rights([create, last]).outcome == "fail"
    assert asked.rights([last]) == doctor.warned(
        "rights", "enough to submit; you may not list storageclasses.storage.k8s.io", asked.rights([last]).remedy
    )


def a_node(name: str = "node-a", *, ready: str = "True", labels: Document | None = None, **allocatable: str) -> Document:
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "8", "memory": "32Gi", **allocatable}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels or {}}, "spec": {}, "status": status}


def test_nodes_are_judged() -> None:
    cordoned = a_node("node-b")
    cordoned["spec"]["unschedulable"] = True
    assert asked.machines([a_node()]) == doctor.passed("nodes", "1, all take pods: 8 cores and 32 GiB")
    assert asked.machines([a_node(), cordoned]).said == "1 of 2 take pods; not node-b"
    assert asked.machines([cordoned, a_node("c", ready="Unknown")]).said == "none of 2 takes pods"
    assert asked.machines(None).outcome == "warn"


def tainted(key: str, effect: str = "NoSchedule") -> Document:
    node = a_node()
    node["spec"]["taints"] = [{"key": key, "value": "present", "effect": effect}]
    return node


def test_nodes_with_the_taints_that_workers_tolerate_take_pods() -> None:
    for taken in (
        tainted("nvidia.com/gpu"),
        tainted("aws.amazon.com/neuron"),
        tainted("cloud.google.com/gke-spot"),
        tainted("kubernetes.azure.com/scalesetpriority", "NoExecute"),
        tainted("theirs", "PreferNoSchedule"),
    ):
        assert asked.machines([taken]).outcome == "pass"
    for kept in (tainted("theirs"), tainted("nvidia.com/gpu", "NoExecute")):
        assert asked.machines([kept]).said == "none of 1 takes pods"
    rendered = manifests.render(spec.parse(json.dumps(A_JOB)), "job")[-1]
    assert all(each in asked.TOLERATED for each in rendered["spec"]["template"]["spec"]["tolerations"])
    assert inside.pod("outlast-doctor-a", 0, WANTED, rank=False)["spec"]["tolerations"] == asked.TOLERATED


A_JOB = {
    "apiVersion": "outlast.dev/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "a"},
    "spec": {"image": "a", "module": "train", "resources": {"gpu": 1}},
}


def test_accelerators_are_counted_and_hidden_ones_are_a_mistake() -> None:
    assert asked.devices([a_node(**{"nvidia.com/gpu": "8"}), a_node(**{"nvidia.com/gpu": "8"})]).said == "16 × nvidia.com/gpu"
    assert asked.devices([a_node()]).said == "none is offered by any node"
    assert asked.devices(None).said == "you may not list nodes"
    parts = a_node(**{"nvidia.com/mig-1g.10gb": "7", "nvidia.com/gpu": "0", "ephemeral-storage": "90Gi"})
    others = a_node(**{"amd.com/gpu": "4", "aws.amazon.com/neuroncore": "32", "aws.amazon.com/neurondevice": "16"})
    assert asked.devices([parts]).said == "7 × nvidia.com/mig-1g.10gb"
    said = "4 × amd.com/gpu, 32 × aws.amazon.com/neuroncore, 16 × aws.amazon.com/neurondevice and 7 × nvidia.com/mig-1g.10gb"
    assert asked.devices([parts, others]).said == said
    hidden = asked.devices([a_node(labels={"nvidia.com/gpu.present": "true"})])
    assert (hidden.outcome, hidden.said) == ("fail", "node-a have GPUs that no device plugin offers")


def a_class(name: str, *, default: bool = False) -> Document:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": annotations}}


def test_storage_classes_are_judged() -> None:
    assert asked.storage([a_class("ebs", default=True), a_class("efs")]).said == "ebs and efs; ebs is the default"
    assert asked.storage([a_class("ebs")]).outcome == asked.storage([]).outcome == asked.storage(None).outcome == "warn"


def a_deployment(available: int, namespace: str = "outlast-system") -> Document:
    containers = [{"image": "operator:1"}]
    spec = {"replicas": 2, "template": {"spec": {"containers": containers}}}
    meta = {"name": "outlast-operator", "namespace": namespace, "labels": {"app.kubernetes.io/name": "outlast"}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": spec,
        "status": {"availableReplicas": available},
    }


def test_an_operator_is_needed_as_soon_as_jobs_for_it_can_be_stored() -> None:
    assert asked.operator(a_deployment(2), served=True) == doctor.passed(
        "operator", "2 of 2 run in namespace outlast-system, operator:1"
    )
    assert asked.operator(a_deployment(0, "ml"), served=True).remedy == "outlast install --wait --namespace ml says why"
    assert asked.operator(a_deployment(0), served=True).outcome == "fail"
    assert asked.operator(None, served=True).outcome == "fail"
    assert asked.operator(None, served=False).outcome == "warn"
    assert asked.operator("forbidden", served=True).outcome == "warn"


def found(cluster: FakeCluster) -> dict[str, Check]:
    return {check.name: check for check in asked.checks(cluster)}  # type: ignore[arg-type]


def a_binding(namespace: str) -> Document:
    meta = {"name": "outlast-operator"}
    subjects = [{"kind": "ServiceAccount", "name": "outlast-operator", "namespace": namespace}]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": meta,
        "subjects": subjects,
    }


def test_the_operator_is_found_in_whichever_namespace_it_is() -> None:
    said = "2 of 2 run in namespace ml, operator:1"
    stale = a_deployment(0, "before")
    deployment = a_deployment(2, "ml")
    assert found(FakeCluster(stale, deployment, a_binding("ml")))["operator"].said == said
    assert found(FakeCluster(deployment))["operator"].said == said
    assert found(FakeCluster(deployment, forbidden=(kinds.CLUSTER_ROLE_BINDING,)))["operator"].said == said


@pytest.mark.parametrize("forbidden", [False, True])
def test_an_archived_controller_that_runs_is_a_failure(forbidden: bool) -> None:
    class Blind(FakeCluster):
        def list_(self, kind: kinds.Kind, *, everywhere: bool = False, **more: Any) -> list[Document]:
            if everywhere and forbidden:
                raise Forbidden("you may not list deployments.apps")
            return super().list_(kind, everywhere=everywhere, **more)

    controller = {**a_deployment(1, "elastic-job")}
    controller["metadata"] = {"name": "elastic-job-k8s-controller", "namespace": "elastic-job"}
    check = found(Blind(controller))["controller"]
    assert (check.outcome, check.remedy) == (
        "fail",
        "kubectl -n elastic-job scale deployment elastic-job-k8s-controller --replicas=0",
    )
    assert "controller" not in found(FakeCluster(a_deployment(2)))


class Defined(FakeCluster):
    """ElasticJobs are known here."""

    def serves(self, kind: kinds.Kind) -> bool:
        return kind == kinds.ELASTIC_JOB or super().serves(kind)


def test_who_may_not_make_elasticjobs_is_told_of_the_role_and_that_jobs_work_without() -> None:
    checks = found(Defined(a_deployment(2), forbidden=(kinds.ELASTIC_JOB,)))
    assert checks["rights"].outcome == "pass"
    assert checks["ElasticJob"] == doctor.warned(
        "ElasticJob",
        "is defined; you may not create, list, patch or delete elasticjobs",
        "the ClusterRole outlast-edit (of `outlast install`) adds that to `edit`; ask your administrator for both; "
        "`outlast submit --as indexed-job` works without",
    )
    assert found(Defined(a_deployment(2)))["ElasticJob"].outcome == "pass"


SMALL = "one with 100m cores and 256Mi"
NOT_IN = f"{SMALL} would not be let in: "


class Refusing(FakeCluster):
    """Lets no pods in."""

    error: Exception

    def apply(self, document: Document, *, dry_run: bool = False) -> Document:
        assert (document["kind"], dry_run) == ("Pod", True)
        raise self.error


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (
            Refused('it cannot be applied: pods "a" is forbidden: failed quota: team: must specify limits.cpu for: worker'),
            "fail",
            NOT_IN + "the quota team of the namespace lets in only pods that say what they need: limits.cpu is not set",
        ),
        (
            Refused('it cannot be applied: pods "a" is forbidden: minimum cpu usage per Container is 1, but request is 100m'),
            "warn",
            NOT_IN + "a LimitRange of the namespace refuses the pods: minimum cpu usage per Container is 1, but request is 100m",
        ),
        (
            Refused("admission webhook x does not support dry run"),
            "warn",
            "not tried: admission webhook x does not support dry run",
        ),
        (Forbidden("you may not patch pods"), "warn", "not tried: you may not patch pods"),
    ],
)
def test_what_lets_no_worker_in_is_told(error: Exception, outcome: str, said: str) -> None:
    cluster = Refusing(a_namespace(), a_node())
    cluster.error = error
    worker = found(cluster)["worker"]
    assert (worker.outcome, worker.said) == (outcome, said)
    assert worker.remedy


@pytest.mark.parametrize("version", MINORS)
def test_the_worker_that_is_tried_is_a_pod_and_restricted(version: str) -> None:
    tried: list[Document] = []
    cluster = FakeCluster(a_namespace())
    cluster.apply = lambda document, dry_run: tried.append(document) or document  # type: ignore[func-returns-value,method-assign,misc]
    assert found(cluster)["worker"] == doctor.passed("worker", f"{SMALL} would be let in")
    schemas.validate(tried[0], version, strict=True)
    assert tried[0]["spec"]["securityContext"]["runAsNonRoot"]
    assert tried[0]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "256Mi"}


def test_a_quota_that_is_used_up_is_told() -> None:
    quota = {"metadata": {"name": "team"}, "status": {"hard": {"pods": "4", "cpu": "8"}, "used": {"pods": "4", "cpu": "500m"}}}
    (check,) = asked.used_up([quota])
    assert check.said == "team: pods is used up (4 of 4)"


def test_a_whole_cluster_is_looked_at_and_nothing_changed() -> None:
    cluster = FakeCluster(a_namespace(), a_node(), served=(kinds.LOCAL_QUEUE,))
    found = {check.name: check for check in asked.checks(cluster)}  # type: ignore[arg-type]
    assert found["queues and gangs"].said == "Kueue"
    assert found["ElasticJob"].outcome == found["metrics"].outcome == "warn"
    assert [check for check in found.values() if check.outcome == "fail"] == []
    assert cluster.order == []


def test_someone_who_may_read_nothing_is_told_what_that_costs() -> None:
    blind = (kinds.NODE, kinds.STORAGE_CLASS, kinds.QUOTA, kinds.NAMESPACE, kinds.DEPLOYMENT)
    found = {check.name: check.outcome for check in asked.checks(FakeCluster(forbidden=blind))}  # type: ignore[arg-type]
    assert (found["rights"], found["nodes"], found["storage"], found["operator"]) == ("warn", "warn", "warn", "warn")
    assert found["namespace"] == "pass"


# Pods

WANTED = inside.Options(IMAGE, "s3://bucket/runs", ("s3-keys",), timeout_s=5)


@pytest.mark.parametrize("version", MINORS)
@pytest.mark.parametrize("index", [0, 1])
def test_kubernetes_takes_the_pods_and_they_are_restricted(index: int, version: str) -> None:
    pod = inside.pod("outlast-doctor-a", index, WANTED, rank=True, on=accelerators.TABLE[0])
    schemas.validate(pod, version, strict=True)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert (spec["activeDeadlineSeconds"], spec["restartPolicy"], spec["automountServiceAccountToken"]) == (10, "Never", False)
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert ("affinity" in spec) == (index == 1)


def test_what_runs_in_pods_fits_into_a_command_and_names_no_variable_of_kubernetes() -> None:
    assert len(inside.source()) < 100_000
    assert "$(" not in inside.source()
    compile(inside.source(), "inspection", "exec")


def line(name: str, outcome: str = "pass") -> str:
    return inside.MARK + json.dumps({"name": name, "outcome": outcome, "said": "so", "remedy": ""})


def ending(cluster: FakeCluster, phase: str = "Succeeded", lines: tuple[str, ...] = ()) -> FakeCluster:
    """Pods of this cluster have an address at once, and have ended as soon as the last one is there."""

    def end(document: Document) -> None:
        name = document["metadata"]["name"]
        document["status"] = {"phase": phase, "podIP": "10.0.0.1"}
        cluster.lines[name] = ["something else", line("dns"), *(lines if name.endswith("0") else (line("network"),))]

    cluster.then = end
    return cluster


def test_two_pods_look_and_are_deleted() -> None:
    cluster = ending(FakeCluster(a_node("a"), a_node("b")), lines=(line("all-reduce"), line("command", "fail")))
    found = list(inside.checks(cluster, WANTED))  # type: ignore[arg-type]
    assert [(check.name, check.outcome) for check in found] == [
        ("dns", "pass"),
        ("command", "fail"),
        ("network", "pass"),
        ("all-reduce", "pass"),
    ]
    assert [each.split()[0] for each in cluster.order] == ["create", "create", "delete", "delete"]
    assert cluster.list_(kinds.POD) == []


def test_with_one_node_or_without_network_there_is_one_pod() -> None:
    alone = ending(FakeCluster(a_node("a")))
    assert [check.name for check in inside.checks(alone, WANTED)] == ["network", "dns"]  # type: ignore[arg-type]
    quiet = ending(FakeCluster(a_node("a"), a_node("b")))
    wanted = inside.Options(IMAGE, network=False, timeout_s=5)
    assert [check.name for check in inside.checks(quiet, wanted)] == ["dns"]  # type: ignore[arg-type]
    assert [each.split()[0] for each in quiet.order] == ["create", "delete"]


def test_pods_whose_image_cannot_be_had_say_so_and_are_deleted() -> None:
    cluster = FakeCluster(a_node("a"), a_node("b"))
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "no such host"}}

    def hang(document: Document) -> None:
        document["status"] = {"phase": "Pending", "containerStatuses": [{"name": "worker", "image": IMAGE, "state": waits}]}

    cluster.then = hang
    (check,) = inside.checks(cluster, WANTED)  # type: ignore[arg-type]
    assert (check.outcome, check.name) == ("fail", "pods")
    assert check.said.endswith(f"for the image {IMAGE}, which cannot be pulled: the name of its registry is unknown (DNS)")
    assert cluster.list_(kinds.POD) == []


def test_pods_that_never_end_are_given_up_and_deleted() -> None:
    cluster = FakeCluster(a_node("a"))
    cluster.then = lambda document: document.update(status={"phase": "Running", "podIP": "10.0.0.1"})
    *_, check = inside.checks(cluster, inside.Options(IMAGE, network=False, timeout_s=0.1))  # type: ignore[arg-type]
    assert check == doctor.failed("pods", "they had not ended after 0 s", check.remedy)
    assert cluster.list_(kinds.POD) == []


def test_ctrl_c_deletes_the_pods() -> None:
    cluster = FakeCluster(a_node("a"), a_node("b"))

    def interrupt(_: Document) -> None:
        raise KeyboardInterrupt

    cluster.then = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(inside.checks(cluster, WANTED))  # type: ignore[arg-type]
    assert cluster.list_(kinds.POD) == []


# What runs in them


def run(*words: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", inside.source(), "--mark", inside.MARK, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


def told(process: subprocess.Popen[str]) -> dict[str, Check]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return {check.name: check for check in inside.answers(out.splitlines())}


def test_an_image_is_looked_at_from_inside() -> None:
    found = told(run("--image", "--outlast", __version__))
    names = ("python", "outlast", "torch", "obstore", "bytecode")
    assert {name: found[name].outcome for name in names} == dict.fromkeys(names, "pass")


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"], False),  # V100, torch for CUDA 12.8
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"], True),  # torch for CUDA 12.6
        ((8, 9), ["sm_75", "sm_80", "sm_86", "sm_90"], True),  # L4: a kernel for 8.6 runs
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((10, 0), ["sm_80", "sm_90"], False),  # another generation
        ((10, 0), ["sm_80", "compute_90"], True),  # compiled by the driver
        ((7, 0), [], True),  # unknown
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels_is_found(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert inspection.runs_on(capability, built) is runs


def test_an_image_of_another_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = inside.pod("outlast-doctor-a", 0, WANTED, rank=False)["spec"]["containers"][0]["command"]
    assert arguments[arguments.index("--outlast") + 1] == __version__
    inspection.image("99.0")
    told = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert told["outlast"]["outcome"] == "warn"
    assert told["outlast"]["said"].startswith(f"outlast {__version__}, and who asks has 99.0")


@pytest.mark.parametrize(
    ("how", "lacks"),
    [
        ("compiled", False),
        ("not compiled", True),
        ("compiled for other files", True),
        ("compiled by hash", False),
        ("may be", False),
    ],
)
def test_packages_that_are_compiled_at_every_start_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, lacks: bool
) -> None:
    source = tmp_path / "apackage" / "__init__.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    if how.startswith("compiled"):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if "hash" in how else None
        py_compile.compile(str(source), invalidation_mode=mode)
    if how == "compiled for other files":  # as when a layer of an image is made with other times
        os.utime(source, (1.0, 1.0))
    monkeypatch.setattr(sys, "dont_write_bytecode", how != "may be")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = bytecode.missing("apackage", "nosuchpackage")
    assert found == ({"apackage": str(source.parent)} if lacks else {})
    if lacks:
        assert f"RUN python3 -m compileall -q {tmp_path} " in bytecode.remedy(found)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_two_processes_measure_what_is_between_them(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    words = ("--address", address, "--port", str(ports.free(2)), "--timeout", "60")
    first, second = run("--rank", "0", *words), run("--rank", "1", *words)
    try:
        assert told(first)["all-reduce"].said.startswith("gloo of 16 MiB over two pods: ")
        assert told(second)["network"].said.endswith("Gbit/s over one connection")
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_a_peer_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    port = ports.free()
    inspection.peer(1, "127.0.0.1", port, "gloo", 0.1)
    found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert (found[0]["name"], found[0]["outcome"]) == ("network", "fail")
    assert "refused" in found[0]["said"]
    assert f"{port} was tried" in found[0]["remedy"]


def test_a_name_that_nobody_knows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    inspection.dns(["localhost"])
    inspection.dns(["nowhere.invalid"])
    known, unknown = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert known["said"].startswith(("localhost is 127.0.0.1", "localhost is ::1"))
    assert (unknown["outcome"], unknown["name"]) == ("fail", "dns")


def test_a_store_is_tried_and_left_as_it_was(moto: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from outlast import store

    inspection.store(f"{moto.url}/runs")
    conditional, whole = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert (conditional["name"], conditional["outcome"]) == ("store conditional", "pass")
    assert (whole["name"], whole["outcome"]) == ("store", "pass")
    assert list(store.open_(moto.url).entries()) == []


def test_a_store_that_does_not_exist_is_told(moto: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inspection.store("s3://no-such-bucket-here/runs")
    (found,) = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert (found["name"], found["outcome"]) == ("store put", "fail")
    assert "there is no bucket s3://no-such-bucket-here" in found["said"]


def test_a_store_without_conditional_writes_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspection.store(f"file://{tmp_path}")
    conditional, whole = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert (conditional["outcome"], whole["outcome"]) == ("warn", "pass")


# The command line


@pytest.fixture
def outlast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs `outlast doctor` on a cluster; that of this machine is not looked at."""
    monkeypatch.setattr(machine, "checks", lambda: iter([doctor.passed("python", "3.11")]))

    def call(cluster: FakeCluster, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(kube, "connect", lambda context=None, namespace=None: cluster)
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", *words], backend=fake.FakeBackend(tmp_path))
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


def test_doctor_prints_what_it_finds_by_where_it_looked(outlast: Any) -> None:
    code, out, err = outlast(ending(FakeCluster(a_namespace(), a_node("a"))), "--image", IMAGE)
    assert (code, err) == (0, "")
    assert out.startswith("This machine\npass  python              3.11\n\nCluster fake, namespace team\npass  server ")
    assert f"\n\nIn pods of {IMAGE}\nwarn  network " in out


def test_doctor_fails_when_something_would_not_work(outlast: Any) -> None:
    code, out, _ = outlast(FakeCluster(version="v1.20.0"), "-o", "json")
    assert code == 1
    assert [each["name"] for each in json.loads(out) if each["outcome"] == "fail"] == ["server", "namespace", "nodes"]


def test_a_cluster_that_does_not_answer_is_a_failure_and_no_traceback(outlast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()

    def away() -> str:
        raise Unanswered("the API server https://fake cannot be reached: it does not answer in time")

    monkeypatch.setattr(cluster, "version", away)
    code, out, _ = outlast(cluster)
    assert code == 1
    assert "fail  access              the API server https://fake cannot be reached" in out


def test_a_store_without_an_image_is_a_mistake(outlast: Any) -> None:
    code, _, err = outlast(FakeCluster(), "--store", "s3://b/c")
    assert (code, err) == (2, "Error: --store and --secret are tried in a pod; say of which image: --image IMAGE\n")


# A real cluster


@pytest.mark.cluster
def test_a_real_cluster_is_looked_at_from_inside() -> None:
    subprocess.run(["kubectl", "create", "namespace", "why-doctor"], check=True)
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    try:
        subprocess.run(["kubectl", "label", "namespace", "why-doctor", restricted], check=True)
        with contextlib.closing(kube.connect(namespace="why-doctor")) as cluster:
            look_at(cluster)
    finally:
        subprocess.run(["kubectl", "delete", "namespace", "why-doctor", "--wait=false"], check=True)


def look_at(cluster: kube.Cluster) -> None:
    bad = [check for check in asked.checks(cluster) if check.outcome == "fail" and check.name != "operator"]
    assert bad == []  # whether an operator is there is the cluster's business
    found = {
        check.name: check
        for check in inside.checks(cluster, inside.Options(os.environ.get("OUTLAST_TEST_IMAGE", IMAGE), "file:///out/probe"))
    }
    assert {check.name for check in found.values() if check.outcome == "pass"} >= {
        "python", "outlast", "torch", "command", "dns", "network", "all-reduce", "store",
    }  # fmt: skip
    assert cluster.list_(kinds.POD) == []
    absent = list(inside.checks(cluster, inside.Options("127.0.0.1:5056/no/image:1", network=False)))
    assert [(check.name, check.outcome) for check in absent] == [("pods", "fail")]
    assert threading.active_count() < 10
