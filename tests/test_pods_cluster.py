"""Whole jobs in real pods, without an operator: every topology trains to its end, and outlasts its pods.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/test_pods_cluster.py

The image is one that the nodes can pull, with Outlast, torch and rclone. Works in a restricted namespace of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outlast import cli, kube, manifests, spec
from outlast.backends.kubernetes import KubernetesBackend
from outlast.status import State

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
Document = dict[str, Any]
STEPS = ("--epochs=250",)


class Namespace:
    """A restricted namespace, and kubectl in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *words: str, given: object = None, fails: bool = False) -> str:
        text = json.dumps(given) if given is not None else None
        done = subprocess.run(["kubectl", "-n", self.name, *words], input=text, capture_output=True, text=True, check=False)
        assert fails or done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, documents: list[Document]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": documents}
        self.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", given=items)

    def run(self, name: str, topology: str, **fields: object) -> list[Document]:
        """Apply a job that trains the smoke recipe; its documents."""
        documents = manifests.render(a_job(name, **fields), topology, namespace=self.name)
        self.apply(documents)
        return documents

    def pods(self, job: str) -> list[Document]:
        return list(json.loads(self.kubectl("get", "pods", "-l", f"outlast.dev/job={job}", "-o", "json"))["items"])

    def logs(self, job: str) -> str:
        return self.kubectl("logs", "-l", f"outlast.dev/job={job}", "--tail=-1", "--prefix", fails=True)

    def wait(self, what: Callable[[], object], why: Callable[[], str], timeout_s: float = 240) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{why()}"
            time.sleep(1)
        return found

    def weights(self, job: str) -> str:
        """What the smoke recipe says at its end, once it does."""

        def done() -> re.Match[str] | None:
            return re.search(r"\[DONE\].* ranks agree on weights (\w+)", self.logs(job))

        return str(self.wait(done, lambda: self.logs(job))[1])

    def at_epoch(self, job: str, epoch: int) -> None:
        """Wait until it trains beyond that epoch."""

        def there() -> bool:
            return any(int(found) >= epoch for found in re.findall(r"\[EPOCH\] (\d+)/", self.logs(job)))

        self.wait(there, lambda: self.logs(job))

    def ended(self, job: Document, condition: str) -> Document:
        """The condition of a `batch/v1` Job, once it has it."""

        def found() -> Document | None:
            status = json.loads(self.kubectl("get", "job", job["metadata"]["name"], "-o", "json"))["status"]
            return next((c for c in status.get("conditions", ()) if c["type"] == condition and c["status"] == "True"), None)

        return dict(self.wait(found, lambda: self.logs(job["metadata"]["labels"]["outlast.dev/job"])))


def a_job(name: str, **fields: object) -> spec.Job:
    whole: Document = {
        "image": os.environ["OUTLAST_TEST_IMAGE"],
        "module": "outlast.recipes.smoke",
        "args": list(STEPS),
        "workers": {"replicas": 2},
        "resources": {"cpu": "0.2", "memory": "700Mi"},
        "checkpoint": {"every": "20 steps"},
        "interruption": {"grace": "20s"},
        **fields,
    }
    document = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}, "spec": whole}
    return spec.parse(json.dumps(document))


def kind(documents: list[Document], wanted: str) -> Document:
    return next(each for each in documents if each["kind"] == wanted)


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    if "OUTLAST_TEST_IMAGE" not in os.environ:
        pytest.skip("OUTLAST_TEST_IMAGE does not name an image that the cluster has")
    made = Namespace(f"outlast-{secrets.token_hex(3)}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.name, "labels": labels}}])
    yield made
    made.kubectl("delete", "namespace", made.name, "--wait=false")


@pytest.fixture(scope="module")
def undisturbed(namespace: Namespace) -> str:
    """The weights of two workers that nothing happened to."""
    documents = namespace.run("undisturbed", "indexed-job")
    namespace.ended(kind(documents, "Job"), "Complete")
    return namespace.weights("undisturbed")


def test_one_pod_trains_to_its_end(namespace: Namespace) -> None:
    documents = namespace.run("one", "job", args=["--epochs=5"], workers={"replicas": 1})
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights("one")


def test_a_statefulset_trains_once_and_stays_up(namespace: Namespace, undisturbed: str) -> None:
    namespace.run("set", "statefulset")
    assert namespace.weights("set") == undisturbed
    namespace.wait(lambda: namespace.logs("set").count("stays up and does nothing more") == 2, lambda: namespace.logs("set"))
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in namespace.pods("set"))
    namespace.kubectl("delete", "pod", "set-0", "--grace-period=0", "--force")  # and all that was on its disk
    namespace.wait(lambda: "another worker says; nothing is left" in namespace.logs("set"), lambda: namespace.logs("set"))
    assert "rank 0 of" not in namespace.kubectl("logs", "set-0")


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_is_killed_and_the_weights_are_those_of_the_undisturbed_run(
    index: int, namespace: Namespace, undisturbed: str
) -> None:
    documents = namespace.run(f"killed-{index}", "indexed-job")
    namespace.at_epoch(f"killed-{index}", 20)
    victim = next(
        pod["metadata"]["name"]
        for pod in namespace.pods(f"killed-{index}")
        if pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
    )
    namespace.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights(f"killed-{index}") == undisturbed


def test_a_wrong_configuration_ends_the_job_and_is_not_tried_again(namespace: Namespace) -> None:
    documents = namespace.run("wrong", "indexed-job", args=["--world=3"])
    failed = namespace.ended(kind(documents, "Job"), "Failed")
    assert (failed["reason"], "exit code 78" in failed["message"]) == ("PodFailurePolicy", True)
    assert "the world has 2 ranks and --world asks for 3" in namespace.logs("wrong")


def a_server(namespace: str) -> list[Document]:
    """`rclone serve s3` in a pod, and its Service."""
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    command = "mkdir -p /buckets/bucket && exec rclone serve s3 --addr :8080 --auth-key key,secret --vfs-cache-mode=off /buckets"
    container = {
        "name": "s3",
        "image": os.environ["OUTLAST_TEST_IMAGE"],
        "command": ["sh", "-c", command],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": confined,
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "buckets", "mountPath": "/buckets"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes = [{"name": "buckets", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    meta = {"name": "s3", "namespace": namespace}
    fields = {"securityContext": user, "containers": [container], "volumes": volumes}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "labels": {"app": "s3"}}, "spec": fields},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": {"app": "s3"}, "ports": [{"port": 8080}]}},
    ]


@pytest.fixture(scope="module")
def stored(namespace: Namespace) -> Document:
    """Fields of a job whose output is in an S3 server of the cluster."""
    namespace.apply(a_server(namespace.name))
    namespace.kubectl("wait", "--for=condition=Ready", "pod/s3", "--timeout=120s")
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    return {"output": "s3://bucket/runs", "env": {"AWS_ENDPOINT_URL": f"http://s3.{namespace.name}.svc:8080", **keys}}


@pytest.mark.parametrize("topology", ["job", "statefulset"])
def test_an_evaluation_says_how_good_the_model_is_for_each_class(
    topology: str, namespace: Namespace, stored: Document, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {**stored["env"], "AWS_ENDPOINT_URL": "http://localhost:8080", "HOME": "/tmp"}
    words = ["env", *(f"{name}={value}" for name, value in env.items()), "sh", "-c"]
    bring = "outlast data get digits --to /tmp/digits && outlast sync /tmp/digits s3://bucket/digits"
    namespace.kubectl("exec", "s3", "--", *words, bring)
    recipe = {"module": "outlast.recipes.cifar10", "args": ["--epochs=1"], "data": [{"from": "s3://bucket/digits"}]}
    name = f"digits-{topology}"
    namespace.run(name, topology, **stored, **recipe, workers={"replicas": 1}, resources={"cpu": "0.5", "memory": "1200Mi"})
    with contextlib.closing(kube.connect(namespace=namespace.name)) as cluster:
        backend = KubernetesBackend(cluster)
        namespace.wait(lambda: backend.status(name).state is State.SUCCEEDED, lambda: namespace.logs(name))
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", name, "-n", namespace.name])
    out = capfd.readouterr().out
    assert ended.value.code == 0, out
    assert len(re.findall(r"Accuracy for class: \w+ +is [\d.]+ %", out)) == 10, out


def test_all_pods_are_lost_and_the_job_goes_on_from_its_store(namespace: Namespace, stored: Document, undisturbed: str) -> None:
    documents = namespace.run("stored", "indexed-job", **stored)
    namespace.at_epoch("stored", 60)

    def there(name: str) -> str:
        return namespace.kubectl("exec", "s3", "--", "cat", f"/buckets/bucket/runs/stored/{name}", fails=True)

    names = ("sh", "-c", "cd /buckets/bucket/runs/stored && find . -type f")
    namespace.wait(
        lambda: "COMMIT" in namespace.kubectl("exec", "s3", "--", *names, fails=True), lambda: namespace.logs("stored")
    )
    namespace.kubectl(
        "delete", "job", kind(documents, "Job")["metadata"]["name"], "--cascade=foreground", "--grace-period=0", "--force"
    )
    namespace.wait(lambda: not namespace.pods("stored"), lambda: namespace.logs("stored"))
    namespace.apply(documents)
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights("stored") == undisturbed
    assert json.loads(there("run.json"))["state"] == "Succeeded"
    log = there("logs/worker-0.log")
    assert log.count("outlast | Running:") >= 2
    assert log.endswith("outlast | worker 0: training is done (exit 0)\n")
