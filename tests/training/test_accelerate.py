"""`outlast.accelerate.attach`: a loop that is killed continues with the same samples and weights. Needs accelerate.

All starts are in one process. A kill is an exception in the loop. Nothing of the interrupted start is used but its checkpoints.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from outlast.base.errors import OutlastError
from outlast.job.contract import Env

accelerate = pytest.importorskip("accelerate")

import outlast.accelerate  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("a_checkpoint_of_each_step"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
]
SAMPLES, EPOCHS, BATCH = 22, 2, 4
STEPS = 6
"""Optimizer steps of an epoch."""


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index] + 0.1 * torch.randn(4), self.x[index].sum()[None]


def collate(rows: list[Any]) -> Any:
    indices, x, y = zip(*rows, strict=True)
    return list(indices), torch.stack(x) * (torch.rand(4) > 0.2), torch.stack(y) * random.choice([1, 2])


class Killed(Exception):
    pass


class Loop:
    """A script's loop; it raises Killed when it has begun `kill` steps, or in the evaluation after the epoch `evaluate`."""

    def __init__(self, directory: Path, **loader: Any) -> None:
        self.directory = directory
        torch.manual_seed(0)
        self.accelerator: Any = accelerate.Accelerator(cpu=True)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=EPOCHS * STEPS)
        options = {"batch_size": 2, "shuffle": True, "collate_fn": collate} | loader
        prepared = self.accelerator.prepare(self.net, self.optimizer, DataLoader(Data(), **options), self.schedule)
        self.net, self.optimizer, self.loader, self.schedule = prepared
        self.read: list[int] = []
        self.evaluated: list[int] = []

    def attach(self, **options: Any) -> outlast.accelerate.Run:
        arguments = {"batch": BATCH, "epochs": EPOCHS, "output": self.directory} | options
        return outlast.accelerate.attach(self.accelerator, **arguments)

    def train(self, kill: int | None = None, evaluate: int | None = None) -> outlast.accelerate.Run:
        run = self.attach()
        self.resumed = run.steps
        for epoch in run.epochs():
            for indices, x, y in self.loader:
                if run.steps == kill:
                    raise Killed
                self.read += indices
                with self.accelerator.accumulate(self.net):
                    loss = nn.functional.mse_loss(self.net(x), y)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                    run.step(loss=loss)
            if epoch == evaluate:
                raise Killed
            self.evaluated.append(epoch)
        return run

    def outcome(self) -> tuple[list[bytes], list[float], int]:
        weights = [parameter.detach().numpy().tobytes() for parameter in self.net.parameters()]
        return weights, self.schedule.get_last_lr(), self.schedule.scheduler.last_epoch


def test_a_loop_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole")
    assert whole.train().total_steps == EPOCHS * STEPS
    for at in ({"kill": 3}, {"kill": 5}, {"evaluate": 0}, {"kill": 9}, {"evaluate": 1}):
        killed = Loop(tmp_path / "killed")
        with pytest.raises(Killed):
            killed.train(**at)
    last = Loop(tmp_path / "killed")
    run = last.train()
    assert (last.outcome(), run.steps) == (whole.outcome(), EPOCHS * STEPS)
    assert last.evaluated == list(range(last.resumed // STEPS, EPOCHS)), "an epoch's end is done again, with its last step"
    assert 0 < last.resumed < run.total_steps
    assert last.read == whole.read[-len(last.read) :]
    assert sorted(whole.read[:SAMPLES]) == list(range(SAMPLES))
    assert whole.read[SAMPLES : STEPS * BATCH] == whole.read[:2], "filled up from the beginning of the epoch"


def test_a_run_that_is_killed_in_its_second_epoch_continues_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, f"{STEPS + 2} steps")
    killed = Loop(tmp_path)
    with pytest.raises(Killed):
        killed.train(kill=STEPS + 3)
    last = Loop(tmp_path)
    last.train()
    assert last.resumed == STEPS + 2
    second_epoch = killed.read[STEPS * BATCH : last.resumed * BATCH] + last.read
    assert second_epoch != killed.read[: STEPS * BATCH]
    assert sorted(second_epoch[:SAMPLES]) == list(range(SAMPLES))


def test_the_order_is_that_of_the_loader_and_the_last_batch_is_left_out_if_it_says_so(tmp_path: Path) -> None:
    loop = Loop(tmp_path, shuffle=False, drop_last=True)
    run = loop.train()
    assert loop.read == [*range(20)] * EPOCHS
    assert run.steps == run.total_steps == 5 * EPOCHS


def test_what_is_registered_for_checkpointing_is_restored_too(tmp_path: Path) -> None:
    class Counted:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    loop, counted = Loop(tmp_path), Counted()
    loop.accelerator.register_for_checkpointing(counted)
    counted.value = 41
    loop.train()
    later, restored = Loop(tmp_path), Counted()
    later.accelerator.register_for_checkpointing(restored)
    later.attach()
    assert restored.value == 41


def test_what_cannot_continue_exactly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sentence: str, loop: Loop, **options: Any) -> None:
        with pytest.raises(OutlastError, match=sentence):
            loop.attach(**options)

    refused(r"batch \(0\) must be a whole number of 1 or more", Loop(tmp_path), batch=0)
    refused("loader is not prepared; give what accelerator.prepare has returned", Loop(tmp_path), loader=DataLoader(Data()))
    unprepared = Loop(tmp_path)
    unprepared.accelerator._models.clear()
    refused("nothing is prepared yet; call attach after accelerator.prepare", unprepared)
    several = Loop(tmp_path)
    several.accelerator.prepare(DataLoader(Data()))
    refused("2 loaders are prepared; name the one of training samples: loader=loader", several)
    other = Loop(tmp_path)
    del other.accelerator._custom_objects
    version = accelerate.__version__
    refused(f"accelerate {version} has no Accelerator._custom_objects, which Outlast relies on; tested: ", other)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    refused(r"2 processes train models of their own; without GPUs write Accelerator\(cpu=True\)", Loop(tmp_path))
    monkeypatch.undo()
    loop = Loop(tmp_path)
    loop.attach()
    refused("this accelerator is attached already", loop)
    with pytest.raises(OutlastError, match=r"accelerator.load_state\(\) would undo what outlast.accelerate.attach has restored"):
        loop.accelerator.load_state("states")
