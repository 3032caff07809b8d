"""Ray Train: its driver, and the loop with a checkpoint that it keeps."""

import itertools
import os
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from body import BACKEND, DIRECTORY, EVERY, LR, PART, TIMEOUT, WORKERS, Data, Net, say


def train() -> None:
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = Data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=PART, sampler=sampler)
    step = seen = 0
    together = PART * dist.get_world_size()
    if kept := ray.train.get_checkpoint():
        with kept.as_directory() as there:
            state = torch.load(Path(there) / "checkpoint.pt", map_location="cpu")
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
            if step % EVERY == 0:
                with tempfile.TemporaryDirectory() as there:
                    if dist.get_rank() == 0:
                        state = {"step": step, "seen": seen, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save(state, Path(there) / "checkpoint.pt")
                    kept = Checkpoint.from_directory(there) if dist.get_rank() == 0 else None
                    ray.train.report({"step": step}, checkpoint=kept)
        seen = (epoch + 1) * len(data)


if __name__ == "__main__":
    ray.init(address=os.environ["RAY_ADDRESS"])
    resized = {"elastic_resize_monitor_interval_s": float(os.environ["RESIZE_S"])} if "RESIZE_S" in os.environ else {}
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend=BACKEND, timeout_s=int(TIMEOUT.total_seconds())),
        scaling_config=ScalingConfig(num_workers=(max(1, WORKERS - 1), WORKERS), use_gpu=BACKEND == "nccl", **resized),
        run_config=RunConfig(name="resilience", storage_path=str(DIRECTORY), failure_config=FailureConfig(max_failures=-1)),
    ).fit()
