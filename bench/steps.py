"""Training loop that only records times, the same for every launcher.

    torchrun ... bench/steps.py DIRECTORY

Every rank appends `time pid rank world_size step` to DIRECTORY/steps when a step has ended, and the step `start` as its
very first act: it has a world then. A step is one all-reduce and a pause. Rank 0 keeps every tenth step in a plain file;
a restart goes on from there.
"""

import os
import sys
import time
from pathlib import Path

directory = Path(sys.argv[1])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
book = os.open(directory / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def say(step: object) -> None:
    os.write(book, f"{time.time():.6f} {os.getpid()} {rank} {world_size} {step}\n".encode())


say("start")

import torch  # noqa: E402 (what came before is to be timed without it)
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
kept = directory / "checkpoint"
step = int(kept.read_text()) if kept.exists() else 0
gradient = torch.ones(1024)
while step < 100_000:
    time.sleep(0.02)
    dist.all_reduce(gradient)
    gradient /= world_size
    step += 1
    say(step)
    if rank == 0 and step % 10 == 0:
        new = directory / "checkpoint.new"
        new.write_text(str(step))
        new.replace(kept)
