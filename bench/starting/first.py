"""The script of `bench/start.py`: one small network under DDP, and notes of what it has done.

Under `outlast` it uses a session, under torchrun torch alone.
"""

import os
import time

from sitecustomize import note

note("script")
import torch  # noqa: E402 (what came before is to be timed without it)

note("script imported torch")
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
inputs = torch.ones(8, 64)


def train(model, optimizer, step):
    model(inputs).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    note(f"step {step}")


if "OUTLAST_RUN" in os.environ:
    from outlast.training import Stream, session

    note("script imported session")
    with session.open(seed=0) as run:
        note("group")
        net = run.ddp(network)
        optimizer = torch.optim.AdamW(net.parameters())
        stream = Stream((torch.arange(4096),), 2, seed=1, steps=2000, epochs=10**6)
        step = run.resume({"net": net, "optimizer": optimizer, "stream": stream})
        note("resumed")
        for _batch in stream:
            step += 1
            train(net, optimizer, step)
            run.log(step)
            if run.interrupted() or run.due(step):
                run.save(step)
            time.sleep(0.05)
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    note("group")
    net = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(net.parameters())
    note("resumed")
    for step in range(1, 2000):
        train(net, optimizer, step)
        time.sleep(0.05)
