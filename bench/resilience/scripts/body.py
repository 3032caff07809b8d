"""What all scripts of the comparison share: model, data, settings, and the line that each rank writes after a step.

A step is a pause of 0.2 s and the work of a small model. After each step every rank appends one JSON list to DIRECTORY/steps:
time, pid, rank, world size, step, the samples of its part, and after every tenth step the SHA-256 of its weights.
"""

import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

_settings = json.loads(os.environ["RESILIENCE"])
DIRECTORY = Path(_settings["directory"])
DEVICE: str = _settings["device"]
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
WORKERS: int = _settings["workers"]
EVERY: int = _settings["every"]
"""Steps between saves to disk."""
TIMEOUT = timedelta(seconds=_settings["timeout_s"])
"""Time-out of collectives, where the script sets it."""
SAMPLES: int = _settings["samples"]
BATCH, LAYERS, PAUSE_S, LR, HASHED_EVERY = 24, 8, 0.2, 1e-4, 10
PART = BATCH // WORKERS
"""Samples of a rank, where a script's batch is that of each rank."""

torch.manual_seed(0)
torch.set_num_threads(1)
_printed = str(DIRECTORY) == "-"
"""In a pod, whose log is read."""
_book = 1 if _printed else os.open(DIRECTORY / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Net(torch.nn.Module):
    """The model. Its forward pass pauses first, and notes the samples."""

    def __init__(self) -> None:
        super().__init__()
        width = round((_settings["millions"] * 1e6 / LAYERS) ** 0.5)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        self.seen: list[int] = []
        self.to(DEVICE)

    def forward(self, x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {"loss": ...} of inputs (B, width), targets (B, width) and sample numbers (B,)."""
        time.sleep(PAUSE_S)
        self.seen += i.tolist()
        return {"loss": (self.layers(x.to(DEVICE)) - y.to(DEVICE)).square().mean()}


class Data(Dataset):
    """Random inputs; the target is the input in reverse."""

    def __init__(self) -> None:
        width = round((_settings["millions"] * 1e6 / LAYERS) ** 0.5)
        self.x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "y": self.x[i].flip(0), "i": torch.tensor(i)}


def say(step: int, net: Net, rank: int | None = None, world: int | None = None) -> None:
    """Write the line of a step that has ended."""
    place = [dist.get_rank() if rank is None else rank, dist.get_world_size() if world is None else world]
    digest = ""
    if step % HASHED_EVERY == 0:
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())).hexdigest()
    line = json.dumps([time.time(), os.getpid(), *place, step, net.seen, digest])
    os.write(_book, f"{'[STEP] ' * _printed}{line}\n".encode())
    net.seen.clear()
