"""A loop with Accelerate that continues exactly, whatever is killed and however many workers there are.

outlast run --workers 2 examples/accelerate_loop.py
"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast.accelerate

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
x = torch.randn(2000, 16)
dataset = TensorDataset(torch.arange(2000), x, x.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(dataset, batch_size=16, shuffle=True))
run = outlast.accelerate.attach(accelerator, batch=32, epochs=EPOCHS)
for _epoch in run.epochs():
    for _samples, inputs, targets in loader:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in accelerator.unwrap_model(net).parameters())
if accelerator.is_main_process:  # accelerator.print would print once for each worker
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
