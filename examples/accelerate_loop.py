"""A loop of your own with Accelerate that resumes where it was: each sample once in each epoch, whatever is killed.

outlast run --workers 2 examples/accelerate_loop.py
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.training import progress

EPOCHS, EVERY, STATES = int(sys.argv[1]) if len(sys.argv) > 1 else 4, 10, Path("states")


class Position:
    """Where the loop is, saved and loaded with the rest."""

    epoch = batch = step = 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "batch": self.batch, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


config = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of an epoch depends on seed and epoch alone
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=config)
torch.manual_seed(0)
x = torch.randn(2000, 16)
dataset = TensorDataset(torch.arange(2000), x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(dataset, batch_size=16, shuffle=True))
at = Position()
accelerator.register_for_checkpointing(at)
whole = [path for path in sorted(STATES.glob("step-*")) if path.suffix != ".partial"]
if whole:
    accelerator.load_state(str(whole[-1]))
    accelerator.print(f"goes on from step {at.step}")


def save() -> None:
    """Several files, so under a temporary name until all ranks have written theirs."""
    place = STATES / f"step-{at.step:08d}"
    accelerator.save_state(f"{place}.partial")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(f"{place}.partial", place)
    accelerator.wait_for_everyone()


while at.epoch < EPOCHS:
    loader.set_epoch(at.epoch)  # before the batches that were seen are skipped
    for _samples, inputs, targets in accelerator.skip_first_batches(loader, at.batch):
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        at.batch, at.step = at.batch + 1, at.step + 1
        progress(at.step, EPOCHS * len(loader))
        if at.step % EVERY == 0:
            save()
    at.epoch, at.batch = at.epoch + 1, 0
accelerator.print(f"trained {at.step} steps, loss {loss.item():.4f}")
