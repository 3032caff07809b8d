"""Trains a network of six convolutions, with 3,229,770 parameters, on CIFAR-10. Copy it and change it.

    outlast data get digits                        # real images of the same form, from scikit-learn; or: data get cifar10
    outlast run examples/digits.yaml               # two workers on this machine
    outlast evaluate digits                        # overall and per-class accuracy

    torchrun --nproc-per-node 2 -m outlast.recipes.cifar10 data/cifar10 --epochs 10
    torchrun --nproc-per-node 2 -m outlast.recipes.cifar10 --setting workshop --model-file cifar10.pth data/cifar10
    python -m outlast.recipes.cifar10 --evaluate --model-file cifar10.pth data/cifar10
    python -m outlast.recipes.classify cifar10.pth cat.png holiday/

Training writes checkpoints/, metrics.jsonl and parameters.json, and at the end model.pt and final.json, to the job's output
directory, or to --output-dir (default: out) if there is no job. --evaluate writes evaluation.json to the same directory.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from outlast.base.errors import OutlastError
from outlast.data import cifar
from outlast.job import contract
from outlast.recipes import pixels
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.settings import flag
from outlast.training import Session, Stream, device
from outlast.training.samples.stream import Batch
from outlast.training.state import checkpoint

ALIASES = {
    "learning_rate": "lr",
    "print_freq": "log_every",
    "workers": "the images are in memory, and no process loads them",
    "checkpoint_file": "checkpoints are in the output, and a run resumes by itself",
}
"""Flags of the EKS workshop's script, mapped to this recipe's names or to the reason why they are ignored.

All other flags have the same names.
"""
WORKSHOP = {
    "lr": 0.001, "schedule": "constant", "nesterov": False, "weight_decay": 1e-4,
    "smoothing": 0.0, "flip": False, "shift": 0, "cutout": 0, "whiten": False, "ema": 0.0, "dtype": "float32",
}  # fmt: skip
"""Defaults of the EKS workshop's script, for `--setting workshop`."""


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory of the batch files, or the one above; default $OUTLAST_DATA", group="data", first=True)
    output_dir: str = flag("", "output directory; a job's output has precedence")
    model_file: str = flag("", "also write the final weights to this file; with --evaluate, evaluate its weights")
    seed: int = flag(0, "seed of the initial weights, the order of images and their augmentation")

    setting: Literal["modern", "workshop"] = flag("modern", "default values of all flags below", group="training")
    epochs: int = flag(10, "passes over the training images", least=1)
    batch: int | None = flag(None, "images per step over all ranks (modern: 128)", least=1)
    batch_size: int | None = flag(None, "images per step and rank at the start of the run (workshop: 128)", least=1)
    microbatch: int = flag(16, "images per BatchNorm group in any world; at most batch / microbatch ranks", least=1)
    lr: float = flag(0.05, "maximum learning rate (workshop: 0.001)", least=0)
    schedule: Literal["triangle", "constant"] = flag(
        "triangle", "triangle: rises for a fifth of the steps, then falls to 0 (workshop: constant)"
    )
    momentum: float = flag(0.9, "momentum of SGD", least=0)
    nesterov: bool = flag(True, "Nesterov momentum (workshop: off)")
    weight_decay: float = flag(5e-4, "weight decay (workshop: 0.0001)", least=0)
    smoothing: float = flag(0.1, "label smoothing (workshop: 0)", least=0, most=1)
    flip: bool = flag(True, "mirror half of the images; use --no-flip for digits and text (workshop: off)")
    shift: int = flag(4, "maximum shift of an image in pixels (workshop: 0)", least=0, most=31)
    cutout: int = flag(8, "side of the square painted over each image, in pixels (workshop: 0)", least=0, most=32)
    whiten: bool = flag(True, "initialize the first layer with filters that decorrelate pixels (workshop: off)")
    ema: float = flag(0.98, "final weights: mean over about 1 / (1 - ema) steps; 0: last step (workshop)", least=0, most=1)
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "auto: bfloat16 where it is fast (workshop: float32)")
    log_every: int = flag(5, "steps between two log lines", least=1)

    evaluate: bool = flag(False, "evaluate model.pt, or the newest checkpoint without it", group="instead of training")
    checkpoint: str = flag("", "checkpoint to evaluate: best, or a step")


# The network


def network(group: int = 16) -> nn.Sequential:
    """Return the network, which maps pixels from 0 to 1, (b, 3, 32, 32), to logits (b, 10). `group` is for `BatchNorm`."""

    def block(i: int, m: int, o: int) -> list[nn.Module]:  # (b, i, h, w) -> (b, o, h/2, w/2)
        first, second = nn.Conv2d(i, m, 3, padding=1), nn.Conv2d(m, o, 3, padding=1)
        # The workshop's network applies ReLU before the pool, which gives the same result from four times as many values.
        return [first, nn.ReLU(inplace=True), second, nn.MaxPool2d(2), nn.ReLU(inplace=True), BatchNorm(o, group)]

    layers: Any = nn.Sequential(
        *block(3, 32, 64),  # (b, 64, 16, 16)
        *block(64, 128, 128),  # (b, 128, 8, 8)
        *block(128, 256, 256),  # (b, 256, 4, 4)
        nn.Flatten(),  # (b, 4096)
        nn.Linear(4096, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 10),  # (b, 10)
    )
    return cast(nn.Sequential, layers.to(memory_format=torch.channels_last))  # faster convolutions on a CPU


class BatchNorm(nn.BatchNorm2d):
    """Normalizes `group` images at a time, for the same result in any world. `statistics` updates the running statistics."""

    def __init__(self, channels: int, group: int) -> None:
        super().__init__(channels)
        self.group = group
        self.batch_statistics = torch.empty(0)
        """Mean and variance of this rank's images in the last step, (2, c)."""

    def forward(self, x: Tensor) -> Tensor:  # (b, c, h, w)
        if not self.training:
            return super().forward(x)
        parts = x.split(self.group)
        each = torch.zeros(len(parts), 2, x.shape[1], device=x.device, dtype=self.weight.dtype)  # for each group
        outputs = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, (mean, variance) in zip(parts, each, strict=True)
        ]
        sizes = torch.tensor([len(part) / len(x) for part in parts], device=x.device, dtype=each.dtype)
        self.batch_statistics = (each * sizes[:, None, None]).sum(0)
        return torch.cat(outputs)


@torch.no_grad()
def statistics(model: nn.Module, share: float) -> None:
    """Update BatchNorm's running statistics with momentum 0.1. `share` is the rank's share of the step's images. All ranks must
    call this."""
    norms = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    step = torch.cat([norm.batch_statistics for norm in norms], 1) * share  # (2, all channels)
    if dist.get_world_size() > 1:
        dist.all_reduce(step)
    for norm, (mean, variance) in zip(norms, step.split([norm.num_features for norm in norms], 1), strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean.lerp_(mean, 0.1)
        norm.running_var.lerp_(variance, 0.1)
        norm.num_batches_tracked += 1


@torch.no_grad()
def whiten(first: nn.Conv2d, x: Tensor) -> None:
    """Initialize the filters of the layer `first` to principal components of patches of the images `x`, scaled to variance 1.

    These filters decorrelate pixels. Half of them are the negatives of the other half, because a ReLU follows. `x` has bytes.
    """
    patches = F.unfold(x.double() / 255, 3).transpose(1, 2).reshape(-1, 27)  # (n * 900, 27)
    variances, components = torch.linalg.eigh(torch.cov(patches.T))  # (27,) from small to large, (27, 27)
    scale = variances.clamp(min=1e-3 * variances[-1].item() + 1e-12).rsqrt()
    filters = (components * scale).T.flip(0)[: first.out_channels // 2]  # (16, 27)
    filters = torch.cat((filters, -filters))  # (32, 27)
    first.weight.copy_(filters.view_as(first.weight))
    assert first.bias is not None
    first.bias.copy_(-filters @ patches.mean(0))


# Training


class Training(loop.Recipe):
    """A training run, whose methods `loop.train` calls."""

    unmeasured = None  # the logged loss is the metric

    def __init__(self, s: Settings, run: Session) -> None:
        super().__init__(s, run)
        self.log.line(f"reading {directory(s)}")
        images = cifar.train(directory(s))
        self.model = network(s.microbatch)
        if s.whiten:
            whiten(cast(nn.Conv2d, self.model[0]), torch.from_numpy(images.x[:256]))
        self.model.to(run.device)
        self.net = loop.parallel("ddp", run, self.model)
        self.optimizer = sgd(self.model, s)
        self.stream = Images((images.x, images.y), s, run.world_size)
        self.device, self.dtype = device.of(run.device), device.dtype(s.dtype, run.device, run.gather)
        self.used = {"dtype": str(self.dtype).removeprefix("torch."), "classes": short(images.names)}
        self.used |= {"batch": self.stream.batch, "batch_size": None}
        self.loss: float | None = None  # null in final.json if this process had no step left to do
        self.first, self.started = 0, time.monotonic()

    def state(self) -> dict[str, Any]:
        return {name: each for name, each in super().state().items() if name != "record"}

    def begin(self, step: int) -> None:
        self.first, self.started = step, time.monotonic()

    def rate(self, step: int, batch: Batch) -> float:
        return rate(self.s, step, self.stream.total_steps)

    def update(self, step: int, batch: Batch) -> None:
        s, run = self.s, self.run
        x, y, share = local_part(batch, run.device)  # (b, 3, 32, 32) bytes, (b,)
        x = shown(augmented(s, x, batch))  # (b, 3, 32, 32)
        with self.device.autocast(self.dtype):
            logits = self.net(x)  # (b, 10)
        self.part = F.cross_entropy(logits.float(), y, label_smoothing=s.smoothing) * share
        self.part.backward()  # shares add up to the mean over the global batch
        self.optimizer.step()
        self.optimizer.zero_grad()
        statistics(self.model, share / run.world_size)
        average(self.optimizer, s.ema, step)
        self.device.mark_step()

    def report(self, step: int, batch: Batch) -> None:
        self.log.done += batch.size
        iteration = (step - 1) % self.stream.steps_per_epoch + 1
        if iteration % self.s.log_every and step != self.stream.total_steps:
            self.run.log(step)
            return
        values = self.run.log(step, reduce=True, loss=self.part.detach(), images_per_s=self.log.speed())
        self.loss = values["loss"]  # of this step's global batch
        self.log.line(f"[{batch.epoch + 1}, {iteration:5d}] loss: {self.loss:.3f}")

    def due(self, step: int, batch: Batch) -> bool:
        return False

    def finish(self, step: int) -> None:
        """Write the final weights and final.json, each atomically."""
        run, model = self.run, averaged(self.model, self.optimizer)
        for path in (run.output / "model.pt", *filter(None, [self.s.model_file and Path(self.s.model_file).absolute()])):
            self.log.line(f"saving model: {path}")
            run.export(model, path)
        results.final(run, model, step=step, loss=self.loss)
        took = f"{step - self.first} steps in {time.monotonic() - self.started:.1f} s"
        self.log.line(f"Finished Training: {took}, world of {run.world_size}")


class Images(Stream):
    """A stream of images. A batch size given per rank is multiplied by the number of ranks when the run starts, and then kept."""

    def __init__(self, arrays: tuple[NDArray[np.uint8], NDArray[np.int64]], s: Settings, ranks: int) -> None:
        if s.batch and s.batch_size:
            raise OutlastError(
                f"--batch {s.batch} and --batch-size {s.batch_size} are two sizes of a step; leave one of them out"
            )
        self._fixed = bool(s.batch_size) or (s.setting == "workshop" and not s.batch)
        batch = (s.batch_size or 128) * ranks if self._fixed else s.batch or 128
        super().__init__(arrays, batch, microbatch=s.microbatch, seed=s.seed, epochs=s.epochs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._fixed and "batch" in state:
            self.batch = state["batch"]


def local_part(batch: Batch, where: torch.device) -> tuple[Tensor, Tensor, float]:
    """Return this rank's images (b, 3, 32, 32) as bytes, labels (b,) and share. The mean share over all ranks is 1."""
    x, y = (torch.cat([data[i] for data, _ in batch.pieces]).to(where, non_blocking=True) for i in range(2))
    return x, y, sum(share for _, share in batch.pieces)


def augmented(s: Settings, x: Tensor, batch: Batch) -> Tensor:
    """Augment images (b, 3, 32, 32). The random changes depend only on (seed, epoch, index), not on the world."""
    # In a short last batch, a rank without images augments another rank's image as index 0, and its share is 0.
    index = torch.zeros(len(x), dtype=torch.int64)
    index[: len(batch.indices)] = torch.from_numpy(batch.indices)
    u = pixels.draws(s.seed, batch.epoch, index, 5).to(x.device)  # (b, 5)
    if s.flip:
        x = pixels.flip(x, u[:, 0] < 0.5)
    if s.shift:
        x = pixels.shift(x, u[:, 1:3], s.shift)
    if s.cutout:
        x = pixels.cutout(x, u[:, 3:5], s.cutout)
    return x


def shown(x: Tensor) -> Tensor:
    """Convert images from bytes to network inputs from 0 to 1."""
    return pixels.normalised(x, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def rate(s: Settings, step: int, steps: int) -> float:
    """Return the learning rate of a step."""
    return s.lr if s.schedule == "constant" else s.lr * min((step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps), 1)


def sgd(model: nn.Module, s: Settings) -> torch.optim.SGD:
    """Return the SGD optimizer."""
    nesterov, fused = bool(s.nesterov and s.momentum), next(model.parameters()).device.type != "xla"
    return torch.optim.SGD(model.parameters(), s.lr, s.momentum, weight_decay=s.weight_decay, nesterov=nesterov, fused=fused)


AVERAGE = "average"
"""Key of a weight's running average in the optimizer's state."""


@torch.no_grad()
def average(optimizer: torch.optim.Optimizer, ema: float, step: int) -> None:
    """Update the running averages of the weights after a step. The averages cover fewer steps at the beginning."""
    if not ema:
        return
    weights_ = [p for group in optimizer.param_groups for p in group["params"]]
    averages = [optimizer.state[p].setdefault(AVERAGE, p.clone(memory_format=torch.preserve_format)) for p in weights_]
    torch._foreach_lerp_(averages, weights_, 1 - min(ema, (step + 1) / (step + 10)))


@torch.no_grad()
def averaged(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> nn.Sequential:
    """Return a copy of the model with the running averages of its weights, if the optimizer has any."""
    averages = [optimizer.state[p].get(AVERAGE, p) for p in model.parameters()]
    model = copy.deepcopy(model)
    for p, value in zip(model.parameters(), averages, strict=True):
        p.copy_(value)
    return model


# Evaluation


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Print and write the accuracy on the test images, overall and per class."""
    print(f"reading {directory(s)}")
    images = cifar.test(directory(s))
    where = device.computing()
    model, name = trained(results.output(), s.model_file, s.checkpoint)
    model.to(where).eval()  # BatchNorm's running statistics, not those of the test images

    parts = torch.from_numpy(images.x).split(250)  # (250, 3, 32, 32) each
    predicted = torch.cat([model(shown(x.to(where))).argmax(1).cpu() for x in parts]).numpy()  # (n,)
    right = predicted == images.y  # (n,)
    overall, classes = percent(right), {}
    for label, class_ in enumerate(short(images.names)):
        these = right[images.y == label]
        classes[class_] = {"images": len(these), "right": int(these.sum()), "accuracy": percent(these)}
    results.evaluation(name, model, images=len(images), accuracy=overall, classes=classes)

    print(f"Accuracy of the network on the {len(images)} test images: {overall} %")
    width = max(5, *map(len, classes))
    for class_, entry in classes.items():
        print(f"Accuracy for class: {class_:<{width}s} is " + (f"{entry['accuracy']} %" if entry["images"] else "unknown"))
    print("Finished Testing")


def percent(right: NDArray[np.bool_]) -> float | None:
    """Return the accuracy in percent, to one decimal place, or None if there are no images."""
    return round(100 * float(right.mean()), 1) if len(right) else None


def short(names: Sequence[str]) -> list[str]:
    """Return the class names, with CIFAR-10's two long names shortened as in most tables."""
    return [{"airplane": "plane", "automobile": "car"}.get(name, name) for name in names]


def trained(output: Path, file: str = "", name: str = "") -> tuple[nn.Sequential, str]:
    """Return a trained network and the name of its weights. Raises OutlastError if they are missing or do not fit.

    The weights come from `file`, or from the checkpoint `name` in `output`. If neither is given, they come from model.pt in
    `output` or, if that does not exist, from the newest checkpoint in `output`.
    """
    if file and name:
        raise OutlastError(f"--model-file {file} and --checkpoint {name} are two models; leave one of them out")
    model = network()
    path = Path(file) if file else output / "model.pt"
    if file or (path.exists() and not name):
        load(model, path)
        return model, path.name
    path = results.checkpoint(output, name)
    optimizer = sgd(model, Settings())
    checkpoint.restore(path, {"model": model, "optimizer": optimizer})
    return averaged(model, optimizer), path.name


def load(model: nn.Module, path: Path) -> None:
    """Load weights from a file, which the workshop's script may have written. Raises OutlastError for another model's weights."""
    weights = {name.removeprefix("network."): value for name, value in results.state_dict(path).items()}
    model.load_state_dict(results.fitted(weights, model, f"the weights in {path}"))


def directory(s: Settings) -> Path:
    """Return the directory of the images. Raises OutlastError if none is given."""
    named = s.data or os.environ.get(contract.Env.DATA)
    if not named:
        raise OutlastError(f"no data: give --data DIR or set {contract.Env.DATA}; outlast data get digits --to DIR makes some")
    return Path(named)


def main(argv: Sequence[str] | None = None) -> None:
    s = settings.parse(Settings, argv, __doc__, ALIASES, {"workshop": WORKSHOP})
    results.into(s.output_dir)
    if s.evaluate:
        evaluate(s)
    else:
        results.writable(s.model_file, "--model-file")
        torch.backends.cudnn.deterministic = True  # a resumed run gives the same bits, even on a GPU
        loop.train(Training, s, tf32=False)


if __name__ == "__main__":
    results.run(main)
