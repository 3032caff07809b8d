"""torchrun with torch's distributed checkpoints, saved beside the training."""

import itertools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from body import BACKEND, DIRECTORY, EVERY, LR, PART, TIMEOUT, Data, Net, say

dist.init_process_group("cpu:gloo,cuda:nccl" if BACKEND == "nccl" else BACKEND, timeout=TIMEOUT)
net = Net()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
data = Data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=PART, sampler=sampler)
step = seen = 0
together, saving = PART * dist.get_world_size(), None
beside = dist.new_group(backend="gloo")  # the saves of a thread must not mix with the gradients' all-reduces


def state() -> dict[str, object]:
    weights, moments = get_state_dict(net, optimizer)
    return {"net": weights, "optimizer": moments, "step": step, "seen": seen}


whole = [path.parent for path in DIRECTORY.glob("dcp/*/.metadata")]
if whole:
    loaded = state()
    dcp.load(loaded, checkpoint_id=max(whole, key=lambda path: int(path.name)))
    step, seen = loaded["step"], loaded["seen"]
    set_state_dict(net, optimizer, model_state_dict=loaded["net"], optim_state_dict=loaded["optimizer"])
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
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(state(), checkpoint_id=DIRECTORY / "dcp" / str(step), process_group=beside)
    seen = (epoch + 1) * len(data)
