"""Entrypoint of Spark's containers on Kubernetes: `python -m outlast.spark_entrypoint driver|executor ...`.

    driver --properties-file FILE --class CLASS PROGRAM ...      spark-submit in client mode, in the pod created by spark-submit
    executor                                                     an executor, configured by SPARK_...
    any other command                                            the command itself, so that the image also runs `outlast ...`

Spark passes `driver` or `executor` as an argument, and the rest as environment variables. With this entrypoint, Spark can use any
image that has Outlast, PySpark and Java (https://spark.apache.org/docs/latest/running-on-kubernetes.html#docker-images). This
process becomes the command (exec).
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.base.errors import OutlastError
from outlast.data import spark_java
from outlast.job.contract import Exit

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
"""The executor's class in Spark 3.3 and newer."""
_OPTIONS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}


def command(words: Sequence[str], environ: Mapping[str, str], *, spark: Path, java_home: Path) -> list[str]:
    """Return a container's command line. `spark` is Spark's directory (SPARK_HOME). Raises OutlastError if a variable is
    missing."""
    if words[0] == "executor":
        return _executor(environ, spark, java_home / "bin" / "java")
    if words[0] != "driver":
        return list(words)
    address = _given(environ, "SPARK_DRIVER_BIND_ADDRESS", "driver")
    submit = [str(spark / "bin" / "spark-submit"), "--conf", f"spark.driver.bindAddress={address}"]
    return [*submit, "--deploy-mode", "client", *words[1:]]


def environment(environ: Mapping[str, str], *, spark: Path, java_home: Path) -> dict[str, str]:
    """Return the command's environment variables. PYSPARK_PYTHON defaults to the Python that runs this module."""
    variables = {"PYSPARK_PYTHON": sys.executable, **environ, "SPARK_HOME": str(spark), "JAVA_HOME": str(java_home)}
    if libraries := environ.get("SPARK_EXECUTOR_LIBRARY_PATH"):  # Spark 4: spark.executor.extraLibraryPath
        variables["LD_LIBRARY_PATH"] = _joined(libraries, environ.get("LD_LIBRARY_PATH"))
    return variables


def _executor(environ: Mapping[str, str], spark: Path, program: Path) -> list[str]:
    memory = _given(environ, "SPARK_EXECUTOR_MEMORY", "executor")
    numbered = (re.fullmatch(r"SPARK_JAVA_OPT_(\d+)", name) for name in environ)
    options = sorted((int(each[1]), environ[each[0]]) for each in numbered if each)
    described = [word for option, name in _OPTIONS.items() for word in (option, _given(environ, name, "executor"))]
    jvm = [str(program), *(value for _, value in options), f"-Xms{memory}", f"-Xmx{memory}"]
    return [*jvm, "-cp", _classpath(environ, spark), BACKEND, *described]


def _classpath(environ: Mapping[str, str], spark: Path) -> str:
    configured = (environ.get("SPARK_CONF_DIR") or str(spark / "conf"), environ.get("HADOOP_CONF_DIR"))
    added = (environ.get("SPARK_EXTRA_CLASSPATH"), environ.get("SPARK_DIST_CLASSPATH"))
    return _joined(*configured, environ.get("SPARK_CLASSPATH"), str(spark / "jars" / "*"), *added)


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(each for each in paths if each)


def _given(environ: Mapping[str, str], name: str, word: str) -> str:
    if value := environ.get(name):
        return value
    raise OutlastError(f"{name} is not set, and `{word}` needs it; Spark sets it in the pods that it makes on Kubernetes")


def spark_home() -> Path:
    """Return the installed PySpark's directory without importing PySpark. Raises OutlastError if it is missing."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise OutlastError("PySpark is not installed in this image; add outlast[spark], or use Outlast's variant spark")
    return Path(package.origin).parent


def _check_user(user: int) -> None:
    try:
        pwd.getpwuid(user)
    except KeyError:
        raise OutlastError(
            f"user {user} has no line in this image's /etc/passwd, where Spark looks up the name; run as user 1000 or add it"
        ) from None


def main(words: Sequence[str]) -> None:
    """Replace this process with the container's command. Exits with a message if that is impossible."""
    environ = dict(os.environ)
    try:
        if not words:
            raise OutlastError("no command; give `driver` or `executor`, as Spark does, or a command such as `outlast --help`")
        if words[0] in ("driver", "executor"):
            spark = spark_home()
            _check_user(os.getuid())
            java_home = spark_java.home(environ)
            words = command(words, environ, spark=spark, java_home=java_home)
            environ = environment(environ, spark=spark, java_home=java_home)
        os.execvpe(words[0], list(words), environ)
    except OutlastError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(Exit.MISCONFIGURED)
    except OSError as error:
        print(f"Error: {words[0]} cannot be run: {error.strerror}; correct the container's command", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
