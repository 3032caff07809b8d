"""Spark's Pi, submitted to a cluster with the example's files.

KUBECONFIG=... OUTLAST_TEST_IMAGE=outlast:test pytest -m cluster tests/data/test_spark_pi_cluster.py

The image has what the variant `spark` has, /opt/spark included; spark-submit and a Java are here.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from namespaces import Document, Namespace, made
from outlast.data import java

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
SPARK = Path(__file__).parents[2] / "examples" / "spark"
SMALL = {
    "spark.executor.instances": "2",
    "spark.executor.cores": "1",
    "spark.kubernetes.executor.request.cores": "200m",
    "spark.kubernetes.driver.request.cores": "200m",
}


@pytest.fixture
def zip_() -> Iterator[Namespace]:
    """A namespace with the example's accounts."""
    with made("pi") as found:
        found.apply(accounts(found))
        yield found


def accounts(namespace: Namespace) -> list[Document]:
    """The example's accounts, for another namespace."""
    documents = list(yaml.safe_load_all((SPARK / "accounts.yaml").read_text()))[1:]
    for document in documents:
        for meta in (document["metadata"], *document.get("subjects", ())):
            meta["namespace"] = namespace.name
    return documents


def submit(namespace: Namespace, directory: Path, script: str, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
    """A script of the example, run with the rights of the account spark-submit."""
    token = namespace.kubectl("create", "token", "spark-submit").strip()
    config = json.loads(namespace.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    (directory / "config").write_text(json.dumps(config))
    (directory / "config").chmod(0o600)
    environ = {
        **os.environ,
        "KUBECONFIG": str(directory / "config"),
        "KUBERNETES": config["clusters"][0]["cluster"]["server"],
        "JAVA_HOME": str(java.home(importlib.metadata.version("pyspark"))),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **given,
    }
    return subprocess.run(["sh", str(SPARK / script), *words], env=environ, capture_output=True, text=True, check=False)


def test_pi_is_computed_and_the_driver_stays_completed(zip_: Namespace, tmp_path: Path) -> None:
    conf = {
        **SMALL,
        "spark.kubernetes.namespace": zip_.name,
        "spark.kubernetes.container.image": os.environ["OUTLAST_TEST_IMAGE"],
    }
    done = submit(
        zip_,
        tmp_path,
        "spark-python-pi.sh",
        *(word for key, value in conf.items() for word in ("--conf", f"{key}={value}")),
        ARGUMENTS="20",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    driver = json.loads(zip_.kubectl("get", "pod", "spark-python-pi-driver", "-o", "json"))
    assert driver["status"]["phase"] == "Succeeded"
    assert driver["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    found = re.search(r"^Pi is roughly (\d\.\d+)$", zip_.kubectl("logs", "spark-python-pi-driver"), re.MULTILINE)
    assert found
    # every task draws the same 100,000 points: the function is pickled with the state of its generator; this is ten deviations
    assert abs(float(found[1]) - math.pi) < 0.052
