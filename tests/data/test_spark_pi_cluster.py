"""Spark's Pi, submitted to a cluster with the example's files.

KUBECONFIG=... OUTLAST_TEST_IMAGE=outlast:test pytest -m cluster tests/data/test_spark_pi_cluster.py

The image has what the variant `spark` has, /opt/spark included; spark-submit and a Java are here.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Namespace, made
from spark_files import accounts, submit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
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
