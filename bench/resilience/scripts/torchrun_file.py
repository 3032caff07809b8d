"""torchrun with a file: rank 0 saves, everybody loads, and the data goes on at the sample where it was."""

import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from body import BACKEND, DIRECTORY, EVERY, LR, PART, TIMEOUT, Data, Net, say

dist.init_process_group(BACKEND, timeout=TIMEOUT)
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
data = Data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=PART, sampler=sampler)
step = seen = 0
kept, together = DIRECTORY / "checkpoint.pt", PART * dist.get_world_size()
if kept.exists():
    state = torch.load(kept, map_location="cpu")
    step, seen = state["step"], state["seen"]
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
while True:
    epoch, done = divmod(seen, len(data))
    sampler.set_epoch(epoch)
    for batch in itertools.islice(loader, done // together, None):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        step += 1
        seen += together
        say(step, net)
        if dist.get_rank() == 0 and step % EVERY == 0:
            state = {"step": step, "seen": seen, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
    seen = (epoch + 1) * len(data)
