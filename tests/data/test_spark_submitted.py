"""What Spark asks of an API server with the settings of examples/spark: restricted pods on the claim, within the rights there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml

import apiserver
from outlast.data import spark_java
from outlast.kubernetes.manifests import volumes
from rights import Right, needed, rights
from spark_files import PROGRAM, SPARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Document = dict[str, Any]


class Zip(apiserver.ApiServer):
    """A cluster with the namespace, which lets an account do what its Role allows."""

    def __init__(self, account: str) -> None:
        super().__init__()
        self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "zip"}})
        documents = yaml.safe_load_all((SPARK / "accounts.yaml").read_text())
        (role,) = [each for each in documents if each["kind"] == "Role" and each["metadata"]["name"] == account]
        self.refused: set[Right] = set()
        allowed = rights(role["rules"])

        def may(asked: str) -> bool:
            if (found := needed(asked)) is None or found[0] in allowed:
                return True
            self.refused.add(found[0])
            return False

        self.may = may

    def pods(self) -> list[Document]:
        return [each for key, each in list(self.documents.items()) if key[0] == "pods" and key[2] != "notebook-0"]


@pytest.fixture
def environ() -> dict[str, str]:
    home = str(spark_java.home())
    path = os.pathsep.join([str(Path(pyspark.__path__[0]) / "bin"), os.environ["PATH"]])
    return {**os.environ, "JAVA_HOME": home, "PATH": path, "KUBECONFIG": "/dev/null"}


def check(pod: Document, role: str, claim: str, place: str) -> Document:
    """Check that a pod is restricted and has the claim; its container."""
    (container,) = pod["spec"]["containers"]
    assert (pod["spec"]["securityContext"], container["securityContext"]) == (
        volumes.pod_security(),
        volumes.container_security(),
    )
    assert pod["spec"]["automountServiceAccountToken"] is (role == "driver")
    assert container["command"] == ["python", "-P", "-m", "outlast.spark_entrypoint"]
    assert container["args"][0] == role
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mounted[place]]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert {"name": "HOME", "value": "/tmp"} in container["env"]
    return dict(container)


def test_prepare_sh_makes_a_driver_that_runs_our_command(environ: dict[str, str]) -> None:
    api = Zip("spark-submit")
    with apiserver.serving(api) as url:
        given = {"KUBERNETES": url, "PREPARE": "text /data/corpus --to /data/tokens"}
        words = ["sh", SPARK / "prepare.sh", "--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        done = subprocess.run(words, env=environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert api.refused == set()
    (driver,) = api.pods()
    assert driver["metadata"]["name"] == "prepare-driver"
    assert driver["spec"]["serviceAccountName"] == "spark"
    words = check(driver, "driver", "efs-pvc", "/data")["args"]
    assert words[words.index(PROGRAM) + 1 :] == ["data", "prepare", *given["PREPARE"].split(), "--engine", "spark"]


def test_in_a_notebooks_pod_the_command_makes_executors_that_go_with_it(environ: dict[str, str], tmp_path: Path) -> None:
    api = Zip("spark")
    meta = {"name": "notebook-0", "namespace": "zip", "uid": "of-the-notebook"}
    spec = {"containers": [{"name": "notebook"}]}
    api.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": "Running"}})
    (tmp_path / "input.txt").write_text("to be\n" * 100)
    here = {"SPARK_CONF_DIR": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1", "HOSTNAME": "notebook-0"}
    here |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    program = [sys.executable, "-m", "outlast"]
    words = ["data", "prepare", "text", tmp_path / "input.txt", "--to", tmp_path / "to", "--tokenizer", "char"]
    with apiserver.serving(api) as url:
        command = [*program, *words, "--engine", "spark", "--master", f"k8s://{url}"]
        process = subprocess.Popen(command, env=environ | here, stderr=subprocess.PIPE, text=True)
        try:
            while not api.pods():
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
        finally:
            process.kill()
            process.communicate()
    assert api.refused == set()
    executor = api.pods()[0]
    assert [each["uid"] for each in executor["metadata"]["ownerReferences"]] == ["of-the-notebook"]
    variables = {
        each["name"]: each.get("value", "") for each in check(executor, "executor", "notebook-work", "/home/jovyan")["env"]
    }
    assert variables["SPARK_DRIVER_URL"].startswith("spark://CoarseGrainedScheduler@127.0.0.1:")
