"""The lines of the page about the first job in a cluster run there, one after another.

KUBECONFIG=... OUTLAST_TEST_TORCH_IMAGE=torch:1 OUTLAST_TEST_STORE=s3://bucket/tests AWS_ENDPOINT_URL=...
pytest -m cluster tests/kubernetes/test_first_job_cluster.py

The cluster has the operator. The image has PyTorch and no Outlast; the default is OUTLAST_TEST_IMAGE. The store is one that pods
reach; its AWS_* variables are theirs, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from outlast.storage import store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "first-cluster-job.md").read_text()
STORE = os.environ.get("OUTLAST_TEST_STORE", "")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)


def test_each_line_of_the_page_runs_and_nothing_is_left(tmp_path: Path) -> None:
    if not STORE:
        pytest.skip("OUTLAST_TEST_STORE is not set")
    name, output = f"first-{uuid.uuid4().hex[:6]}", f"{STORE}/{uuid.uuid4().hex[:8]}"
    (job,) = blocks("yaml")
    image = os.environ.get("OUTLAST_TEST_TORCH_IMAGE") or os.environ["OUTLAST_TEST_IMAGE"]
    job = re.sub(r"(?m)^  image: .*", f"  image: {image}", job).replace("s3://my-bucket/runs", output)
    (tmp_path / "job.yaml").write_text(job)
    shutil.copy(ROOT / "examples" / "exact.py", tmp_path)
    keys = " ".join(f"--from-literal={key}={value}" for key, value in os.environ.items() if key.startswith("AWS_"))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in "".join(blocks("sh")).splitlines():
        if line.startswith(("outlast doctor", "outlast install")):
            continue  # tests of their own; the namespace comes after them
        line = re.sub(r"--from-literal=.*", lambda _: keys, line).replace("s3://my-bucket/runs", output)
        line = re.sub(r"(-n |namespace )first\b", lambda found: f"{found[1]}{name}", line)
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "exact" / "model.pt").exists()
    assert (tmp_path / "exact.pt").exists()
    assert list(store.open_(output).entries()) == []
