"""Scripts of the guide to libraries in real pods: struck five times and resized, they end with the weights of an undisturbed run.

The image is as for test_recipes_cluster.py. The undisturbed run is one of two workers on this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from namespaces import KILL_RANKS, OUTLAST, Namespace, status, trains, until, weights
from outlast.kubernetes.api import kinds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parents[2]
ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HOME": "/tmp"}


def trainer() -> str:
    """The script of the page, without dropout: another number of ranks draws other random numbers."""
    page = (ROOT / "docs" / "guide" / "hugging-face.md").read_text()
    script = re.search(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    assert script is not None
    return script[1].replace("GPT2Config(", "GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, ")


def accelerate_loop() -> str:
    return (ROOT / "examples" / "accelerate_loop.py").read_text().replace(" nn.Dropout(0.1),", "")


SCRIPTS: dict[str, tuple[Callable[[], str], int]] = {
    "trainer": (trainer, 9000),
    "accelerate": (accelerate_loop, 150),
    "lightning": ((ROOT / "examples" / "lightning_fit.py").read_text, 150),
}
"""The script and its argument, which makes it run for minutes. Their weights are the same on one rank and on two."""


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[[str, int], str]:
    def run(script: str, argument: int) -> str:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "train.py").write_text(script)
        words = ["run", "--workers=2", "train.py", str(argument)]
        done = subprocess.run(
            [OUTLAST, *words], cwd=tmp_path / "here", env=os.environ | ENV, capture_output=True, text=True, check=True
        )
        return weights(done.stdout)

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_pods_that_is_struck_five_times_and_resized_has_the_undisturbed_weights(
    namespace: Namespace, tmp_path: Path, undisturbed: Callable[[str, int], str], name: str
) -> None:
    script, argument = SCRIPTS[name]
    (tmp_path / "train.py").write_text(script())
    spec = {"script": "train.py", "code": str(tmp_path), "args": [str(argument)], "env": ENV}
    spec |= {"workers": {"replicas": 2, "min": 1, "max": 2}, "resources": {"cpu": "0.2", "memory": "2Gi"}}
    document = kinds.ELASTIC_JOB.document({"name": name}, spec=spec | {"image": os.environ["OUTLAST_TEST_IMAGE"]})
    (tmp_path / "job.json").write_text(json.dumps(document))
    done = subprocess.run([OUTLAST, "submit", "job.json", "-n", namespace.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    def step() -> int:
        return int(status(namespace, name).get("step") or 0)

    def goes_on(workers: int = 2, steps: int = 60) -> None:
        """Wait until such a world has trained further steps."""
        until(namespace, name, trains(workers), 400)
        after = step() + steps
        until(namespace, name, lambda found: trains(workers)(found) and (found.get("step") or 0) > after, 400)

    def a_rank_dies(worker: int) -> None:
        namespace.kubectl("exec", f"{name}-worker-{worker}", "--", "sh", "-c", KILL_RANKS, fails=True)

    goes_on()
    for strike in (
        lambda: a_rank_dies(1),
        lambda: namespace.kubectl("delete", "pod", f"{name}-worker-1", "--grace-period=0", "--force"),
        lambda: namespace.kubectl("exec", f"{name}-worker-0", "--", "sh", "-c", "kill -9 -1", fails=True),
        lambda: a_rank_dies(0),
        lambda: namespace.kubectl("delete", "pod", f"{name}-worker-0", "--wait=false"),
    ):
        strike()
        goes_on()
    for workers in (1, 2):
        namespace.kubectl("scale", f"ej/{name}", f"--replicas={workers}")
        goes_on(workers)
    until(namespace, name, lambda found: found.get("state") in ("Succeeded", "Failed"), 1200)
    assert status(namespace, name)["state"] == "Succeeded", namespace.logs(name)
    assert weights(namespace.logs(name)) == undisturbed(script(), argument)
