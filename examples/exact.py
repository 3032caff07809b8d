"""A training loop that resumes exactly: killed on the way or not, as many ranks end with the same bits.

outlast run examples/exact-resume.yaml
torchrun --nproc-per-node 2 examples/exact.py
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F

from outlast.training import Stream, session

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()

with session.open(seed=0) as run:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)

    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)).to(run.device)
    net = run.ddp(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    stream = Stream((x, y), batch=128, seed=0, epochs=args.epochs)  # 128 over all ranks, in an order that stays

    step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})  # 0, or the newest checkpoint's
    for batch in stream:
        optimizer.zero_grad()
        for (x_, y_), share in batch.split(net):  # this rank's part of the batch
            loss = F.cross_entropy(net(x_), y_)
            (loss * share).backward()
        optimizer.step()
        step += 1
        run.log(step, loss=loss.detach())
        leaving = run.interrupted()  # all ranks agree
        if leaving or run.due(step):
            run.save(step)  # does not wait for the disk; when leaving, it does, and exits

    run.export(model)  # model.pt in run.output, for torch.load(path, weights_only=True)
    if run.rank == 0:
        bits = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
        print(f"step {step}, weights {hashlib.sha256(bits).hexdigest()[:16]}")
