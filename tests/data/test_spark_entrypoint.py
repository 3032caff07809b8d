"""Spark's containers: the commands that they become, and which Java is taken."""

from __future__ import annotations

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


# Which Java


def a_java(where: Path, version: str = "17.0.9") -> Path:
    (where / "bin").mkdir(parents=True)
    (where / "bin" / "java").write_text("#!/bin/sh\n")
    (where / "bin" / "java").chmod(0o755)
    (where / "release").write_text(f'JAVA_VERSION="{version}"\n')
    return where


def test_java_home_is_taken_then_the_path_then_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, other, packaged = (a_java(tmp_path / name) for name in ("given", "other", "packaged"))
    monkeypatch.setattr(spark_java, "_packaged", lambda: packaged)
    on_path = {"PATH": str(other / "bin")}
    assert spark_java.home("3.5.9", {**on_path, "JAVA_HOME": str(given)}) == given
    assert spark_java.home("3.5.9", on_path) == other
    assert spark_java.home("3.5.9", {"PATH": str(tmp_path)}) == packaged
    (other / "release").write_text('JAVA_VERSION="11.0.2"\n')
    assert spark_java.home("4.3.0", on_path) == packaged


@pytest.mark.parametrize(
    ("version", "spark", "why"),
    [
        ("17.0.9", "3.5.9", ""),
        ("25", "4.3.0", ""),
        ("1.8.0_292", "3.5.9", "Java 8, but Spark 3.5.9 needs 17 to 21"),
        ("25", "3.5.9", "Java 25, but Spark 3.5.9 needs 17 to 21"),
        ("11.0.2", "4.3.0", "Java 11, but Spark 4.3.0 needs 17 or newer"),
    ],
)
def test_a_java_that_spark_does_not_run_on_is_refused(tmp_path: Path, version: str, spark: str, why: str) -> None:
    assert spark_java.unfit(a_java(tmp_path / "java", version), spark) == why


def test_without_a_java_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_java, "_packaged", lambda: None)
    remedy = r"install one \(Debian: openjdk-17-jre-headless\) and set JAVA_HOME to its directory$"
    with pytest.raises(OutlastError, match=f"^Spark needs a Java, and there is none; {remedy}"):
        spark_java.home("3.5.9", {"PATH": str(tmp_path)})
    old = a_java(tmp_path / "old", "11")
    with pytest.raises(OutlastError, match=f"^{old}: Java 11, but Spark 3.5.9 needs 17 to 21; {remedy}"):
        spark_java.home("3.5.9", {"PATH": str(old / "bin")})
    with pytest.raises(OutlastError, match=f"^JAVA_HOME is {old}: Java 11, but"):
        spark_java.home("3.5.9", {"JAVA_HOME": str(old)})
