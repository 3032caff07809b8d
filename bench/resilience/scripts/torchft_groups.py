"""torchft: replica groups of one rank, which copy the state from each other. After its train_ddp.py.

Gradients are averaged by `Manager.allreduce`: in the DistributedDataParallel of 0.2.0 a collective that fails later ends in an
AssertionError, so survivors would end, too, and begin again at step 0.
"""

import itertools
import os

import torch
from torch.utils.data import DataLoader
from torchft import Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft.data import DistributedSampler

from body import BACKEND, LR, PART, TIMEOUT, WORKERS, Data, Net, say

group = int(os.environ["REPLICA_GROUP_ID"])
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=LR)


def load(state):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=(ProcessGroupNCCL if BACKEND == "nccl" else ProcessGroupGloo)(timeout=TIMEOUT),
    load_state_dict=load,
    state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=int(os.environ["MIN_REPLICAS"]),
    timeout=TIMEOUT,
    hostname=os.environ["MASTER_ADDR"],
    replica_id=f"group_{group}",
)
together = Optimizer(manager, optimizer)
data = Data()
sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=WORKERS, group_rank=0, num_replicas=1)
loader = DataLoader(data, batch_size=PART, sampler=sampler)
at, batches = -1, iter(())
while True:
    together.zero_grad()  # begins the quorum
    if manager.current_step() != at:  # at the start, and after the state of another group was copied
        at = manager.current_step()
        epoch, done = divmod(at, len(loader))
        sampler.set_epoch(epoch)
        batches = itertools.islice(loader, done, None)
    net(**next(batches))["loss"].backward()
    for work in [manager.allreduce(parameter.grad) for parameter in net.parameters()]:
        work.wait()
    taken, counted = manager.current_step(), manager.is_participating()
    together.step()
    if manager.current_step() > taken:
        if not counted:
            net.seen.clear()  # its gradient was not used: it was copying the state
        say(manager.current_step(), net, group, manager.num_participants())
        at = at + 1 if at == taken and (at + 1) % len(loader) else -1
    else:  # an error: the same batch again
        net.seen.clear()
        at = -1
