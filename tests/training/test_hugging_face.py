"""The scripts of the guide to libraries: struck and suspended, they end with the undisturbed weights."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.base.backoff import RANDOM
from outlast.job.status import State
from outlast.local.backend import LocalBackend
from waits import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "guide" / "hugging-face.md"


def of_the_guide() -> str:
    script = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert script is not None
    return script[1]


SCRIPTS: dict[str, tuple[str, Callable[[], str], int]] = {
    "Trainer": ("transformers", of_the_guide, 600),
    "Accelerate": ("accelerate", (EXAMPLES / "accelerate_loop.py").read_text, 10),
    "Lightning": ("lightning", (EXAMPLES / "lightning_fit.py").read_text, 30),
}
"""The library, the script, and its argument, which makes it run for about a minute."""


def run(directory: Path, argument: int, *options: str) -> LocalBackend:
    program = f"from outlast import cli; cli.main({['run', '--detach', *options, 'train.py', str(argument)]!r})"
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True)
    return LocalBackend(directory / ".outlast")


def finished(backend: LocalBackend) -> str:
    """The weights that rank 0 has printed at the end."""
    until(lambda: backend.status("train").state.final, within_s=240)
    assert backend.status("train").state is State.SUCCEEDED
    logs = "".join(path.read_text() for path in (backend.output("train") / "logs").glob("worker-*.log"))
    [weights] = re.findall(r"weights (\w{64})", logs)
    return str(weights)


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_struck_and_suspended_ends_with_the_undisturbed_weights(tmp_path: Path, name: str) -> None:
    package, script, argument = SCRIPTS[name]
    pytest.importorskip(package)
    for directory in ("calm", "struck"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "train.py").write_text(script())
    weights = finished(run(tmp_path / "calm", argument, "--workers", "2"))
    backend = run(tmp_path / "struck", argument, "--workers", "2")
    try:
        for n, action in enumerate(("kill-process", "kill-worker", "kill-process"), start=1):
            step = backend.status("train").step or 0
            until(lambda step=step: (backend.status("train").step or 0) >= step + 30, within_s=180)
            backend.chaos("train", action, worker=1, rng=RANDOM)
            until(lambda n=n: backend.status("train").restarts == n, within_s=180)
        until(lambda: backend.status("train").state is State.RUNNING, within_s=180)
        backend.steer("train", "suspend")
        until(lambda: backend.status("train").state is State.SUSPENDED, within_s=180)
        backend.resume("train")
        assert finished(backend) == weights
    finally:
        if not backend.status("train").state.final:
            backend.steer("train", "cancel")
