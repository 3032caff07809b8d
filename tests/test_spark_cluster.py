"""Spark on a real cluster: images are prepared by two executors; an executor and then the driver are killed.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \\
        pytest -m cluster tests/test_spark_cluster.py

OUTLAST_TEST_DISKS is a directory of this machine that all nodes see, as those of a cluster on one machine do.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from namespaces import Namespace
from outlast.manifests.spark_conf import MASTER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
Outlast = Callable[..., tuple[int, str, str]]
SMALL = {
    "spark.executor.instances": "2",
    "spark.kubernetes.executor.request.cores": "200m",
    "spark.kubernetes.driver.request.cores": "200m",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "512m",
    "spark.kubernetes.executor.apiPollingInterval": "3s",
}


@pytest.fixture(scope="module")
def disk(namespace: Namespace) -> Iterator[Path]:
    """A directory that all nodes mount by the claim `disk`, with 600 images in `in`."""
    if "OUTLAST_TEST_DISKS" not in os.environ:
        pytest.skip("OUTLAST_TEST_DISKS does not name a directory that the nodes see")
    place = Path(os.environ["OUTLAST_TEST_DISKS"], f"spark-{secrets.token_hex(3)}")
    rng = np.random.default_rng(0)
    for number in range(600):
        path = place / "in" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    place.chmod(0o777)
    size = {"storage": "1Gi"}
    volume = {"storageClassName": place.name, "accessModes": ["ReadWriteMany"]}
    found = [
        {
            "kind": "PersistentVolume",
            "metadata": {"name": place.name},
            "spec": {**volume, "capacity": size, "hostPath": {"path": str(place)}},
        },
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}, "spec": {**volume, "resources": {"requests": size}}},
    ]
    namespace.apply([{"apiVersion": "v1", **each} for each in found])
    yield place
    namespace.kubectl("delete", "pv", place.name, "--wait=false")
    shutil.rmtree(place)


def command(namespace: Namespace, to: str, *more: str, **conf: str) -> tuple[str, ...]:
    words = ("data", "prepare", "images", "/disk/in", "--to", f"/disk/{to}", "--shard-size", "128Ki", "--engine", "spark")
    place = ("--master", MASTER, "--claim", "disk:/disk", "--image", os.environ["OUTLAST_TEST_IMAGE"], "-n", namespace.name)
    given = [f"--conf={key}={value}" for key, value in {**SMALL, **conf}.items()]
    return (*words, *place, *given, *more)


def pods(namespace: Namespace, job: str, role: str) -> list[str]:
    """Names of a job's pods of a role that run."""
    selector = f"outlast.dev/job={job},spark-role={role}"
    found = json.loads(namespace.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    running = [pod for pod in found if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]
    return [pod["metadata"]["name"] for pod in running]


def content(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_an_executor_and_the_driver_are_killed_and_the_bytes_are_those_of_this_machine(
    namespace: Namespace, disk: Path, outlast: Outlast
) -> None:
    assert outlast(*command(namespace, "out")) == (
        0,
        f"Job prepare-out prepares /disk/out with Spark\nlook at it with: outlast logs -f prepare-out -n {namespace.name}\n",
        "",
    )

    def shards() -> dict[str, int]:
        """The finished shards and when each was written."""
        return {path.name: path.stat().st_mtime_ns for path in (disk / "out").glob("*.safetensors")}

    def log() -> str:
        return namespace.logs("prepare-out")

    namespace.wait(lambda: len(pods(namespace, "prepare-out", "executor")) == 2 and len(shards()) >= 3, log)
    assert "2 running" in outlast("status", "prepare-out", "-n", namespace.name)[1]
    first = pods(namespace, "prepare-out", "executor")[0]
    namespace.kubectl("delete", "pod", first, "--grace-period=0", "--force")
    namespace.wait(
        lambda: first not in pods(namespace, "prepare-out", "executor") and len(pods(namespace, "prepare-out", "executor")) == 2,
        log,
    )
    done, (driver,) = len(shards()), pods(namespace, "prepare-out", "driver")
    namespace.wait(lambda: len(shards()) > done + 2, log)
    namespace.kubectl("delete", "pod", driver, "--grace-period=0", "--force")
    time.sleep(5)  # its executors write what they had begun
    before = shards()
    assert 0 < len(before) < 50, "it was killed in the middle"
    job = json.loads(namespace.kubectl("get", "job", "prepare-out", "-o", "json"))
    namespace.ended(job, "Complete")
    assert outlast("list", "-n", namespace.name)[1].splitlines()[-1].split()[:2] == ["prepare-out", "Succeeded"]
    assert outlast("data", "prepare", "images", str(disk / "in"), "--to", str(disk / "local"), "--shard-size", "128Ki")[0] == 0
    assert content(disk / "out") == content(disk / "local")
    again = [name for name, when in before.items() if shards()[name] != when]
    assert len(again) <= 2, "finished shards are not made again, but for those whose notes two executors had not written"
    assert outlast(*command(namespace, "out"))[1].startswith("already there: Job prepare-out")
    assert outlast("cancel", "prepare-out", "-n", namespace.name)[0] == 0
    namespace.wait(lambda: not namespace.pods("prepare-out"), log)


def test_a_quota_without_room_for_executors_is_said_by_driver_status_and_why(
    namespace: Namespace, disk: Path, outlast: Outlast
) -> None:
    meta = {"name": "small", "namespace": namespace.name}
    namespace.apply(
        [{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": {"hard": {"requests.memory": "2100Mi"}}}]
    )
    try:
        namespace.wait(lambda: "requests.memory" in namespace.kubectl("get", "quota", "small", "-o", "yaml"), lambda: "no quota")
        assert outlast(*command(namespace, "full"))[0] == 0
        namespace.wait(
            lambda: "executors cannot be created now: the quota small" in namespace.logs("prepare-full"),
            lambda: namespace.logs("prepare-full"),
        )
        assert "executors  0 running" in outlast("status", "prepare-full", "-n", namespace.name)[1]
        said = outlast("why", "prepare-full", "-n", namespace.name)[1]
        assert "Spark's driver gets no executor: the quota small leaves too little: requests.memory" in " ".join(said.split())
    finally:
        namespace.kubectl("delete", "quota", "small")
        outlast("cancel", "prepare-full", "-n", namespace.name)


def test_an_account_without_rights_fails_the_job_with_a_sentence(namespace: Namespace, disk: Path, outlast: Outlast) -> None:
    documents = list(yaml.safe_load_all(outlast(*command(namespace, "forbidden", "--print"))[1]))
    namespace.kubectl("delete", "role", "spark", "--ignore-not-found")
    try:
        namespace.apply([each for each in documents if each["kind"] != "Role"])
        assert namespace.ended(documents[-1], "Failed")["reason"] == "PodFailurePolicy"
        assert "Spark's driver cannot make executors" in namespace.logs("prepare-forbidden")
    finally:
        outlast("cancel", "prepare-forbidden", "-n", namespace.name)
