"""A sharded model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import nn

from outlast.job import contract
from outlast.training import Stream, session


def sharded(leave_at: int = 0) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with session.open(seed=1) as run:
        net = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
        fully_shard(net, mesh=init_device_mesh("cpu", (run.world_size,)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        stream = Stream((torch.arange(448.0).reshape(64, 7) / 448,), 8, steps=12, microbatch=2)
        step = run.resume({"net": net, "optimizer": optimizer, "stream": stream})
        for batch in stream:
            optimizer.zero_grad()
            for (x,), share in batch.split(net):
                (net(x).square().mean() * share).backward()
            optimizer.step()
            step += 1
            if step == leave_at:
                Path(os.environ[contract.Env.NOTICE]).write_text("{}")
            if run.interrupted() or run.due(step):
                run.save(step)
        sums = [parameter.full_tensor().sum().item() for parameter in net.parameters()]
        if run.rank == 0:
            (run.output / "sums").write_text(json.dumps(sums))
