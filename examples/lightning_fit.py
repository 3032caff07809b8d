"""Lightning's Trainer, which continues exactly with whatever number of workers.

outlast run --workers 2 examples/lightning_fit.py [EPOCHS]
"""

import hashlib
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast.lightning


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
x = torch.randn(2000, 16)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = Regression()
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 4
trainer = L.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, **outlast.lightning.world())
outlast.lightning.attach(trainer, batch=32)
trainer.fit(model, loader)
if trainer.is_global_zero:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
