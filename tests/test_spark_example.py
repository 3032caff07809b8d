"""The example of spark-submit: its files are right, and hold the values that they promise."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast import spec
from outlast.contract import API_VERSION, KIND
from outlast.manifests import rbac, scheduling, volumes

SPARK = Path(__file__).parents[1] / "examples" / "spark"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SPARK / name).read_text()))


@pytest.mark.parametrize("name", ["accounts.yaml", "driver.yaml", "executor.yaml"])
def test_a_file_holds_valid_documents(name: str) -> None:
    for document in documents(name):
        schemas.validate(document, NEWEST, strict=True)


def test_accounts_are_of_a_restricted_namespace_and_may_touch_no_secret() -> None:
    namespace, *others = documents("accounts.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"]["namespace"] for each in others} == {namespace["metadata"]["name"]} == {"zip"}
    rights = {each["metadata"]["name"]: each["rules"] for each in others if each["kind"] == "Role"}
    made = {name: {word for rule in rules for word in rule["resources"]} for name, rules in rights.items()}
    assert made == {"spark": {"pods"}, "spark-submit": {"pods", "configmaps", "services", "networkpolicies"}}
    ours = next(each for each in rbac.spark({"name": "spark", "namespace": "zip"}, "spark") if each["kind"] == "Role")
    assert rights["spark"] == ours["rules"], "as in `outlast data prepare --engine spark`"


@pytest.mark.parametrize(("role", "spot"), [("driver", "avoid"), ("executor", "prefer")])
def test_pods_are_restricted_and_placed_like_those_of_jobs(role: str, spot: str) -> None:
    (document,) = documents(f"{role}.yaml")
    pod, (container,) = document["spec"], document["spec"]["containers"]
    assert pod["securityContext"] == volumes.security()
    assert container["securityContext"] == volumes.confined()
    assert container["command"] == ["python", "-P", "-m", "outlast.spark_entrypoint"]
    assert pod["automountServiceAccountToken"] is (role == "driver")
    fields = {"module": "outlast.recipes.smoke", "scheduling": {"spot": spot}}
    job = spec.parse(json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": fields}))
    assert {key: pod[key] for key in ("affinity", "tolerations") if key in pod} == scheduling.pod(job, several=False)


def test_the_script_submits_50_executors_of_4_cores_and_128000_tasks(tmp_path: Path) -> None:
    (tmp_path / "spark-submit").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "spark-submit").chmod(0o755)
    command = ["sh", str(SPARK / "spark-python-pi.sh"), "--conf", "spark.executor.instances=2"]
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:6] == [
        "--master",
        "k8s://https://kubernetes.default.svc:443",
        "--deploy-mode",
        "cluster",
        "--name",
        "spark-python-pi",
    ]
    assert words[-4:] == ["--conf", "spark.executor.instances=2", "local:///opt/spark/examples/src/main/python/pi.py", "128000"]
    given = [word.partition("=")[::2] for option, word in itertools.pairwise(words) if option == "--conf"]
    conf = dict(reversed(given))
    assert conf == conf | {
        "spark.executor.instances": "50",
        "spark.kubernetes.driver.pod.name": "spark-python-pi-driver",
        "spark.kubernetes.namespace": "zip",
        "spark.kubernetes.driver.annotation.sidecar.istio.io/inject": "false",
        "spark.kubernetes.executor.annotation.sidecar.istio.io/inject": "false",
        "spark.kubernetes.executor.request.cores": "4",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
    }
    assert conf["spark.executor.cores"] == conf["spark.kubernetes.executor.request.cores"]
    assert conf["spark.kubernetes.container.image"].endswith("-spark")
