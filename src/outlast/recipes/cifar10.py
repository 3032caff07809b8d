"""CIFAR-10 with a network of six convolutions, 3,229,770 parameters, in one file. Copy it and change it.

    outlast data get digits --to data/digits       # real images of the same form, from scikit-learn; or: data get cifar10
    outlast run examples/digits.yaml               # two workers on this machine
    outlast evaluate digits                        # overall and per-class accuracy

    torchrun --nproc-per-node 2 -m outlast.recipes.cifar10 --data data/digits --epochs 6
    python -m outlast.recipes.cifar10 --data data/digits --evaluate

Writes to $OUTLAST_OUTPUT (default: out): checkpoints/, metrics.jsonl and parameters.json, at the end model.pt and final.json;
evaluation.json when it evaluates.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from outlast import contract
from outlast.data import cifar
from outlast.errors import OutlastError
from outlast.recipes import results, settings
from outlast.recipes.settings import flag
from outlast.training import Stream, checkpoint, device, session


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory of the batch files, or the one above cifar-10-batches-py; default $OUTLAST_DATA")
    epochs: int = flag(10, "passes over the training images", least=1)
    batch: int = flag(128, "images a step, over all ranks: resizing the world does not change the mathematics", least=1)
    microbatch: int = flag(16, "images that BatchNorm sees at once in any world; at most batch / microbatch ranks", least=1)
    lr: float = flag(0.05, "highest learning rate: reached after a fifth of the steps, then falling in a line to 0", least=0)
    momentum: float = flag(0.9, "share of the last step's direction that is kept", least=0)
    weight_decay: float = flag(5e-4, "pull of every weight towards 0", least=0)
    log_every: int = flag(5, "steps between two lines of the log", least=1)
    seed: int = flag(0, "seed of the first weights and of the order of images")
    evaluate: bool = flag(False, "measure model.pt, or else the newest checkpoint, on the test images instead of training")
    checkpoint: str = flag("", "the checkpoint to measure: best, or a step")


def network() -> nn.Sequential:
    """Pixels (b, 3, 32, 32) in 0 ... 1 to logits (b, 10)."""

    def block(i: int, m: int, o: int) -> list[nn.Module]:  # (b, i, h, w) -> (b, o, h/2, w/2)
        first, second = nn.Conv2d(i, m, 3, padding=1), nn.Conv2d(m, o, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(o)]

    return nn.Sequential(
        *block(3, 32, 64),  # (b, 64, 16, 16)
        *block(64, 128, 128),  # (b, 128, 8, 8)
        *block(128, 256, 256),  # (b, 256, 4, 4)
        nn.Flatten(),  # (b, 4096)
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 10),  # (b, 10)
    )


def pixels(x: Tensor) -> Tensor:
    """What the network sees of images that are kept as bytes. Channels last: convolutions on a CPU are a tenth faster so."""
    return x.float().div_(255).contiguous(memory_format=torch.channels_last)


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    torch.backends.cudnn.deterministic = True  # a resumed run has the same bits, on a GPU too
    with session.open(seed=s.seed, quiet=True) as run:
        images = cifar.train(directory(s))
        model = network().to(run.device)
        net = run.ddp(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
        stream = Stream((images.x, images.y), batch=s.batch, microbatch=s.microbatch, seed=s.seed, epochs=s.epochs)
        step = first = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        run.parameters(dataclasses.asdict(s))
        steps, started, final = stream.total_steps, time.monotonic(), None

        for batch in stream:
            for group in optimizer.param_groups:
                group["lr"] = s.lr * min((step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps), 1)
            optimizer.zero_grad()
            loss = torch.zeros((), device=run.device)
            for (x, y), share in batch.split(net):  # (b, 3, 32, 32) bytes, (b,)
                part = F.cross_entropy(net(pixels(x)), y) * share  # shares add up to the mean over the global batch
                part.backward()
                loss += part.detach()
            optimizer.step()
            step += 1

            iteration = (step - 1) % stream.steps_per_epoch + 1
            if iteration % s.log_every == 0 or step == steps:
                final = run.log(step, reduce=True, loss=loss)["loss"]  # of this step's global batch
                if run.rank == 0:
                    print(f"[{batch.epoch + 1}, {iteration:5d}] loss: {final:.3f}", flush=True)
            else:
                run.log(step)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)

        run.export(model)
        if run.rank == 0:
            # null when this process had no step left to do
            results.write_json(run.output / "final.json", {"step": step, "loss": final, "weights_sha256": results.sha256(model)})
            seconds = time.monotonic() - started
            print(f"Finished Training: {step - first} steps in {seconds:.1f} s, world of {run.world_size}", flush=True)


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Accuracy on the held-out images, overall and per class."""
    output = Path(os.environ.get(contract.Env.OUTPUT, "out"))
    images = cifar.test(directory(s))
    where = device.computing()
    model = network()
    weights = restore(model, output, s.checkpoint)
    model.to(where).eval()  # BatchNorm's running statistics, not those of the test images

    parts = torch.from_numpy(images.x).split(250)  # (250, 3, 32, 32) each
    predicted = torch.cat([model(pixels(x.to(where))).argmax(1).cpu() for x in parts]).numpy()  # (n,)
    right = predicted == images.y  # (n,)
    overall, classes = percent(right), {}
    for label, name in enumerate(images.names):
        these = right[images.y == label]
        classes[name] = {"images": len(these), "right": int(these.sum()), "accuracy": percent(these)}
    document = {"weights": weights, "weights_sha256": results.sha256(model), "images": len(images), "accuracy": overall}
    results.write_json(output / "evaluation.json", document | {"classes": classes})

    print(f"Accuracy of the network on the {len(images)} test images: {overall} %")
    for name, found in classes.items():
        print(f"Accuracy for class: {name:<10s} is " + (f"{found['accuracy']} %" if found["images"] else "unknown"))
    print("Finished Testing")


def percent(right: NDArray[np.bool_]) -> float | None:
    """How many are right, to one decimal; None of none."""
    return round(100 * float(right.mean()), 1) if len(right) else None


def restore(model: nn.Module, output: Path, name: str) -> str:
    """Load the checkpoint `name` if there is a name, else model.pt, or else the newest valid checkpoint; returns which."""
    path = output / "model.pt"
    if path.exists() and not name:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    else:
        checkpoint.restore(path := results.checkpoint(output, name), {"model": model})
    return path.name


def directory(s: Settings) -> Path:
    """Where the images are."""
    named = s.data or os.environ.get(contract.Env.DATA)
    if not named:
        raise OutlastError(f"no data: give --data DIR or set {contract.Env.DATA}; outlast data get digits --to DIR makes some")
    return Path(named)


def main(argv: Sequence[str] | None = None) -> None:
    """Train or evaluate."""
    s = settings.parse(Settings, argv, __doc__)
    (evaluate if s.evaluate else train)(s)


if __name__ == "__main__":
    settings.run(main)
