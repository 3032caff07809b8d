"""Whole jobs in real pods, without an operator: every topology trains to its end, and outlasts its pods.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_pods_cluster.py

The image is one that the nodes can pull, with Outlast, torch and rclone. Works in a restricted namespace of its own.
"""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from namespaces import Document, Namespace, a_server, kind
from outlast import cli
from outlast.job.status import State
from outlast.kubernetes import api
from outlast.kubernetes.jobs.backend import KubernetesBackend

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(namespace: Namespace) -> str:
    documents = namespace.run("undisturbed", "indexed-job")
    namespace.ended(kind(documents, "Job"), "Complete")
    return namespace.weights("undisturbed")


def test_a_statefulset_trains_once_and_stays_up(namespace: Namespace, undisturbed: str) -> None:
    namespace.run("set", "statefulset")
    assert namespace.weights("set") == undisturbed
    namespace.wait(lambda: namespace.logs("set").count("stays up and does nothing more") == 2, lambda: namespace.logs("set"))
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in namespace.pods("set"))
    namespace.kubectl("delete", "pod", "set-0", "--grace-period=0", "--force")  # and all that was on its disk
    namespace.wait(lambda: "as another worker reports; nothing is left" in namespace.logs("set"), lambda: namespace.logs("set"))
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


@pytest.fixture(scope="module")
def stored(namespace: Namespace) -> Document:
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
    with contextlib.closing(api.connect(namespace=namespace.name)) as cluster:
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
    parts = "cat /buckets/bucket/runs/stored/logs/worker-0.parts/*"
    log = namespace.kubectl("exec", "s3", "--", "sh", "-c", parts, fails=True)
    assert log.count("outlast | Running:") >= 2
    assert log.endswith("outlast | worker 0: training is done (exit 0)\n")
