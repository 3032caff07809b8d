"""The examples of Spark in clusters: their files are right, and hold the values that they promise."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast.job import spec
from outlast.job.contract import API_VERSION, KIND
from outlast.kubernetes.manifests import volumes
from outlast.kubernetes.manifests.scheduling import placement
from published_schemas import validate
from spark_files import PROGRAM, SPARK

PUBLISHED = Path(__file__).parents[1] / "shared" / "published"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SPARK / name).read_text()))


@pytest.mark.parametrize("name", ["accounts.yaml", "driver.yaml", "executor.yaml"])
def test_a_file_holds_valid_documents(name: str) -> None:
    for document in documents(name):
        validate(document)


def test_accounts_are_of_a_restricted_namespace_and_may_touch_no_secret() -> None:
    namespace, *others = documents("accounts.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"]["namespace"] for each in others} == {namespace["metadata"]["name"]} == {"zip"}
    rights = {each["metadata"]["name"]: each["rules"] for each in others if each["kind"] == "Role"}
    made = {name: {word for rule in rules for word in rule["resources"]} for name, rules in rights.items()}
    assert made == {"spark": {"pods"}, "spark-submit": {"pods", "configmaps", "services", "networkpolicies"}}
    verbs = {verb for rule in rights["spark"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch", "create", "delete", "deletecollection"}, "as Spark 3.5 and 4 ask for"
    bound = {each["metadata"]["name"]: {who["name"] for who in each["subjects"]} for each in others if "subjects" in each}
    assert bound == {"spark": {"spark", "notebook"}, "spark-submit": {"spark-submit", "notebook"}}


@pytest.mark.parametrize(("role", "spot"), [("driver", "avoid"), ("executor", "prefer")])
def test_pods_are_restricted_and_placed_like_those_of_jobs(role: str, spot: str) -> None:
    (document,) = documents(f"{role}.yaml")
    pod, (container,) = document["spec"], document["spec"]["containers"]
    assert pod["securityContext"] == volumes.pod_security()
    assert container["securityContext"] == volumes.container_security()
    assert container["command"] == ["python", "-P", "-m", "outlast.spark_entrypoint"]
    assert pod["automountServiceAccountToken"] is (role == "driver")
    assert {key: pod[key] for key in ("affinity", "tolerations") if key in pod} == placed(spot)


def placed(spot: str) -> dict[str, Any]:
    """How the pods of a job are placed."""
    fields = {"module": "outlast.recipes.smoke", "scheduling": {"spot": spot}}
    job = spec.parse(json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": fields}))
    return placement.pod(job, has_peers=False)


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    """The words that a script gives to spark-submit."""
    (tmp_path / "spark-submit").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "spark-submit").chmod(0o755)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    return lambda script, *more, **given: subprocess.run(
        ["sh", str(SPARK / script), *more], env=environ | given, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def conf_of(words: list[str]) -> dict[str, str]:
    """The configuration, of which what comes later wins."""
    return dict(word.partition("=")[::2] for option, word in itertools.pairwise(words) if option == "--conf")


def test_the_script_submits_50_executors_of_4_cores_and_128000_tasks(words: Callable[..., list[str]]) -> None:
    given = words("spark-python-pi.sh", "--conf", "spark.executor.instances=2")
    assert given[:6] == [
        "--master",
        "k8s://https://kubernetes.default.svc:443",
        "--deploy-mode",
        "cluster",
        "--name",
        "spark-python-pi",
    ]
    assert given[-4:] == ["--conf", "spark.executor.instances=2", "local:///opt/spark/examples/src/main/python/pi.py", "128000"]
    assert conf_of(given)["spark.executor.instances"] == "2"
    conf = conf_of(words("spark-python-pi.sh"))
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


def test_preparing_data_is_the_same_submission_with_our_program_and_a_claim(words: Callable[..., list[str]]) -> None:
    given = words("prepare.sh", "--conf", "spark.executor.instances=8", PREPARE="text /data/corpus --to /data/tokens")
    assert conf_of(given)["spark.executor.instances"] == "8"
    pi, conf = conf_of(words("spark-python-pi.sh")), conf_of(words("prepare.sh", PREPARE="text"))
    program = given.index(PROGRAM)
    assert given[program + 1 :] == ["data", "prepare", "text", "/data/corpus", "--to", "/data/tokens", "--engine", "spark"]
    assert {key: conf[key] for key in pi if conf[key] != pi[key]} == {"spark.kubernetes.driver.pod.name": "prepare-driver"}
    volume = "volumes.persistentVolumeClaim.data"
    for role in ("driver", "executor"):
        assert conf[f"spark.kubernetes.{role}.{volume}.mount.path"] == "/data"
        assert conf[f"spark.kubernetes.{role}.{volume}.options.claimName"] == "efs-pvc"
    dockerfile = (SPARK.parents[1] / "images" / "Dockerfile").read_text()
    there = PROGRAM.removeprefix("local://")
    assert dockerfile.count(f"ln -s bin/outlast {there}") == 2, "in the images spark and notebook"
    assert not Path(there).stem.isidentifier(), "executors can import it by the name of our package otherwise"


def test_a_spark_application_is_the_same_submission_for_the_operator(words: Callable[..., list[str]]) -> None:
    (application,) = documents("spark-application.yaml")
    validate(application)
    with pytest.raises(jsonschema.ValidationError):
        validate({**application, "spec": {"type": "Python", "drivers": {}}})
    fields = application["spec"]
    script = words("prepare.sh", PREPARE=" ".join(fields["arguments"][2:-2]))
    assert fields["mainApplicationFile"] == PROGRAM
    assert fields["arguments"] == script[script.index(PROGRAM) + 1 :]
    conf = conf_of(script)
    assert {key: conf.get(key) for key in fields["sparkConf"]} == fields["sparkConf"]
    assert fields["image"] == conf["spark.kubernetes.container.image"]
    assert str(fields["executor"]["instances"]) == conf["spark.executor.instances"]
    assert fields["sparkVersion"] in (SPARK.parents[1] / "constraints.txt").read_text()
    for role, spot in (("driver", "avoid"), ("executor", "prefer")):
        pod = fields[role]
        assert (pod["podSecurityContext"], pod["securityContext"]) == (volumes.pod_security(), volumes.container_security())
        assert {key: pod[key] for key in ("affinity", "tolerations") if key in pod} == placed(spot)
        assert pod["template"]["spec"]["automountServiceAccountToken"] is (role == "driver")


def test_in_a_notebook_executors_have_its_claim_its_namespace_and_the_restricted_template() -> None:
    lines = (SPARK / "spark-defaults.conf").read_text().splitlines()
    conf = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    (claim, _, stateful_set) = yaml.safe_load_all((SPARK.parent / "notebook" / "statefulset.yaml").read_text())
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.work"
    assert conf[f"{volume}.options.claimName"] == claim["metadata"]["name"]
    mounts = stateful_set["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "work", "mountPath": conf[f"{volume}.mount.path"]} in mounts
    assert conf["spark.kubernetes.namespace"] == claim["metadata"]["namespace"]
    assert conf["spark.kubernetes.executor.podTemplateFile"] == "${env:SPARK_CONF_DIR}/executor.yaml"
    assert conf["spark.executor.cores"] == conf["spark.kubernetes.executor.request.cores"]
