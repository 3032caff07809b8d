"""Training loop with a session that only records times: `resized.py DIRECTORY [--keep]`.

Every rank appends `time pid rank world_size step` to DIRECTORY/steps when a step has ended. With --keep, processes go on in the
next world. A step is one forward and backward pass with an all-reduce, and a pause.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from outlast.training import Stream, session

book = os.open(Path(sys.argv[1]) / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def train() -> None:
    with session.open(quiet=True) as run:
        net = run.ddp(nn.Linear(32, 32))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        stream = Stream({"x": torch.randn(480, 32).numpy()}, 48, seed=1, epochs=10**6)
        step = run.resume({"net": net, "optimizer": optimizer, "stream": stream})
        for batch in stream:
            time.sleep(0.02)
            optimizer.zero_grad()
            for data, share in batch.split(net):
                (net(data["x"]).square().mean() * share).backward()
            optimizer.step()
            step += 1
            os.write(book, f"{time.time():.6f} {os.getpid()} {run.rank} {run.world_size} {step}\n".encode())
            if run.interrupted() or run.due(step):
                run.save(step)


session.run(train) if "--keep" in sys.argv else train()
