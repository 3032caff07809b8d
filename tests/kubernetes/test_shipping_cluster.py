"""Code that comes in a ConfigMap runs in a pod, and code that is not what it should be does not.

KUBECONFIG=... OUTLAST_TEST_IMAGE=outlast:test pytest -m cluster tests/kubernetes/test_shipping_cluster.py
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.job import contract, spec
from outlast.kubernetes import manifests
from outlast.kubernetes.jobs.parcel import pack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
IMAGE = os.environ.get("OUTLAST_TEST_IMAGE", "")

SCRIPT = """\
import hashlib, os, pathlib
import lib.part
here = pathlib.Path(__file__).parent
print("ran", here, os.getcwd(), lib.part.WORD, hashlib.sha256((here / "noise.bin").read_bytes()).hexdigest(), flush=True)
print("there", sorted(path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file() and path.suffix != ".pyc"))
"""


def kubectl(*words: str, documents: list[dict[str, Any]] | None = None) -> str:
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}) if documents is not None else None
    done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def namespace() -> Iterator[str]:
    if not IMAGE:
        pytest.skip("OUTLAST_TEST_IMAGE is not set")
    name = f"ship-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def rendered(root: Path, namespace: str) -> list[dict[str, Any]]:
    """A job of one pod that runs train.py of `root`, as documents."""
    fields = {"image": IMAGE, "script": "train.py", "restarts": {"limit": 0}}
    document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "ship"}, "spec": fields}
    job = spec.anchor(spec.parse(yaml.safe_dump(document)), root)
    with pack(job) as parcel:
        return manifests.render(parcel.job.in_namespace(namespace), "job", code=parcel.code)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "part.py").write_text("WORD = 'shipped'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "noise.bin").write_bytes(random.Random(1).randbytes(600 << 10))
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    (tmp_path / "secret.txt").write_text("no code")
    return tmp_path


def test_code_in_a_config_map_runs(root: Path, namespace: str) -> None:
    documents = rendered(root, namespace)
    kubectl("apply", "--server-side", "--validate=strict", "-f", "-", documents=documents)
    job = f"job/{documents[-1]['metadata']['name']}"
    kubectl("wait", "-n", namespace, "--for=condition=complete", job, "--timeout=300s")
    log = kubectl("logs", "-n", namespace, job)
    checksum = hashlib.sha256((root / "noise.bin").read_bytes()).hexdigest()
    assert f"ran /out/ship/work /out/ship/work shipped {checksum}\n" in log
    shipped = "'.gitignore', '.outlast-files', '.outlast-generation', '.outlast-run', 'lib/part.py', 'noise.bin', 'train.py'"
    assert f"there [{shipped}]\n" in log
    kubectl("apply", "--server-side", "--validate=strict", "-f", "-", documents=documents)
    assert len(json.loads(kubectl("get", "jobs", "-n", namespace, "-o", "json"))["items"]) == 1


def test_code_with_another_checksum_does_not_run(root: Path, namespace: str) -> None:
    (root / "noise.bin").unlink()
    documents = rendered(root, namespace)
    (content,) = documents[0]["binaryData"].values()
    documents[0]["binaryData"] = {"code.tar.gz": base64.b64encode(base64.b64decode(content) + b"\0").decode()}
    kubectl("apply", "--server-side", "--validate=strict", "-f", "-", documents=documents)
    job = f"job/{documents[-1]['metadata']['name']}"
    kubectl("wait", "-n", namespace, "--for=condition=failed", job, "--timeout=300s")
    pods = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    assert [each["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] for each in pods] == [78]
    log = kubectl("logs", "-n", namespace, pods[0]["metadata"]["name"])
    assert "has the checksum" in log
    assert "ran " not in log
