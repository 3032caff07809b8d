"""Torchrun script that does not use Outlast."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {world_size} starts", flush=True)
for _ in range(int(sys.argv[1])):
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == world_size
    time.sleep(0.05)
print(f"rank {rank} of {world_size} is done", flush=True)
dist.destroy_process_group()
