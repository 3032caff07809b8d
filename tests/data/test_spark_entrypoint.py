"""Spark's containers: the commands that they become, and which Java is taken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast import spark_entrypoint
from outlast.base.errors import OutlastError
from outlast.data import spark_java

SPARK = Path("/opt/pyspark")
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
    return spark_entrypoint.command(words, environ, spark=SPARK, java_home=JAVA)


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
    ours = spark_entrypoint.environment({"SPARK_EXECUTOR_LIBRARY_PATH": "/lib"}, spark=SPARK, java_home=JAVA)
    assert (ours["PYSPARK_PYTHON"], ours["SPARK_HOME"], ours["JAVA_HOME"]) == (sys.executable, str(SPARK), str(JAVA))
    assert ours["LD_LIBRARY_PATH"] == "/lib"
    theirs = spark_entrypoint.environment({"PYSPARK_PYTHON": "python3.12"}, spark=SPARK, java_home=JAVA)
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
