"""The script of the guide to Hugging Face trains, and goes on where it was after a worker is killed. Needs transformers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.base.backoff import RANDOM
from outlast.job.status import State
from outlast.local.backend import LocalBackend
from waits import until

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "hugging-face.md"


@pytest.mark.slow
@pytest.mark.jobs
def test_the_trainer_of_the_guide_goes_on_from_its_newest_checkpoint_and_saves_when_it_is_suspended(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    program = "from outlast import cli; cli.main('run --detach --workers 2 train.py 1000'.split())"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    backend = LocalBackend(tmp_path / ".outlast")
    output = backend.output("train") / "work" / "trainer"
    try:
        until(lambda: (output / "checkpoint-100" / "trainer_state.json").exists(), within_s=180)
        backend.chaos("train", "kill-worker", worker=1, rng=RANDOM)
        until(lambda: backend.status("train").restarts == 1 and backend.status("train").state is State.RUNNING, within_s=180)
        newest = max(int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*"))
        until(lambda: (output / f"checkpoint-{newest + 60}").exists(), within_s=180)
        told = time.time()
        backend.steer("train", "suspend")
        until(lambda: backend.status("train").state is State.SUSPENDED, within_s=180)
        assert max(path.stat().st_mtime for path in output.glob("checkpoint-*/trainer_state.json")) > told, (
            "it saves when told to leave"
        )
        backend.resume("train")
        until(lambda: backend.status("train").state is State.SUCCEEDED, within_s=180)
        assert (output / "final" / "model.safetensors").exists()
    finally:
        if not backend.status("train").state.final:
            backend.steer("train", "cancel")


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "script"), [("accelerate", "accelerate_loop"), ("lightning", "lightning_fit")])
def test_the_script_of_a_library_goes_on_after_a_kill_and_reads_each_sample_once_in_each_epoch(
    tmp_path: Path, package: str, script: str
) -> None:
    """Each worker notes the samples of a step; a step that was done twice counts as it was done last."""
    pytest.importorskip(package)
    text = (EXAMPLES / f"{script}.py").read_text()
    noted = 'print(f"step {at.step} epoch {at.epoch} samples {_samples.tolist()}", flush=True); __import__("time").sleep(0.02)'
    noted += "\n        loss = nn"
    (tmp_path / "train.py").write_text(text.replace("loss = nn", noted))
    program = "from outlast import cli; cli.main('run --detach --workers 2 train.py'.split())"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    backend = LocalBackend(tmp_path / ".outlast")
    try:
        until(lambda: (backend.status("train").step or 0) >= 75, within_s=240)
        backend.chaos("train", "kill-worker", worker=1, rng=RANDOM)
        until(lambda: backend.status("train").state is State.SUCCEEDED, within_s=240)
        status = backend.status("train")
        assert (status.restarts, status.step, status.steps) == (1, 252, 252)
    finally:
        if not backend.status("train").state.final:
            backend.steer("train", "cancel")
    if package != "accelerate":
        return
    seen: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for worker in (0, 1):
        log = (backend.output("train") / "logs" / f"worker-{worker}.log").read_text()
        for step, epoch, samples in re.findall(r"step (\d+) epoch (\d+) samples \[([\d, ]+)\]", log):
            seen[worker, int(step)] = int(epoch), [int(each) for each in samples.split(",")]
    for epoch in range(4):
        samples = sorted(sample for of, found in seen.values() if of == epoch for sample in found)
        assert set(samples) == set(range(2000))
        assert len(samples) - 2000 < 32, "the last batch is filled up, so that all ranks have as many"
