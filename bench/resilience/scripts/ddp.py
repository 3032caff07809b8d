"""The loop that the others begin from: DDP without any saving."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from body import BACKEND, LR, PART, Data, Net, say

dist.init_process_group(BACKEND)
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
data = Data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=PART, sampler=sampler)
step = epoch = 0
while True:
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        step += 1
        say(step, net)
    epoch += 1
