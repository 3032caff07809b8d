"""Lightning's Trainer, which resumes from its last checkpoint and reports its steps.

outlast run --workers 2 examples/lightning_fit.py
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from outlast.training import progress


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Steps(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        progress(trainer.global_step, int(trainer.estimated_stepping_batches))


L.seed_everything(0)
x = torch.randn(2000, 16)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
trainer = L.Trainer(
    max_epochs=4,
    accelerator="auto",
    strategy="ddp",
    devices=processes,
    num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // processes,  # another number of workers after a restart, perhaps
    callbacks=[ModelCheckpoint("lightning", save_last=True, every_n_train_steps=10), Steps()],
)
last = "lightning/last.ckpt"
trainer.fit(Regression(), loader, ckpt_path=last if os.path.exists(last) else None)
