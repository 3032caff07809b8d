"""The files of a notebook in a real cluster: a restricted pod, its work on a volume, a token, the rights of its account.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \\
      pytest -m cluster tests/kubernetes/test_notebook_cluster.py

The image is one that the nodes have, with Outlast, JupyterLab and torch. OUTLAST_TEST_DISKS is a directory of this machine that
all nodes see. Whether Kubeflow's own controller starts it is not tested: it is not in the cluster, only its definition is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from namespaces import Document, Namespace
from published_schemas import ACCOUNT, KUBEFLOW, ROOT, STATEFUL_SET

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PUBLISHED = ROOT / "tests" / "shared" / "published" / "kubeflow" / "kubeflow.org_notebooks.yaml"
JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec: {image: example.org/outlast:1, module: outlast.recipes.smoke, workers: {replicas: 2}}
"""


def documents(file: Path, namespace: Namespace) -> list[Document]:
    """The documents of a file, for another namespace."""
    return list(yaml.safe_load_all(re.sub(r"namespace: zip\b", f"namespace: {namespace.name}", file.read_text())))


@pytest.fixture
def token(namespace: Namespace) -> Iterator[str]:
    """The notebook, applied as its file says, with a volume for its claim; its token."""
    if "OUTLAST_TEST_DISKS" not in os.environ:
        pytest.skip("OUTLAST_TEST_DISKS does not name a directory that the nodes see")
    name = f"{namespace.name}-notebook"
    place = Path(os.environ["OUTLAST_TEST_DISKS"], name)
    place.mkdir(parents=True)
    place.chmod(0o777)
    claim, service, stateful_set = documents(STATEFUL_SET, namespace)
    spec = {
        "storageClassName": "",
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(place)},
        "claimRef": {"namespace": namespace.name, "name": claim["metadata"]["name"]},
    }
    claim["spec"]["storageClassName"] = ""
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    container |= {"image": os.environ["OUTLAST_TEST_IMAGE"], "imagePullPolicy": "IfNotPresent"}
    container["resources"] = {"requests": {"cpu": "200m", "memory": "1500Mi"}, "limits": {"memory": "1500Mi"}}
    made = secrets.token_hex(32)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "notebook-token"}, "stringData": {"token": f"{made}\n"}}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    namespace.apply([*documents(ACCOUNT, namespace), volume, secret, claim, service, stateful_set])
    yield made
    namespace.kubectl("delete", "persistentvolume", name, "--wait=false")


@contextlib.contextmanager
def forwarded(namespace: Namespace) -> Iterator[int]:
    """A port of this machine that leads to the notebook's Service."""
    namespace.kubectl("rollout", "status", "statefulset/notebook", "--timeout=300s")
    command = ["kubectl", "-n", namespace.name, "port-forward", "service/notebook", ":80"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found
            yield int(found[1])
        finally:
            process.kill()


def files(port: int, token: str) -> list[str]:
    """The files that the notebook's page lists."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/contents?token={token}", timeout=30) as page:
        return [each["name"] for each in json.load(page)["content"]]


def test_a_notebook_is_reached_with_its_token_keeps_its_work_and_has_its_rights(namespace: Namespace, token: str) -> None:
    def inside(script: str) -> str:
        return namespace.kubectl("exec", "notebook-0", "--", "sh", "-c", script, fails=True)

    with forwarded(namespace) as port:
        assert "first.ipynb" in files(port, token)
        for wrong in ("", "0" * 64):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                files(port, wrong)
    inside("echo precious > work.txt; mkdir -p job")
    inside(f"cat > job/job.yaml <<'END'\n{JOB}END")
    assert "no job" in inside("cd /tmp && outlast list 2>&1")
    made = inside("cd job && outlast submit job.yaml --as indexed-job --dry-run 2>&1")
    assert re.search(r"^Job train\S* would be created$", made, re.MULTILINE), made
    account = f"system:serviceaccount:{namespace.name}:notebook"
    for verb, resource in (("get", "secrets"), ("list", "secrets"), ("create", "rolebindings"), ("create", "pods/exec")):
        said = namespace.kubectl("auth", "can-i", verb, resource, f"--as={account}", fails=True)
        assert said.strip() == "no", (verb, resource)
    assert inside("ps ax -o args 2>/dev/null || cat /proc/[0-9]*/cmdline | tr '\\0' ' '").count(token) == 0
    assert inside("cat /proc/1/environ").count(token) == 0
    namespace.kubectl("delete", "pod", "notebook-0")
    with forwarded(namespace) as port:
        assert {"work.txt", "first.ipynb"} <= set(files(port, token))
    assert inside("cat work.txt") == "precious\n"


def test_a_notebook_of_kubeflow_is_accepted_by_its_definition(namespace: Namespace) -> None:
    namespace.kubectl("apply", "--server-side", "-f", str(PUBLISHED))
    resource = "notebooks.kubeflow.org"
    try:
        served = ["kubectl", "get", resource, "-o", "name"]
        namespace.wait(lambda: subprocess.run(served, capture_output=True, check=False).returncode == 0, str)
        _, own = documents(KUBEFLOW, namespace)
        namespace.kubectl("create", "--validate=strict", "-f", "-", given=own)
        kept: Document = json.loads(namespace.kubectl("get", resource, "notebook", "-o", "json"))
        template = kept["spec"]["template"]
        assert template["spec"]["containers"][0]["args"] == own["spec"]["template"]["spec"]["containers"][0]["args"]
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "notebook-of-kubeflow"}}
        pod["spec"]["serviceAccountName"] = "default"  # Kubeflow's default-editor is not here
        namespace.kubectl("create", "--dry-run=server", "-f", "-", given=pod)
    finally:
        namespace.kubectl("delete", "crd", resource, "--wait=true")
