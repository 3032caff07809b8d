"""Tests a cluster: a small network learns synthetic data within a second, and the exit code reports the result.

    outlast run examples/smoke.yaml
    torchrun --nproc-per-node 2 -m outlast.recipes.smoke --world 2
    python -m outlast.recipes.smoke

If the loss falls by less than 30 %, if the ranks end with different weights, or if the world's size is not --world, the program
exits with a message and code 78, because a restart would not help. After an interruption or a kill, it resumes from its newest
checkpoint.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.base.errors import OutlastError
from outlast.recipes.shared import results, settings
from outlast.recipes.shared.settings import flag
from outlast.training import Stream, session


@dataclass(frozen=True)
class Settings:
    epochs: int = flag(2, "passes over the samples; two are enough for the loss to fall by 80 %", least=1)
    batch: int = flag(256, "samples per step over all ranks; the result does not depend on the world", least=1)
    samples: int = flag(4096, "samples in the synthetic dataset", least=1)
    features: int = flag(128, "features of a sample", least=1)
    classes: int = flag(4, "number of classes", least=2)
    lr: float = flag(3e-3, "AdamW's learning rate", least=0)
    seed: int = flag(42, "seed of the data, the weights and the order of samples")
    world: int | None = flag(None, "required number of ranks; default: any", least=1)


def made_up(s: Settings) -> tuple[Tensor, Tensor]:
    """Return random samples (n, f) and their classes (n,). A sample's class is the random direction that matches it best."""
    generator = torch.Generator().manual_seed(s.seed)
    x = torch.randn(s.samples, s.features, generator=generator)  # (n, f)
    directions = torch.randn(s.features, s.classes, generator=generator)  # (f, c)
    return x, (x @ directions).argmax(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and raise OutlastError unless all checks pass."""
    s = settings.parse(Settings, argv, __doc__)
    started = time.monotonic()
    with session.open(seed=s.seed, quiet=True) as run:
        say(f"[DDP] rank {run.rank} of {run.world_size} on {run.device} of {socket.gethostname()}, {dist.get_backend()}")
        if s.world is not None and run.world_size != s.world:
            raise OutlastError(
                f"the world has {run.world_size} ranks and --world asks for {s.world}; start {s.world} or drop --world"
            )

        x, y = (tensor.to(run.device) for tensor in made_up(s))  # (n, f), (n,)
        model = nn.Sequential(nn.Linear(s.features, 256), nn.ReLU(), nn.Linear(256, s.classes)).to(run.device)
        first = mean_loss(model, x, y)  # before resuming, so always the loss of the untrained weights
        net = run.ddp(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr)
        stream = Stream((x, y), batch=s.batch, seed=s.seed, epochs=s.epochs)
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})

        loss, steps, since = torch.zeros((), device=run.device), 0, time.monotonic()
        for batch in stream:
            optimizer.zero_grad()
            for (x_, y_), share in batch.split(net):  # (b, f), (b,)
                part = F.cross_entropy(net(x_), y_) * share
                part.backward()
                loss += part.detach()
            optimizer.step()
            step += 1
            steps += 1
            if batch.ends_epoch:
                epoch, own = batch.epoch + 1, loss / steps
                say(f"[TRAIN] rank={run.rank} epoch={epoch} loss={own:.4f} time={time.monotonic() - since:.2f}s")
                all_ = run.log(step, reduce=True, loss=own)["loss"]
                if run.rank == 0:
                    say(f"[EPOCH] {epoch}/{s.epochs} step={step} loss={all_:.4f}")
                loss, steps, since = torch.zeros_like(loss), 0, time.monotonic()
            else:
                run.log(step)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)

        last = mean_loss(model, x, y)
        hashes = run.gather(results.sha256(model))
        wrong = problems(first, last, hashes)
        run.export(model)
        if run.rank == 0:
            results.write_json(run.output / "final.json", {"step": step, "loss": last, "weights_sha256": hashes[0]})
            summary = wrong or [
                f"the loss fell by {1 - last / first:.0%}, {run.world_size} ranks agree on weights {hashes[0][:12]}"
            ]
            say(f"[DONE] first={first:.4f} last={last:.4f} time={time.monotonic() - started:.2f}s: {'; '.join(summary)}")
    if wrong:
        raise OutlastError(f"the smoke test failed: {'; '.join(wrong)}")


def problems(first: float, last: float, hashes: Sequence[str]) -> list[str]:
    """Return a message for each failed check of the losses before and after training, and of the weights' checksums by rank."""
    messages = []
    fell = 1 - last / first
    if not fell >= 0.3:  # also for NaN
        messages.append(f"the loss fell by {fell:.0%} from {first:.4f} to {last:.4f}, less than 30 %")
    if strangers := [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]:
        messages.append(f"rank {', '.join(map(str, strangers))} ended with other weights than rank 0")
    return messages


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean loss over all samples. It is computed on every rank."""
    return F.cross_entropy(model(x), y).item()


def say(line: str) -> None:
    """Print a line in a single write, because many processes share the output."""
    print(line + "\n", end="", flush=True)


if __name__ == "__main__":
    results.run(main)
