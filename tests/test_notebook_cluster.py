r"""A notebook in a real pod: restricted, with its work on a volume, behind a token, with the rights of its account.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \
      pytest -m cluster tests/test_notebook_cluster.py

The image is one that the nodes have, with Outlast, JupyterLab and torch. OUTLAST_TEST_DISKS is a directory of this machine that
all nodes see. Whether Kubeflow's own controller starts it is not tested: it is not in the cluster, only its definition is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Document, Namespace
from outlast.kube import kinds
from outlast.manifests import notebook, rbac
from test_notebook_kubernetes import PUBLISHED, answer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec: {image: example.org/outlast:1, module: outlast.recipes.smoke, workers: {replicas: 2}}
"""


@pytest.fixture(scope="module")
def disk(namespace: Namespace) -> Iterator[None]:
    """A volume for the notebook's claim."""
    if "OUTLAST_TEST_DISKS" not in os.environ:
        pytest.skip("OUTLAST_TEST_DISKS does not name a directory that the nodes see")
    place = Path(os.environ["OUTLAST_TEST_DISKS"], f"{namespace.name}-notebook")
    place.mkdir(parents=True)
    place.chmod(0o777)
    name = f"{namespace.name}-notebook"
    spec = {
        "storageClassName": "",
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce"],
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(place)},
        "claimRef": {"namespace": namespace.name, "name": notebook.claim_name("notebook")},
    }
    namespace.apply([{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}])
    yield
    namespace.kubectl("delete", "persistentvolume", name, "--wait=false")


class Command:
    """`outlast notebook --on kubernetes`, running."""

    def __init__(self, namespace: Namespace, *options: str) -> None:
        words = ["-c", "from outlast import cli; cli.main()", "notebook", "--on", "kubernetes", "-n", namespace.name, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-P", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += (line.rstrip() for line in self.process.stderr)

    def url(self) -> re.Match[str]:
        """Port and token, once it is there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://localhost:(\d+)/lab/tree/first\.ipynb\?token=(\w+)", line)
        assert found, (line, self.said)
        return found

    def close(self) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


@contextlib.contextmanager
def running(namespace: Namespace, *options: str) -> Iterator[Command]:
    command = Command(namespace, *options)
    try:
        yield command
    finally:
        command.close()


def contents(port: int, token: str) -> list[str]:
    """The files that the notebook's page lists."""
    import urllib.request

    with urllib.request.urlopen(f"http://localhost:{port}/api/contents?token={token}", timeout=30) as page:
        return [each["name"] for each in json.load(page)["content"]]


def test_a_notebook_is_reached_with_its_token_keeps_its_work_and_has_its_rights(namespace: Namespace, disk: None) -> None:
    options = ("--image", os.environ["OUTLAST_TEST_IMAGE"], "--cpu", "200m", "--memory", "1500Mi")
    with running(namespace, *options) as command:
        found = command.url()
        port, token = int(found[1]), found[2]
        assert "outlast | StatefulSet notebook created" in command.said
        assert answer(port, "/api/contents") == 403
        assert answer(port, f"/api/contents?token={'0' * 64}") == 403
        assert answer(port, "/lab") == 302, "to the page that asks for the token"
        assert "first.ipynb" in contents(port, token)

        def inside(script: str) -> str:
            return namespace.kubectl("exec", "notebook-0", "--", "sh", "-c", script, fails=True)

        inside("echo precious > work.txt; mkdir -p job")
        inside(f"cat > job/job.yaml <<'END'\n{JOB}END")
        assert "no job" in inside("cd /tmp && outlast list 2>&1")
        made = inside("cd job && outlast submit job.yaml --as indexed-job --dry-run 2>&1")
        assert re.search(r"^Job train\S* would be created$", made, re.MULTILINE), made
        prepared = inside(
            "mkdir src && cp job/job.yaml src/a.py && outlast data prepare text $PWD/src --to $PWD/tokens --engine spark "
            f"--master k8s://https://kubernetes.default.svc --claim notebook-work:{notebook.HOME} --image {options[1]} "
            "--conf spark.executor.instances=1 --conf spark.kubernetes.executor.request.cores=100m --follow 2>&1; echo ended $?"
        )
        assert "wrote train" in prepared, prepared
        assert prepared.endswith("ended 0\n"), prepared
        account = f"system:serviceaccount:{namespace.name}:notebook"
        for verb, resource in (("get", "secrets"), ("list", "secrets"), ("create", "rolebindings"), ("create", "pods/exec")):
            said = namespace.kubectl("auth", "can-i", verb, resource, f"--as={account}", fails=True)
            assert said.strip() == "no", (verb, resource)
        read = "import outlast.kube as k\nc = k.connect()\nc.list_(k.SECRET)"
        assert "may not list secrets" in inside(f"python3 -c '{read}' 2>&1")
        assert inside("ps ax -o args 2>/dev/null || cat /proc/[0-9]*/cmdline | tr '\\0' ' '").count(token) == 0
        assert inside("cat /proc/1/environ").count(token) == 0

        uid = namespace.kubectl("get", "pod", "notebook-0", "-o", "jsonpath={.metadata.uid}")
        namespace.kubectl("delete", "pod", "notebook-0")
        namespace.wait(lambda: any("it is ready again" in line for line in command.said), lambda: "\n".join(command.said))
        assert namespace.kubectl("get", "pod", "notebook-0", "-o", "jsonpath={.metadata.uid}") != uid
        assert {"work.txt", "first.ipynb"} <= set(contents(port, token))
        assert inside("cat work.txt") == "precious\n"
        assert command.end() == 0
    assert any("the notebook goes on; open it with: outlast notebook --on kubernetes" in line for line in command.said)
    with running(namespace) as again:
        assert again.url()[2] == token
        assert "outlast | StatefulSet notebook exists and is used as it is" in again.said
        assert again.end() == 0
    with running(namespace, "--stop") as stopping:
        assert stopping.process.wait(60) == 0
    namespace.kubectl("wait", "--for=delete", "pod/notebook-0", "--timeout=90s")
    left = namespace.kubectl("get", "statefulset,service,secret,role,rolebinding,pvc", "-o", "name")
    kept = [each for each in left.split() if not each.endswith("/spark")]  # whose jobs may go on
    assert kept == ["persistentvolumeclaim/notebook-work"]
    with running(namespace, "--delete", "--yes") as deleting:
        assert deleting.process.wait(60) == 0


def test_a_notebook_of_kubeflow_is_accepted_by_its_definition(namespace: Namespace) -> None:
    definition = PUBLISHED / "kubeflow.org_notebooks.yaml"
    namespace.kubectl("apply", "--server-side", "-f", str(definition))
    try:
        served = ("get", kinds.NOTEBOOK.resource, "-o", "name")
        namespace.wait(lambda: subprocess.run(["kubectl", *served], capture_output=True, check=False).returncode == 0, str)
        wanted = notebook.Wanted("mine", namespace.name, gpus=1, secrets=("aws",))
        documents = notebook.documents(wanted, kubeflow=True)
        namespace.apply(rbac.notebook(namespace.name, {}))
        for document in documents:
            namespace.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", given=document)
        (own,) = (each for each in documents if each["kind"] == "Notebook")
        namespace.kubectl("create", "--validate=strict", "-f", "-", given=own)
        kept: Document = json.loads(namespace.kubectl("get", kinds.NOTEBOOK.resource, "mine", "-o", "json"))
        assert (
            kept["spec"]["template"]["spec"]["containers"][0]["args"] == own["spec"]["template"]["spec"]["containers"][0]["args"]
        )
        template = {**own["spec"]["template"], "metadata": {"name": "mine-0"}}
        namespace.kubectl("create", "--dry-run=server", "-f", "-", given={"apiVersion": "v1", "kind": "Pod", **template})
    finally:
        namespace.kubectl("delete", "crd", kinds.NOTEBOOK.resource, "--wait=true")
