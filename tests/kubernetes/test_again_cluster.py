"""A run goes on in a cluster after a bug is mended.

KUBECONFIG=... OUTLAST_TEST_IMAGE=outlast:test OUTLAST_TEST_STORE=s3://bucket/tests AWS_ENDPOINT_URL=...
pytest -m cluster tests/kubernetes/test_again_cluster.py

The store is one that pods reach; its AWS_* variables are theirs, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from namespaces import Namespace
from outlast.kubernetes.api import kinds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
STORE = os.environ.get("OUTLAST_TEST_STORE", "")
EXAMPLES = Path(__file__).parents[2] / "examples"
OUTLAST = str(Path(sys.executable).with_name("outlast"))


class User:
    def __init__(self, directory: Path, namespace: Namespace, script: str, args: list[str]) -> None:
        if not STORE:
            pytest.skip("OUTLAST_TEST_STORE is not set")
        self.script = directory / "train.py"
        self.script.write_text((EXAMPLES / script).read_text())
        name = f"store-{uuid.uuid4().hex[:8]}"
        keys = [f"--from-literal={key}={value}" for key, value in os.environ.items() if key.startswith("AWS_")]
        namespace.kubectl("create", "secret", "generic", name, *keys)
        fields = {"script": "train.py", "args": args, "image": os.environ["OUTLAST_TEST_IMAGE"], "workers": {"replicas": 2}}
        fields |= {"checkpoint": {"every": "10 steps"}, "restarts": {"limit": 3}, "secrets": [{"name": name}]}
        fields["output"] = f"{STORE}/{uuid.uuid4().hex[:8]}"
        document = kinds.ELASTIC_JOB.document({"name": f"mine-{name}"}, spec=fields)
        (directory / "job.yaml").write_text(yaml.safe_dump(document))
        self._directory, self._namespace = directory, namespace

    def submit(self, topology: str) -> str:
        words = ["submit", "job.yaml", "--as", topology, "-n", self._namespace.name, "--follow"]
        done = subprocess.run([OUTLAST, *words], cwd=self._directory, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr


@pytest.mark.parametrize("topology", ["elasticjob", "indexed-job"])
def test_a_mended_script_goes_on_and_ends_with_the_weights_of_the_undisturbed_run(
    namespace: Namespace, tmp_path: Path, topology: str
) -> None:
    user = User(tmp_path, namespace, "exact.py", ["--epochs=4"])
    whole = user.script.read_text()
    user.script.write_text(whole.replace("step += 1\n", 'step += 1\n        if step == 13: raise ValueError("bad batch")\n'))
    failed = user.submit(topology)
    assert ": Failed: " in failed
    assert "ValueError: bad batch" in failed
    user.script.write_text(whole)
    again = user.submit(topology)
    assert "has failed; its run goes on from its newest checkpoint" in again
    assert ": Succeeded" in again
    assert "outlast: step 11 of " in again
    weights = re.findall(r"step \d+, weights (\w+)", again)
    assert weights == [_undisturbed(tmp_path)]


def _undisturbed(directory: Path) -> str:
    words = ["run", "--workers", "2", "--name", "undisturbed", "train.py", "--epochs=4"]
    done = subprocess.run([OUTLAST, *words], cwd=directory, capture_output=True, text=True, check=True)
    return re.findall(r"step \d+, weights (\w+)", done.stdout)[0]
