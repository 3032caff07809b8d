"""Spark in clusters: the files of the example are right and hold the values that they promise; what the containers run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast import spark_entrypoint
from outlast.base.errors import OutlastError
from outlast.data import spark_java
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


# What the containers run

HOME = Path("/opt/pyspark")
JAVA = Path("/opt/java")
EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver.zip.svc:7078",
    "SPARK_EXECUTOR_CORES": "4",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.1",
    "SPARK_EXECUTOR_POD_NAME": "pi-exec-3",
    "SPARK_CONF_DIR": "/opt/spark/conf",
}


def command(*words: str, **environ: str) -> list[str]:
    return spark_entrypoint.command(words, environ, spark=HOME, java_home=JAVA)


def test_an_executor_is_a_jvm_described_by_sparks_variables() -> None:
    options = {f"SPARK_JAVA_OPT_{n}": f"-Dn={n} x" for n in (10, 2, 0)}
    found = command("executor", **EXECUTOR, **options, SPARK_CLASSPATH="/mine/*", SPARK_EXTRA_CLASSPATH="/image/*")
    assert found == [
        *("/opt/java/bin/java", "-Dn=0 x", "-Dn=2 x", "-Dn=10 x", "-Xms1024m", "-Xmx1024m"),
        *("-cp", "/opt/spark/conf:/mine/*:/opt/pyspark/jars/*:/image/*", spark_entrypoint.BACKEND),
        *("--driver-url", "spark://CoarseGrainedScheduler@driver.zip.svc:7078", "--executor-id", "3", "--cores", "4"),
        *("--app-id", "spark-1", "--hostname", "10.0.0.1", "--resourceProfileId", "0", "--podName", "pi-exec-3"),
    ]


@pytest.mark.parametrize("missing", ["SPARK_EXECUTOR_MEMORY", "SPARK_EXECUTOR_POD_NAME"])
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(OutlastError, match=f"^{missing} is not set, and `executor` needs it; Spark sets it in the pods"):
        command("executor", **{name: value for name, value in EXECUTOR.items() if name != missing})


def test_a_driver_is_spark_submit_in_client_mode_and_other_words_are_themselves() -> None:
    assert command("driver", "--class", "C", "local:///pi.py", "128000", SPARK_DRIVER_BIND_ADDRESS="10.0.0.2") == [
        *("/opt/pyspark/bin/spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.2", "--deploy-mode", "client"),
        *("--class", "C", "local:///pi.py", "128000"),
    ]
    assert command("outlast", "status") == ["outlast", "status"]


def test_python_workers_get_our_python_unless_another_is_given() -> None:
    ours = spark_entrypoint.environment({"SPARK_EXECUTOR_LIBRARY_PATH": "/lib"}, spark=HOME, java_home=JAVA)
    assert (ours["PYSPARK_PYTHON"], ours["SPARK_HOME"], ours["JAVA_HOME"]) == (sys.executable, str(HOME), str(JAVA))
    assert ours["LD_LIBRARY_PATH"] == "/lib"
    theirs = spark_entrypoint.environment({"PYSPARK_PYTHON": "python3.12"}, spark=HOME, java_home=JAVA)
    assert theirs["PYSPARK_PYTHON"] == "python3.12"


def test_the_process_becomes_the_command_or_says_one_sentence(tmp_path: Path) -> None:
    def run(*words: str, **environ: str) -> Any:
        program = [sys.executable, "-m", "outlast.spark_entrypoint", *words]
        return subprocess.run(program, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True, check=False)

    assert run("sh", "-c", "echo $$ here; exit 7").returncode == 7
    gone = run("driver", JAVA_HOME=str(tmp_path))
    assert gone.returncode == 78
    assert gone.stderr == (
        f"Error: JAVA_HOME is {tmp_path}, but there is no {tmp_path}/bin/java; correct JAVA_HOME or unset it\n"
    )


def test_java_home_is_taken_then_the_path_and_without_a_java_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("given", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "java").touch(0o755)
    on_path = {"PATH": str(tmp_path / "other" / "bin")}
    assert spark_java.home({**on_path, "JAVA_HOME": str(tmp_path / "given")}) == tmp_path / "given"
    assert spark_java.home(on_path) == tmp_path / "other"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OutlastError, match=r"and there is none; install one \(Debian: openjdk-17-jre-"):
        spark_java.home({"PATH": str(tmp_path)})
