"""The drop-in for elastic.pytorch.org is one folder: without it, and without its entry in `api.dropins`, the rest works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import outlast

REST = """
import importlib, pkgutil, outlast
from outlast.kubernetes.manifests.installed import operator_deployment
from outlast.kubernetes.operator import main
from outlast.kubernetes.operator.observed_job import Limits

for name in ("cli", "kubernetes"):
    package = importlib.import_module(f"outlast.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"outlast.{name}."):
        importlib.import_module(module.name)
print(outlast.__file__)
print(*[document["spec"]["group"] for document in operator_deployment.files()["crd.yaml"]])
print(*[kind.group for kind in main.reconcilers(Limits())])
"""


def test_the_folder_of_the_drop_in_can_be_deleted(tmp_path: Path) -> None:
    package = tmp_path / "outlast"
    shutil.copytree(Path(outlast.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "torchelastic"))
    registry = package / "kubernetes" / "api" / "dropins.py"
    text, registered = re.subn(
        r'^    DropIn\([^)]*"outlast\.kubernetes\.torchelastic[^)]*\),\n', "", registry.read_text(), flags=re.MULTILINE
    )
    assert registered == 1
    registry.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", REST], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(package / "__init__.py"), "outlast.dev", "outlast.dev"]


def test_nobody_but_the_registry_and_the_kinds_names_the_api_of_the_drop_in() -> None:
    package = Path(outlast.__file__).parent
    named = re.compile(r"LEGACY_JOB|outlast\.kubernetes\.torchelastic|elastic\.pytorch\.org")
    files = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if named.search(path.read_text())]
    assert sorted(each for each in files if "/torchelastic/" not in each) == [
        f"kubernetes/api/{name}.py" for name in ("dropins", "kinds")
    ]
