"""Training with a library's Trainer in `session.run`: `trainers.py hf|lightning STEPS`. Writes the hash of the final weights."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import outlast.hf
import outlast.lightning
from outlast.training import session

STEPS = int(sys.argv[2])
BATCH = 12
X = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def hf() -> nn.Module:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "trainer", max_steps=STEPS, per_device_train_batch_size=4, save_strategy="no", report_to="none", use_cpu=True
    )
    net = Net()
    trainer = Trainer(net, args, train_dataset=[{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)])
    outlast.hf.attach(trainer, batch=BATCH)
    trainer.train()
    return net


def lightning() -> nn.Module:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4, shuffle=True)
    world = outlast.lightning.world()
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, **world)
    outlast.lightning.attach(trainer, batch=BATCH)
    trainer.fit(module, loader)
    return module


def train() -> None:
    net = {"hf": hf, "lightning": lightning}[sys.argv[1]]()
    if os.environ["RANK"] == "0":
        weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
        (Path(os.environ["OUTLAST_OUTPUT"]) / "final.json").write_text(json.dumps({"weights": weights}))


session.run(train)
