"""DLRover: every step is saved to the memory of its agents, and its sampler goes on at the sample where it was."""

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from body import BACKEND, DIRECTORY, EVERY, LR, PART, TIMEOUT, Data, Net, say

dist.init_process_group(BACKEND, timeout=TIMEOUT)
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
data = Data()
sampler = ElasticDistributedSampler(data)
loader = DataLoader(data, batch_size=PART, sampler=sampler)
step = seen = 0
checkpointer, together = DdpCheckpointer(str(DIRECTORY / "flash")), PART * dist.get_world_size()
if state := checkpointer.load_checkpoint():
    state = state.get("model_states", state)
    step, seen = state["step"], state["seen"]
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.load_state_dict({"epoch": seen // len(data), "completed_num": seen % len(data)})
while True:
    epoch = seen // len(data)
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        step += 1
        seen += together
        say(step, net)
        state = {"step": step, "seen": seen, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY if step % EVERY else StorageType.DISK)
    seen = (epoch + 1) * len(data)
