"""`outlast doctor`: what it makes of answers, the pods that it makes, what runs in them; and, marked `cluster`, all of it."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

import fake
import ports
import worlds
from fake_cluster import Document, FakeCluster
from outlast import __version__
from outlast.base.errors import Forbidden, Refused, Unanswered
from outlast.job import accelerators, spec
from outlast.kubernetes import api, manifests
from outlast.kubernetes.api import kinds
from outlast.kubernetes.diagnosis import Finding, Snapshot, check_pods, gather_evidence, image_checks, machine
from outlast.kubernetes.diagnosis import cluster as judged
from outlast.kubernetes.diagnosis.finding import passed, warned
from outlast.kubernetes.diagnosis.nodes import TOLERATED
from outlast.worker.launch import bytecode
from published_schemas import each_minor

IMAGE = "docker.io/library/outlast:test"


# This machine


def test_this_machine_can_run_this_test() -> None:
    passing = {check.name for check in machine.checks() if check.outcome == "pass"}
    assert passing >= {"python", "outlast", "torch", "store", "kubernetes"}


def test_a_python_that_is_too_old_is_told() -> None:
    assert image_checks.python((3, 9)) == ("python", "fail", "3.9", "install Python 3.11 or newer")


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    said = Finding("torch", "ModuleNotFoundError: No module named torch", "pip install 'outlast[train]'")
    assert machine.torch(str(python)) == [said]


def test_an_extra_that_is_not_there_and_a_disk_that_is_nearly_full_are_told(tmp_path: Path) -> None:
    said = warned("moon", "lunar_lander is not installed: needed for landing", "pip install 'outlast[moon]'")
    assert machine.installed("moon", ("lunar_lander",), "landing") == said
    check = machine.free(tmp_path, "disk", 2**62, "free some")
    assert (check.outcome, check.remedy) == ("warn", "free some")


@pytest.mark.parametrize(("written", "together"), [("1\n", True), ("0\n", False), (None, False)])
def test_a_kernel_that_kills_a_container_as_a_whole_is_told(tmp_path: Path, written: str | None, together: bool) -> None:
    if written:
        (tmp_path / "memory.oom.group").write_text(written)
    found = [(outcome, what.partition(",")[0]) for _, outcome, what, _ in image_checks.memory(str(tmp_path / "memory.oom.group"))]
    assert found == ([("warn", "when this container's memory runs out")] if together else [])


# A cluster


def a_namespace(**labels: str) -> Document:
    return kinds.NAMESPACE.document({"name": "team", "labels": labels})


def a_node(name: str = "node-a", *, ready: str = "True", labels: Any = (), spec: Any = (), **has: str) -> Document:
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "8", "memory": "32Gi", **has}}
    return kinds.NODE.document({"name": name, "labels": dict(labels)}, spec=dict(spec), status=status)


def tainted(key: str, effect: str = "NoSchedule") -> Document:
    return a_node(spec={"taints": [{"key": key, "value": "present", "effect": effect}]})


def a_class(name: str, *, default: bool = False) -> Document:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": annotations}}


def a_deployment(available: int, namespace: str = "outlast-system") -> Document:
    spec = {"replicas": 2, "template": {"spec": {"containers": [{"image": "operator:1"}]}}}
    meta = {"name": "outlast-operator", "namespace": namespace, "labels": {"app.kubernetes.io/name": "outlast"}}
    return kinds.DEPLOYMENT.document(meta, spec=spec, status={"availableReplicas": available})


CORDONED, SILENT = a_node("node-b", spec={"unschedulable": True}), a_node("c", ready="Unknown")
CREATE, LIST = gather_evidence.RIGHTS[0], gather_evidence.RIGHTS[-1]
PARTS = a_node(**{"nvidia.com/mig-1g.10gb": "7", "nvidia.com/gpu": "0", "ephemeral-storage": "90Gi"})
NEURON = "aws.amazon.com/neuron"
OTHERS = a_node(**{"amd.com/gpu": "4", f"{NEURON}core": "32", f"{NEURON}device": "16"})
EBS = a_class("ebs", default=True)
BLIND = {kind.resource: "you may not" for kind in (kinds.NAMESPACE, kinds.NODE, kinds.STORAGE_CLASS, kinds.DEPLOYMENT)}
FACTS: tuple[tuple[Any, dict[str, Any], str, str], ...] = (
    (judged.server, {"version": "v1.36.2"}, "pass", "Kubernetes v1.36.2"),
    (judged.server, {"version": "v1.24.0"}, "fail", "Kubernetes v1.24.0 is too old"),
    (judged.rights, {}, "pass", "all that submit, logs and why need"),
    (judged.rights, {"missing_rights": (CREATE, LIST)}, "fail", "you may not create jobs.batch"),
    (judged.rights, {"missing_rights": (LIST,)}, "warn", "enough to submit; you may not list storageclasses.storage.k8s.io"),
    (judged.operator, {"operator": a_deployment(2)}, "pass", "2 of 2 run in namespace outlast-system, operator:1"),
    (judged.operator, {"operator": a_deployment(0, "ml")}, "fail", "none of 2 runs in namespace ml, operator:1"),
    (judged.operator, {"defined": True}, "fail", "there is none: ElasticJobs are stored, and no operator acts on them"),
    (judged.operator, {}, "warn", "there is none"),
    (judged.operator, {"forbidden": BLIND}, "warn", "you may not see it (outlast-system)"),
    (judged.nodes, {"nodes": (a_node(),)}, "pass", "1, all take pods: 8 cores and 32 GiB"),
    (judged.nodes, {"nodes": (a_node(), CORDONED)}, "warn", "1 of 2 take pods; not node-b"),
    (judged.nodes, {"nodes": (CORDONED, SILENT)}, "fail", "none of 2 takes pods"),
    (judged.nodes, {"forbidden": BLIND}, "warn", "you may not list them"),
    (judged.nodes, {"nodes": (tainted("nvidia.com/gpu"),)}, "pass", "1, all take pods"),
    (judged.nodes, {"nodes": (tainted("kubernetes.azure.com/scalesetpriority", "NoExecute"),)}, "pass", "1, all take pods"),
    (judged.nodes, {"nodes": (tainted("theirs", "PreferNoSchedule"),)}, "pass", "1, all take pods"),
    (judged.nodes, {"nodes": (tainted("theirs"),)}, "fail", "none of 1 takes pods"),
    (judged.devices, {"nodes": (a_node(**{"nvidia.com/gpu": "8"}),) * 2}, "pass", "16 × nvidia.com/gpu"),
    (judged.devices, {"nodes": (PARTS, OTHERS)}, "pass", f"4 × amd.com/gpu, 32 × {NEURON}core, 16 × {NEURON}device and 7 × nv"),
    (judged.devices, {"nodes": (a_node(),)}, "warn", "none is offered by any node"),
    (judged.storage, {"storage_classes": (EBS, a_class("efs"))}, "pass", "ebs and efs; ebs is the default"),
    (judged.storage, {"storage_classes": (a_class("ebs"),)}, "warn", "ebs; none is the default"),
    (judged.storage, {}, "warn", "there are no storage classes: new claims stay pending"),
    (judged.storage, {"forbidden": BLIND}, "warn", "you may not list storage classes"),
)


@pytest.mark.parametrize(("check", "shown", "outcome", "what"), FACTS)
def test_what_a_cluster_shows_is_judged(check: Any, shown: dict[str, Any], outcome: str, what: str) -> None:
    (found,) = check(Snapshot(namespace="team", **shown))
    assert (found.outcome, found.what[: len(what)]) == (outcome, what)
    assert bool(found.remedy) == (outcome != "pass")


def test_workers_tolerate_what_doctor_takes_for_tolerated() -> None:
    rendered = manifests.render(spec.parse(json.dumps(A_JOB)), "job")[-1]
    assert all(each in TOLERATED for each in rendered["spec"]["template"]["spec"]["tolerations"])
    assert check_pods.pod("outlast-doctor-a", 0, WANTED, peer=False)["spec"]["tolerations"] == TOLERATED


A_JOB = {
    "apiVersion": "outlast.dev/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "a"},
    "spec": {"image": "a", "module": "train", "resources": {"gpu": 1}},
}


def found(cluster: FakeCluster) -> dict[str, Finding]:
    return {check.name: check for check in judged.checks(gather_evidence.namespace(cluster))}  # type: ignore[arg-type]


def a_binding(namespace: str) -> Document:
    subjects = [{"kind": "ServiceAccount", "name": "outlast-operator", "namespace": namespace}]
    return kinds.CLUSTER_ROLE_BINDING.document({"name": "outlast-operator"}, subjects=subjects)


def test_the_operator_is_found_in_whichever_namespace_it_is() -> None:
    deployment = a_deployment(2, "ml")
    for cluster in (
        FakeCluster(a_deployment(0, "before"), deployment, a_binding("ml")),
        FakeCluster(deployment),
        FakeCluster(deployment, forbidden=(kinds.CLUSTER_ROLE_BINDING,)),
    ):
        assert found(cluster)["operator"].what == "2 of 2 run in namespace ml, operator:1"


def test_an_archived_controller_that_runs_is_a_failure() -> None:
    name = "elastic-job-k8s-controller"
    controller = {**a_deployment(1), "metadata": {"name": name, "namespace": "elastic-job"}}
    check = found(FakeCluster(controller))["controller"]
    assert (check.outcome, check.remedy) == ("fail", f"kubectl -n elastic-job scale deployment {name} --replicas=0")
    assert "controller" not in found(FakeCluster(a_deployment(2)))


def test_who_may_not_make_elasticjobs_is_told_of_the_role_and_that_jobs_work_without() -> None:
    checks = found(FakeCluster(a_deployment(2), served=(kinds.ELASTIC_JOB,), forbidden=(kinds.ELASTIC_JOB,)))
    assert checks["rights"].outcome == "pass"
    assert (check := checks["ElasticJob"]).outcome == "warn"
    assert check.what == "is defined; you may not create, list, patch or delete elasticjobs"
    assert all(said in check.remedy for said in ("ClusterRole outlast-edit", "`outlast submit --as indexed-job` works without"))
    assert found(FakeCluster(a_deployment(2), served=(kinds.ELASTIC_JOB,)))["ElasticJob"].outcome == "pass"


SMALL = "one with 100m cores and 256Mi"
QUOTA = "lets in only pods that say what they need: limits.cpu is not set"
LIMIT = "minimum cpu usage per Container is 1, but request is 100m"
POD = 'it cannot be applied: pods "a" is forbidden: '


class Refusing(FakeCluster):
    """Lets no pods in."""

    error: Exception

    def apply(self, document: Document, *, dry_run: bool = False) -> Document:
        assert (document["kind"], dry_run) == ("Pod", True)
        raise self.error


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (Refused(f"{POD}failed quota: team: must specify limits.cpu for: worker"), "fail", f"team of the namespace {QUOTA}"),
        (Refused(POD + LIMIT), "warn", f"{SMALL} would not be admitted: a LimitRange of the namespace refuses the pods: {LIMIT}"),
        (Refused("webhook x does not support dry run"), "warn", "not tried: webhook x does not support dry run"),
        (Forbidden("you may not patch pods"), "warn", "not tried: you may not patch pods"),
    ],
)
def test_what_lets_no_worker_in_is_told(error: Exception, outcome: str, said: str) -> None:
    cluster = Refusing(a_namespace(), a_node())
    cluster.error = error
    worker = found(cluster)["worker"]
    assert worker.outcome == outcome
    assert worker.what.endswith(said)
    assert worker.remedy


def test_a_whole_cluster_is_looked_at_and_nothing_changed() -> None:
    cluster = FakeCluster(a_namespace(), a_node())
    shown = found(cluster)
    assert shown["worker"] == passed("worker", f"{SMALL} would be admitted")
    assert shown["ElasticJob"].outcome == "warn"
    assert [check for check in shown.values() if check.outcome == "fail"] == []
    assert cluster.order == []


def test_someone_who_may_read_nothing_is_told_what_that_costs() -> None:
    blind = (kinds.NODE, kinds.STORAGE_CLASS, kinds.NAMESPACE, kinds.DEPLOYMENT)
    outcomes = {name: check.outcome for name, check in found(FakeCluster(forbidden=blind)).items()}
    names = ("rights", "nodes", "storage", "operator")
    assert {name: outcomes[name] for name in names} == dict.fromkeys(names, "warn")


# Pods

WANTED = check_pods.Options(IMAGE, "s3://bucket/runs", ("s3-keys",), timeout_s=5)


@each_minor
@pytest.mark.parametrize("index", [0, 1])
def test_kubernetes_takes_the_pods_and_they_are_restricted(index: int, version: str) -> None:
    pod = check_pods.pod("outlast-doctor-a", index, WANTED, peer=True, accelerator=accelerators.TABLE[0])
    schemas.validate(pod, version, strict=True)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert (spec["activeDeadlineSeconds"], spec["restartPolicy"], spec["automountServiceAccountToken"]) == (10, "Never", False)
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert bool(spec["affinity"]) == (index == 1)


def test_what_runs_in_pods_fits_into_a_command_and_names_no_variable_of_kubernetes() -> None:
    assert len(check_pods.source()) < 100_000
    assert "$(" not in check_pods.source()
    compile(check_pods.source(), "checks", "exec")


def line(name: str, outcome: str = "pass") -> str:
    return image_checks.MARK + json.dumps((name, outcome, "so", ""))


def ending(cluster: FakeCluster, phase: str = "Succeeded", lines: tuple[str, ...] = ()) -> FakeCluster:
    """Pods of this cluster have an address at once, and have ended as soon as the last one is there."""

    def end(document: Document) -> None:
        name = document["metadata"]["name"]
        document["status"] = {"phase": phase, "podIP": "10.0.0.1"}
        cluster.lines[name] = ["something else", line("dns"), *(lines if name.endswith("0") else (line("network"),))]

    cluster.then = end
    return cluster


def in_pods(cluster: FakeCluster, wanted: check_pods.Options = WANTED) -> list[Finding]:
    """Return the findings of pods in this cluster, and check that none of the pods is left, whatever happens."""
    try:
        return list(check_pods.checks(cluster, wanted))  # type: ignore[arg-type]
    finally:
        assert cluster.list_(kinds.POD) == []


def test_two_pods_look_and_are_deleted() -> None:
    cluster = ending(FakeCluster(a_node("a"), a_node("b")), lines=(line("all-reduce"), line("command", "fail")))
    assert [(check.name, check.outcome) for check in in_pods(cluster)] == [
        *(("dns", "pass"), ("all-reduce", "pass"), ("command", "fail"), ("network", "pass")),
    ]
    assert [each.split()[0] for each in cluster.order] == ["create", "create", "delete", "delete"]


def test_with_one_node_or_without_network_there_is_one_pod() -> None:
    assert [check.name for check in in_pods(ending(FakeCluster(a_node("a"))))] == ["network", "dns"]
    quiet = ending(FakeCluster(a_node("a"), a_node("b")))
    assert [check.name for check in in_pods(quiet, check_pods.Options(IMAGE, network=False, timeout_s=5))] == ["dns"]
    assert [each.split()[0] for each in quiet.order] == ["create", "delete"]


def test_pods_whose_image_cannot_be_had_say_so_and_are_deleted() -> None:
    cluster = FakeCluster(a_node("a"), a_node("b"))
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "no such host"}}

    def hang(document: Document) -> None:
        document["status"] = {"phase": "Pending", "containerStatuses": [{"name": "worker", "image": IMAGE, "state": waits}]}

    cluster.then = hang
    (check,) = in_pods(cluster)
    assert (check.outcome, check.name) == ("fail", "pods")
    assert check.what.endswith(f"for the image {IMAGE}, which cannot be pulled: the name of its registry is unknown (DNS)")


def test_pods_that_never_end_are_given_up_and_deleted() -> None:
    cluster = FakeCluster(a_node("a"))
    cluster.then = lambda document: document.update(status={"phase": "Running", "podIP": "10.0.0.1"})
    *_, check = in_pods(cluster, check_pods.Options(IMAGE, network=False, timeout_s=0.1))
    assert check == Finding("pods", "they had not ended after 0 s", check.remedy)


def test_ctrl_c_deletes_the_pods() -> None:
    cluster = FakeCluster(a_node("a"), a_node("b"))

    def interrupt(_: Document) -> None:
        raise KeyboardInterrupt

    cluster.then = interrupt
    with pytest.raises(KeyboardInterrupt):
        in_pods(cluster)


# What runs in them


def test_an_image_is_looked_at_from_inside() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    command = [sys.executable, "-c", check_pods.source(), json.dumps([("image", {"expected": __version__})])]
    out = subprocess.check_output(command, text=True, env=environ, timeout=120)
    passing = {check.name for check in check_pods.parse_findings(out.splitlines()) if check.outcome == "pass"}
    assert passing >= {"python", "outlast", "torch", "obstore", "bytecode", "command"}


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "use a torch that is built for this GPU"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "free the GPU: other processes use it"),
        ("CUDA error: uncorrectable ECC error", "see whether the GPU and its driver work, for example with nvidia-smi"),
    ],
)
def test_a_gpu_that_does_not_compute_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch, said: str, remedy: str) -> None:
    def computes(*_: Any) -> str:
        raise RuntimeError(said)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(image_checks, "_computes", computes)
    assert [*image_checks.torch(["cuda::"])][1:] == [("gpu", "fail", f"RuntimeError: {said}", remedy)]


def test_an_image_of_another_version_is_told() -> None:
    asked = dict(check_pods.calls(0, WANTED, {}, None))
    assert asked["image"]["expected"] == __version__
    ((_, outcome, what, _),) = image_checks.outlast("99.0")
    assert (outcome, what.partition(",")[0]) == ("warn", f"outlast {__version__}")


@pytest.mark.parametrize(("how", "lacks"), [("compiled", False), ("not compiled", True), ("compiled for other files", True)])
def test_packages_that_are_compiled_at_every_start_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, lacks: bool
) -> None:
    source = tmp_path / "apackage" / "__init__.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    if how.startswith("compiled"):
        py_compile.compile(str(source))
    if how == "compiled for other files":  # as when a layer of an image is made with other times
        os.utime(source, (1.0, 1.0))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = bytecode.missing("apackage", "nosuchpackage")
    assert found == ({"apackage": str(source.parent)} if lacks else {})
    if lacks:
        assert f"RUN python3 -m compileall -q {tmp_path} " in bytecode.remedy(found)


def test_two_processes_measure_what_is_between_them(tmp_path: Path) -> None:
    asked = {"address": "127.0.0.1", "port": ports.free(), "backend": "gloo", "timeout_s": 60.0}
    found = [tmp_path / str(rank) for rank in range(2)]
    pair = [worlds.fork.Process(target=measured, args=(to, rank), kwargs=asked) for rank, to in enumerate(found)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    first, second = (json.loads(to.read_text()) for to in found)
    assert [(name, what.partition(":")[0]) for name, _, what, _ in first] == [("all-reduce", "gloo of 16 MiB over two pods")]
    assert second == []


def measured(to: Path, rank: int, **asked: Any) -> None:
    """Write the findings of one of two pods."""
    to.write_text(json.dumps(list(image_checks.peer(rank, **asked))))


def test_a_peer_that_is_not_there_is_told() -> None:
    ((name, outcome, what, _),) = image_checks.peer(1, "127.0.0.1", port := ports.free(), "gloo", 0.1)
    assert (name, outcome) == ("all-reduce", "fail")
    assert f"while trying to connect to (127.0.0.1, {port})" in what


def test_a_name_that_nobody_knows_is_told() -> None:
    (known,), (unknown,) = image_checks.dns(["localhost"]), image_checks.dns(["nowhere.invalid"])
    assert known[2].startswith(("localhost is 127.0.0.1", "localhost is ::1"))
    assert unknown[:2] == ("dns", "fail")


def test_a_store_is_tried_and_left_as_it_was(moto: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outlast.storage import store

    def outcomes(url: str) -> list[tuple[str, str]]:
        return [check[:2] for check in image_checks.store(url)]

    assert outcomes(f"{moto.url}/runs") == [("store", "pass")]
    assert list(store.open_(moto.url).entries()) == []
    assert outcomes(f"file://{tmp_path}") == [("store", "pass"), ("store conditional", "warn")]  # it knows no conditions
    ((name, outcome, what, remedy),) = image_checks.store("s3://no-such-bucket-here/runs")
    assert (name, outcome, remedy.partition(":")[0]) == ("store", "fail", "correct what it names")
    assert "there is no bucket s3://no-such-bucket-here" in what
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setitem(sys.modules, "botocore", None)
    assert [remedy.partition(":")[0] for *_, remedy in image_checks.store("s3://bucket/runs")] == [
        "give the pods credentials that may do this"
    ]


# The command line


@pytest.fixture
def outlast(outlast: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `outlast doctor` on a cluster; that of this machine is not looked at."""
    monkeypatch.setattr(machine, "checks", lambda: iter([passed("python", "3.11")]))

    def call(cluster: FakeCluster, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(api, "connect", lambda context=None, namespace=None: cluster)
        return outlast("doctor", *words, backend=fake.FakeBackend(tmp_path))

    return call


def test_doctor_prints_what_it_finds_by_where_it_looked(outlast: Any) -> None:
    code, out, err = outlast(ending(FakeCluster(a_namespace(), a_node("a"))), "--image", IMAGE)
    assert (code, err) == (0, "")
    assert out.startswith("This machine\npass  python              3.11\n\nCluster fake, namespace team\npass  server ")
    assert f"\n\nIn pods of {IMAGE}\nwarn  network " in out


def test_doctor_fails_when_something_would_not_work(outlast: Any) -> None:
    code, out, _ = outlast(FakeCluster(version="v1.20.0"), "-o", "json")
    assert code == 1
    assert [each["name"] for each in json.loads(out) if each["outcome"] == "fail"] == ["server", "nodes", "worker"]


@pytest.mark.parametrize(("call", "words", "before"), [("version", (), "python"), ("create", ("--image", IMAGE), "network")])
def test_a_cluster_that_does_not_answer_any_more_is_a_finding_beside_those_before(
    outlast: Any, monkeypatch: pytest.MonkeyPatch, call: str, words: tuple[str, ...], before: str
) -> None:
    cluster = FakeCluster(a_namespace(), a_node("a"))

    def away(*_: Any) -> None:
        raise Unanswered("the API server https://fake cannot be reached: it does not answer in time")

    monkeypatch.setattr(cluster, call, away)
    code, out, err = outlast(cluster, *words, "-o", "json")
    assert (code, err) == (1, "")
    *_, last, access = json.loads(out)
    assert (last["name"], access["name"], access["remedy"]) == (before, "access", "fix that, and check again")
    assert access["said"].startswith("the API server https://fake cannot be reached")


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
        with contextlib.closing(api.connect(namespace="why-doctor")) as cluster:
            look_at(cluster)
    finally:
        subprocess.run(["kubectl", "delete", "namespace", "why-doctor", "--wait=false"], check=True)


def look_at(cluster: api.Cluster) -> None:
    bad = {check.name for check in judged.checks(gather_evidence.namespace(cluster)) if check.outcome == "fail"}
    assert bad <= {"operator"}  # whether an operator is there is the cluster's business
    wanted = check_pods.Options(os.environ.get("OUTLAST_TEST_IMAGE", IMAGE), "file:///out/probe")
    passing = {check.name for check in check_pods.checks(cluster, wanted) if check.outcome == "pass"}
    assert passing >= {"python", "outlast", "torch", "command", "dns", "all-reduce", "store"}
    assert cluster.list_(kinds.POD) == []
    absent = list(check_pods.checks(cluster, check_pods.Options("127.0.0.1:5056/no/image:1", network=False)))
    assert [(check.name, check.outcome) for check in absent] == [("pods", "fail")]
    assert threading.active_count() < 10
