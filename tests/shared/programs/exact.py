"""Small training run that proves its work: the samples and the loss of each step, and the hash of the final weights.

Dropout, momentum and a learning-rate schedule are included because their state is easily lost. Arguments: see the parser.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from outlast.training import Shards, Stream, kept_process, session
from outlast.worker.launch import training_process

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--until", type=int, help="save after this step, and end")
parser.add_argument("--gate", action="store_true", help="do the last step only when the output has a file `hurry`")
parser.add_argument("--keep", action="store_true", help="the process goes on in the next world")
parser.add_argument(
    "--harm", choices=("waits", "enters", "begins"), help="when rank 1, or rank 2 as it begins, is killed in a change"
)
parser.add_argument("--compile", action="store_true", help="compile the model, with the backend aot_eager")
parser.add_argument("--holds", type=int, nargs="*", default=[], help="steps after which training waits for a change of the world")
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--pause", type=float, default=0.02, help="seconds a step takes, until the output has a file `hurry`")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--frozen", type=int, default=0, help="parameters that are saved and not trained")
parser.add_argument("--fail-at", type=int, default=None, help="rank 1 raises at this step, every time")
parser.add_argument("--flip-at", type=int, default=None, help="a bit of rank 1's weights flips at this step, in generation 1")
parser.add_argument("--swell", type=Path, help="take memory until this process is killed once this file is there, which goes")
parser.add_argument("--shards", help="read the samples from this place, where `a_place` has put them, not from memory")
parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
parser.add_argument("--print", action="store_true", help="print every step and record no samples")
args = parser.parse_args()


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


first = os.environ.get("RANK"), os.environ.get("OUTLAST_GENERATION"), os.environ.get("OUTLAST_ATTEMPT")
if args.harm == "waits" and first == ("1", "1", "0"):
    kept_process._wait = dies
if args.harm == "begins" and first == ("2", "2", "0"):
    dies()

draw = np.random.default_rng(7)
x = draw.standard_normal((args.samples, 16), dtype=np.float32)
y = (x[:, 0] > 0).astype(np.int64) + 2 * (x[:, 1] > 0).astype(np.int64)


def sharded(module: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in module:
        if list(part.parameters()):
            fully_shard(part)
    return fully_shard(module)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor. A collective for such a tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train() -> None:
    if args.harm == "enters" and training_process.kept and first == ("1", "1", "0"):
        dies()
    with session.open(seed=3, quiet=True) as run:
        module = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(args.width, 4))
        if args.frozen:
            module.register_parameter("frozen", nn.Parameter(torch.arange(args.frozen, dtype=torch.float32), requires_grad=False))
        net = sharded(module) if args.sharded else run.ddp(module)
        forward = torch.compile(net, backend="aot_eager") if args.compile else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        shards = Shards(args.shards, window=3) if args.shards else None
        stream = Stream(shards or {"x": x, "y": y}, args.batch, seed=5, steps=args.steps, epochs=10**6)
        step = run.resume({"net": net, "optimizer": optimizer, "schedule": schedule, "stream": stream})
        consumed = run.output / f"consumed-{os.environ['OUTLAST_WORKER']}-{os.getpid()}.jsonl"
        hurry = run.output / "hurry"
        loss = 0.0
        for batch in stream:
            begun = time.monotonic()
            optimizer.zero_grad()
            loss = 0.0
            for data, share in batch.split(net):
                part = F.cross_entropy(forward(data["x"]), data["y"]) * share
                part.backward()
                loss += part.item()
            optimizer.step()
            schedule.step()
            step += 1
            if args.fail_at == step and run.rank == 1:
                raise ValueError(f"a bug at step {step}")
            if args.flip_at == step and run.rank == 1 and run.generation == 1:
                module[0].weight.data.view(torch.int32)[1, 5] ^= 1 << 12
            if args.swell and args.swell.exists():
                args.swell.unlink()
                _ = [bytearray(os.urandom(64 << 20)) for _ in range(1 << 16)]
            pause = 0.0 if hurry.exists() else args.pause
            time.sleep(max(0.0, pause - (time.monotonic() - begun)))
            record = {
                "step": step,
                "epoch": batch.epoch,
                "generation": run.generation + int(os.environ.get("OUTLAST_ATTEMPT", "0")) / 1000,
                "rank": run.rank,
                "indices": batch.indices.tolist(),
            }
            if args.print:
                print(f"rank {run.rank} step {step}", flush=True)
            else:
                with contextlib.suppress(OSError), consumed.open("a") as file:  # on a full disk tests do not read it
                    file.write(json.dumps(record) + "\n")
            run.log(step, loss=loss, reduce=True)
            leaving = run.interrupted()
            while step in args.holds and not leaving:
                time.sleep(0.01)
                leaving = run.interrupted()
            if leaving or run.due(step) or step == args.until:
                run.save(step)
            if step == args.until:
                break
            while args.gate and step == args.steps - 1:
                closed = torch.tensor(int(not hurry.exists()))
                dist.all_reduce(closed)
                if not closed:
                    break
                time.sleep(0.02)
                if run.interrupted():
                    run.save(step)
        parameters = [whole(each).cpu().numpy() for each in module.state_dict().values()]
        weights = hashlib.sha256(b"".join(each.tobytes() for each in parameters)).hexdigest()
        if run.rank == 0:
            (run.output / "final.json").write_text(json.dumps({"step": step, "weights": weights}))
            if args.print:
                print(f"weights {weights}", flush=True)


session.run(train) if args.keep else train()
