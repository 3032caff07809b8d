"""The scripts of the guide to libraries: struck and suspended, they end with the undisturbed weights."""

from __future__ import annotations

import collections
import functools
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outlast import order
from outlast.base.backoff import RANDOM
from outlast.job.contract import Env
from outlast.job.status import State
from outlast.job.workerfiles import progress_file
from outlast.local.backend import LocalBackend
from waits import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "guide" / "hugging-face.md"


def of_the_guide() -> str:
    script = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    return script[1]


SCRIPTS: dict[str, tuple[str, Callable[[], str], int]] = {
    "Trainer": ("transformers", of_the_guide, 600),
    "Accelerate": ("accelerate", (EXAMPLES / "accelerate_loop.py").read_text, 10),
    "Lightning": ("lightning", (EXAMPLES / "lightning_fit.py").read_text, 30),
}
"""The library, the script, and its argument, which makes it run for about a minute."""


def run(directory: Path, argument: object, *options: str) -> LocalBackend:
    program = f"from outlast import cli; cli.main({['run', '--detach', *options, 'train.py', str(argument)]!r})"
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True)
    return LocalBackend(directory / ".outlast")


def finished(backend: LocalBackend) -> str:
    """The weights that rank 0 has printed at the end."""
    until(lambda: backend.status("train").state.final, within_s=240)
    assert backend.status("train").state is State.SUCCEEDED
    return printed("".join(path.read_text() for path in (backend.output("train") / "logs").glob("worker-*.log")))


def printed(text: str) -> str:
    [weights] = re.findall(r"weights (\w{64})", text)
    return str(weights)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The weights of a script that two workers run, by its name in SCRIPTS."""

    @functools.cache
    def weights(name: str) -> str:
        directory = tmp_path_factory.mktemp(name)
        return finished(run(written(directory, name), SCRIPTS[name][2], "--workers", "2"))

    return weights


def written(directory: Path, name: str) -> Path:
    """The directory, with the script."""
    package, script, _ = SCRIPTS[name]
    pytest.importorskip(package)
    (directory / "train.py").write_text(script())
    return directory


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_struck_and_suspended_ends_with_the_undisturbed_weights(
    tmp_path: Path, name: str, undisturbed: Callable[[str], str]
) -> None:
    backend = run(written(tmp_path, name), SCRIPTS[name][2], "--workers", "2")
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
        assert finished(backend) == undisturbed(name)
    finally:
        if not backend.status("train").state.final:
            backend.steer("train", "cancel")


KILLS = 5


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_under_plain_torchrun_a_script_that_is_killed_ends_with_the_undisturbed_weights(
    tmp_path: Path, name: str, undisturbed: Callable[[str], str]
) -> None:
    """Processes are killed at random steps; torchrun starts both again, and training continues from checkpoints on the disk."""
    rng = random.Random(name)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", Env.CHECKPOINT_EVERY: "5 steps", Env.STATE: str(tmp_path)}
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch #135712: else ranks connect to processes that were killed
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", str(SCRIPTS[name][2])]
    killed: set[int] = set()

    def reached(rank: int, step: int) -> progress_file.Progress | None:
        """The progress of a process that we have not killed yet, once it trains and has reached the step."""
        found = progress_file.read(tmp_path, rank)
        return found if found and found.pid not in killed and found.phase == "train" and found.step >= step else None

    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            command, cwd=written(tmp_path, name), env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for step in sorted(rng.sample(range(10, 500), KILLS)):
            rank = rng.randrange(2)
            victim = until(
                lambda rank=rank, step=step: job.poll() is not None or reached(rank, step), 240, (tmp_path / "log").read_text
            )
            assert job.poll() is None, (tmp_path / "log").read_text()
            os.kill(victim.pid, signal.SIGKILL)
            killed.add(victim.pid)
        assert job.wait(240) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            job.terminate()  # with its processes
            job.wait(60)
    assert len(killed) == KILLS
    assert printed((tmp_path / "log").read_text()) == undisturbed(name)


SAMPLES, BATCH, EPOCHS = 240, 8, 20
NOTED = f"""
import os, sys, time
from pathlib import Path
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        return {{"index": index, "x": torch.full((4,), index / {SAMPLES})}}

def note(step, indices):
    '''Write down a step's samples, slowly while the test changes the workers.'''
    with (Path(sys.argv[1]) / f"samples-{{os.getpid()}}").open("a") as file:
        file.write(f"{{step}} {{os.environ['WORLD_SIZE']}} {{' '.join(map(str, indices.tolist()))}}\\n")
    if not (Path(sys.argv[1]) / "hurry").exists():
        time.sleep(0.1)
"""
"""The beginning of the scripts below, which write down the samples of their steps."""
NOTING = {
    "Trainer": f"""
import outlast.hf
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, index, x):
        note(trainer.state.global_step, index)
        return {{"loss": self.layer(x).square().mean()}}

options = {{"save_strategy": "no", "report_to": "none", "use_cpu": True, "seed": 0}}
args = TrainingArguments("trainer", num_train_epochs={EPOCHS}, per_device_train_batch_size=4, **options)
trainer = Trainer(Net(), args, train_dataset=Data())
outlast.hf.attach(trainer, batch={BATCH})
trainer.train()
""",
    "Accelerate": f"""
import accelerate
import outlast.accelerate

accelerator = accelerate.Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
run = outlast.accelerate.attach(accelerator, batch={BATCH}, epochs={EPOCHS})
for epoch in run.epochs():
    for batch in loader:
        with accelerator.accumulate(net):
            note(run.steps, batch["index"])
            accelerator.backward(net(batch["x"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.step()
""",
    "Lightning": f"""
import lightning
import outlast.lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        note(self.trainer.global_step, batch["index"])
        return self.layer(batch["x"]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = {{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}}
trainer = lightning.Trainer(max_epochs={EPOCHS}, accelerator="cpu", **options, **outlast.lightning.world())
outlast.lightning.attach(trainer, batch={BATCH}, seed=0)
trainer.fit(Net(), torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True))
""",
}


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTING)
def test_the_number_of_workers_changes_and_each_step_has_the_samples_of_every_other_world(tmp_path: Path, name: str) -> None:
    """From two workers to one, four and two."""
    pytest.importorskip(SCRIPTS[name][0])
    (tmp_path / "train.py").write_text(NOTED + NOTING[name])
    sizes = [option for size in ("min=1", "max=4") for option in ("--set", f"workers.{size}")]
    backend = run(tmp_path, str(tmp_path), "--workers", "2", *sizes)
    try:
        for replicas in (2, 1, 4, 2):
            if len(backend.status("train").world) != replicas:
                backend.scale("train", replicas)
            until(lambda n=replicas: len(backend.status("train").world) == n, 180)
            beyond = backend.status("train").step + 6
            until(lambda beyond=beyond: backend.status("train").step >= beyond, 180)
        (tmp_path / "hurry").touch()
        until(lambda: backend.status("train").state.final, 240)
        assert backend.status("train").state is State.SUCCEEDED
    finally:
        if not backend.status("train").state.final:
            backend.steer("train", "cancel")
    assert backend.status("train").restarts == 0
    steps: dict[int, list[int]] = collections.defaultdict(list)
    worlds: dict[int, int] = {}
    for path in tmp_path.glob("samples-*"):
        for step, ranks, *indices in (map(int, line.split()) for line in path.read_text().splitlines()):
            steps[step] += indices
            assert worlds.setdefault(step, ranks) == ranks
    sizes_in_turn = [worlds[step] for step in sorted(worlds) if worlds[step] != worlds.get(step - 1)]
    assert sizes_in_turn == [2, 1, 4, 2]
    per_epoch = SAMPLES // BATCH
    for epoch in range(EPOCHS):
        shuffled = order.permuted(np.arange(SAMPLES), SAMPLES, 0, epoch).reshape(per_epoch, BATCH)
        batches = [sorted(steps[epoch * per_epoch + step]) for step in range(per_epoch)]
        assert batches == np.sort(shuffled).tolist(), "no sample twice, none left out, the same global batches"
