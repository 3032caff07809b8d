"""A torchrun script like many: DDP on the CPU, its own checkpoint, nothing of Outlast in it.

Every worker keeps the checkpoint, and all go on from the newest that one of them has: no disk has to be shared.

torchrun --nproc-per-node 2 examples/train.py --steps 2000
outlast run examples/own-script.yaml
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--save-every", type=int, default=100, help="steps")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for who wants to look on")
parser.add_argument("--out", default="out", help="directory of the checkpoint")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
x = torch.randn(4096, 32)
y = (x @ torch.randn(32, 1)).tanh()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

step = 0
path = os.path.join(args.out, "last.pt")


def keep(state: dict) -> None:
    """Write the checkpoint of this worker. Whoever dies here leaves the old file or the new one."""
    if os.environ["LOCAL_RANK"] == "0":
        os.makedirs(args.out, exist_ok=True)
        torch.save(state, f"{path}.{rank}")
        os.replace(f"{path}.{rank}", path)


saved = torch.load(path) if os.path.exists(path) else {"step": 0}
steps = [0] * world
dist.all_gather_object(steps, saved["step"])
if newest := max(steps):
    shared = [saved]
    dist.broadcast_object_list(shared, src=steps.index(newest))
    saved = shared[0]
    keep(saved)  # whoever had it may be the next to go
    net.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    print(f"rank {rank} of {world} goes on from step {step}", flush=True)

while step < args.steps:
    i = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step * world + rank))
    loss = nn.functional.mse_loss(net(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(args.pause)
    if step % args.save_every and step != args.steps:
        continue
    keep({"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
