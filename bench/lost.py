"""Training script for the cost of failures in recovery.py, with the same model, pace and saves under every system.

    python bench/lost.py SYSTEM DIRECTORY [--millions 2] [--step 0.3] [--every 10]

SYSTEM is outlast | torchrun | torchft | dlrover: who starts this script, and with which library it saves. A step is a pause,
then forward, backward with DDP's all-reduce, and AdamW; together `--step` seconds. Every rank appends `time pid rank world_size
step` to DIRECTORY/steps when a step has ended, and the step `start` when its process begins. All but torchft save to disk every
`--every` seconds. In between, Outlast's agents keep snapshots, DLRover saves every step to shared memory, and torchft copies the
state from a peer.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("system", choices=("outlast", "torchrun", "torchft", "dlrover"))
options.add_argument("directory", type=Path, help="-: print the lines instead")
options.add_argument("--millions", type=float, default=2.0, help="parameters; the state is three times as large, in float32")
options.add_argument("--step", type=float, default=0.3, help="seconds")
options.add_argument("--every", type=float, default=10.0, help="seconds between saves to disk")
args = options.parse_args()

LAYERS = 8
book = None if str(args.directory) == "-" else os.open(args.directory / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def say(step: object, rank: int | None = None, size: int | None = None) -> None:
    rank = int(os.environ["RANK"]) if rank is None else rank
    size = int(os.environ["WORLD_SIZE"]) if size is None else size
    line = f"{time.time():.6f} {os.getpid()} {rank} {size} {step}\n"
    if book is None:  # in a pod, whose log is read
        line = f"[STEP] {line}"
    os.write(1 if book is None else book, line.encode())


def group() -> int:
    """Return the number of this replica group in torchft."""
    return int(os.environ["REPLICA_GROUP"])


say("start", *((group(), 1) if args.system == "torchft" else ()))

import torch  # noqa: E402 (what came before is to be timed without it)
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(1)
width = round((args.millions * 1e6 / LAYERS) ** 0.5)
net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
x = torch.randn(8, width)


class Pace:
    """Pauses before each step, so that steps end at equal intervals."""

    def __init__(self) -> None:
        self._at: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        self._at = now if self._at is None else self._at
        time.sleep(max(0.0, self._at + args.step - now))
        self._at = time.monotonic()


pause = Pace()


def outlast() -> None:
    from outlast.training import session

    with session.open(seed=0, quiet=True) as run:
        model = run.ddp(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = run.resume({"model": model, "optimizer": optimizer})
        while True:
            optimizer.zero_grad()
            pause()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            run.log(step, loss=loss)
            leaving = run.interrupted()
            say(step)
            if leaving or run.due(step):
                run.save(step)


def torchrun() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept, step = args.directory / "checkpoint.pt", 0
    if kept.exists():
        state = torch.load(kept)
        step = state["step"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    saved = time.monotonic()
    while True:
        optimizer.zero_grad()
        pause()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        say(step)
        if dist.get_rank() == 0 and time.monotonic() - saved >= args.every:
            new = kept.with_suffix(".new")
            torch.save({"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, new)
            new.replace(kept)
            saved = time.monotonic()


def torchft() -> None:
    """Run one replica group of one rank, which copies missing state from a peer and saves nothing to disk."""
    from datetime import timedelta

    from torchft import DistributedDataParallel as Replicated
    from torchft import Manager, Optimizer, ProcessGroupGloo

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def load(state: dict[str, dict[str, object]]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    wait = timedelta(seconds=float(os.environ["TORCHFT_WAIT_S"]))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        timeout=wait,
        hostname=os.environ["MASTER_ADDR"],
        replica_id=f"lost-{group()}",
    )
    model, together = Replicated(manager, net), Optimizer(manager, optimizer)
    while True:
        together.zero_grad()  # begins the quorum, beside the pause
        pause()
        model(x).square().mean().backward()
        before = manager.current_step()
        together.step()
        if manager.current_step() > before:
            say(manager.current_step(), group(), manager.num_participants())


def dlrover() -> None:
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpointer = DdpCheckpointer(str(args.directory / "flash"))
    step, saved = 0, time.monotonic()
    if state := checkpointer.load_checkpoint():
        state = state.get("model_states", state)
        step = state["step"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    while True:
        optimizer.zero_grad()
        pause()
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        say(step)
        disk = time.monotonic() - saved >= args.every
        saved = time.monotonic() if disk else saved
        state = {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK if disk else StorageType.MEMORY)


{"outlast": outlast, "torchrun": torchrun, "torchft": torchft, "dlrover": dlrover}[args.system]()
