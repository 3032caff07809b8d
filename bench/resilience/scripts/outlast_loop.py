"""Outlast with a loop of one's own."""

import torch

from body import BATCH, LR, Data, Net, say
from outlast.training import Stream, session

with session.open(seed=0, quiet=True) as run:
    net = Net()
    model = run.ddp(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    stream = Stream(Data(), batch=BATCH, epochs=1000)
    step = run.resume({"model": model, "optimizer": optimizer, "stream": stream})
    for batch in stream:
        optimizer.zero_grad()
        for part, share in batch.split(model):
            (model(**part)["loss"] * share).backward()
        optimizer.step()
        step += 1
        say(step, net)
        run.log(step)
        if run.interrupted() or run.due(step):
            run.save(step)
