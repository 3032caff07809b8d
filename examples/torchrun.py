"""A torchrun script that saves and resumes at the exact step, with nothing of Outlast in it.

torchrun --nproc-per-node 2 examples/torchrun.py --steps 2000
outlast run examples/torchrun.yaml
"""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--save-every", type=int, default=100, help="steps")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
args = parser.parse_args()

told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))  # leave after this step; you have `interruption.grace`

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(4096, 32)
y = (x @ torch.randn(32, 1)).tanh()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

step = 0
if os.path.exists("checkpoint.pt"):  # the working directory is in the output of the job, so the file is there after a restart
    saved = torch.load("checkpoint.pt")
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
    leave = torch.tensor(len(told))
    dist.all_reduce(leave)  # all ranks save and leave after the same step, whichever was told first
    if rank == 0 and (leave or step % args.save_every == 0 or step == args.steps):
        torch.save({"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "checkpoint.pt.tmp")
        os.replace("checkpoint.pt.tmp", "checkpoint.pt")  # a crash leaves the old file or the new one
        print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
    if leave:
        dist.barrier()  # wait until rank 0 has saved
        sys.exit(75)  # "saved, start me again"; it never counts as a failure

dist.destroy_process_group()
