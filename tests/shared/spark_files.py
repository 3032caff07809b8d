"""Example files of Spark, and functions that run their scripts in a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from namespaces import Document, Namespace
from outlast.data import spark_java

SPARK = Path(__file__).parents[2] / "examples" / "spark"


PROGRAM = "local:///opt/outlast/outlast-cli.py"


def accounts(namespace: Namespace) -> list[Document]:
    """Return the example's accounts for another namespace."""
    documents = list(yaml.safe_load_all((SPARK / "accounts.yaml").read_text()))[1:]
    for document in documents:
        for meta in (document["metadata"], *document.get("subjects", ())):
            meta["namespace"] = namespace.name
    return documents


def submit(namespace: Namespace, directory: Path, script: str, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the example with the rights of the account spark-submit."""
    token = namespace.kubectl("create", "token", "spark-submit").strip()
    config = json.loads(namespace.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    (directory / "config").write_text(json.dumps(config))
    (directory / "config").chmod(0o600)
    environ = {"KUBECONFIG": str(directory / "config"), "KUBERNETES": config["clusters"][0]["cluster"]["server"]}
    environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "JAVA_HOME": str(spark_java.home())}
    environ = {**os.environ, **environ, **given}
    return subprocess.run(["sh", str(SPARK / script), *words], env=environ, capture_output=True, text=True, check=False)
