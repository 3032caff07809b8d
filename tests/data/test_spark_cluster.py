"""Spark on a real cluster: images are prepared by two executors, as examples/spark/prepare.sh submits them; an executor and
then the driver are killed.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \\
        pytest -m cluster tests/data/test_spark_cluster.py

The image has what the variant `spark` has, /opt/outlast/outlast-cli.py included, or PROGRAM names that file (local:///...).
OUTLAST_TEST_DISKS is a directory of this machine that all nodes see, as those of a cluster on one machine do.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from namespaces import Namespace
from spark_files import accounts, submit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
Outlast = Callable[..., tuple[int, str, str]]
PREPARE = "images /data/in --to /data/out --shard-size 128Ki"
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


def start(namespace: Namespace, directory: Path) -> threading.Thread:
    """Submit it, and wait for its end in a thread."""
    conf = {
        **SMALL,
        "spark.kubernetes.namespace": namespace.name,
        "spark.kubernetes.container.image": os.environ["OUTLAST_TEST_IMAGE"],
    }
    words = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    given = {"PREPARE": PREPARE, "CLAIM": "disk"}
    thread = threading.Thread(target=submit, args=(namespace, directory, "prepare.sh", *words), kwargs=given)
    thread.start()
    return thread


def executors(namespace: Namespace) -> list[str]:
    """Names of the executors that run."""
    found = json.loads(namespace.kubectl("get", "pods", "-l", "spark-role=executor", "-o", "json"))["items"]
    running = [pod for pod in found if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]
    return [pod["metadata"]["name"] for pod in running]


def content(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_an_executor_and_the_driver_are_killed_and_the_bytes_are_those_of_this_machine(
    namespace: Namespace, disk: Path, outlast: Outlast, tmp_path: Path
) -> None:
    namespace.apply(accounts(namespace))

    def shards() -> dict[str, int]:
        """The finished shards and when each was written."""
        return {path.name: path.stat().st_mtime_ns for path in (disk / "out").rglob("*.safetensors")}

    def log() -> str:
        return namespace.kubectl("logs", "prepare-driver", fails=True)

    first = start(namespace, tmp_path)
    namespace.wait(lambda: len(executors(namespace)) == 2 and len(shards()) >= 3, log)
    lost = executors(namespace)[0]
    namespace.kubectl("delete", "pod", lost, "--grace-period=0", "--force")
    namespace.wait(lambda: lost not in executors(namespace) and len(executors(namespace)) == 2, log)
    done = len(shards())
    namespace.wait(lambda: len(shards()) > done + 2, log)
    namespace.kubectl("delete", "pod", "prepare-driver", "--grace-period=0", "--force")
    namespace.wait(lambda: not executors(namespace), log)
    first.join()
    before = shards()
    assert 0 < len(before) < 50, "it was killed in the middle"
    start(namespace, tmp_path).join()
    driver = json.loads(namespace.kubectl("get", "pod", "prepare-driver", "-o", "json"))
    assert driver["status"]["phase"] == "Succeeded", log()
    assert outlast("data", "prepare", "images", str(disk / "in"), "--to", str(disk / "local"), "--shard-size", "128Ki")[0] == 0
    assert content(disk / "out") == content(disk / "local")
    again = [name for name, when in before.items() if shards()[name] != when]
    assert len(again) <= 2, "finished shards are not made again, but for those whose notes two executors had not written"
