"""CIFAR-10 with a network of six convolutions, 3,229,770 parameters, in one file. Copy it and change it.

    outlast data get digits                        # real images of the same form, from scikit-learn; or: data get cifar10
    outlast run examples/digits.yaml               # two workers on this machine
    outlast evaluate digits                        # overall and per-class accuracy

    torchrun --nproc-per-node 2 -m outlast.recipes.cifar10 data/cifar10 --epochs 10
    torchrun --nproc-per-node 2 -m outlast.recipes.cifar10 --setting workshop --model-file cifar10.pth data/cifar10
    python -m outlast.recipes.cifar10 --evaluate --model-file cifar10.pth data/cifar10
    python -m outlast.recipes.classify cifar10.pth cat.png holiday/

Writes to the job's output, --output-dir without a job (default: out): checkpoints/, metrics.jsonl and parameters.json, at the end
model.pt and final.json; evaluation.json when it evaluates.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import dataclasses
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

from outlast import contract
from outlast.data import cifar
from outlast.errors import NotFound, OutlastError
from outlast.recipes import memory, pixels, results, settings
from outlast.recipes.settings import flag
from outlast.training import Session, Stream, checkpoint, device, session
from outlast.training.stream import Batch

# What --setting chooses; a flag of the same name has precedence. `workshop` is what the EKS workshop's script does, so that its
# page can be followed. `modern` learns more in the same time.
SETTINGS: dict[str, tuple[Any, Any]] = {
    #                modern      workshop
    "batch":        (128,        None),        # images a step, over all ranks
    "batch_size":   (None,       128),         # the same, said for each worker: 256 for two
    "lr":           (0.05,       0.001),       # highest learning rate
    "schedule":     ("triangle", "constant"),  # up in a fifth of the steps, then down in a line to 0
    "momentum":     (0.9,        0.9),
    "nesterov":     (True,       False),       # the gradient where momentum will have led to
    "weight_decay": (5e-4,       1e-4),
    "smoothing":    (0.1,        0.0),         # share of the label that is spread over all classes
    "flip":         (True,       False),       # half of the images are mirrored
    "shift":        (4,          0),           # pixels: images move by up to so many, each way
    "cutout":       (8,          0),           # pixels: side of a square that is painted over
    "whiten":       (True,       False),       # the first layer begins with filters that decorrelate pixels
    "ema":          (0.98,       0.0),         # final weights are an average over about 1 / (1 - ema) steps
    "dtype":        ("auto",     "float32"),   # of convolutions and matrix products; auto: bfloat16 where that is fast
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    data: str = flag(
        "",
        "directory of the batch files, or the one above cifar-10-batches-py; default $OUTLAST_DATA",
        group="data and output",
        first=True,
    )
    output_dir: str = flag("", "where to write; a job's output has precedence", also=("out_dir", "output"))
    model_file: str = flag("", "write the final weights to this file, too; with --evaluate: measure the weights in it")
    seed: int = flag(0, "seed of the first weights, the order of images and their augmentation")

    setting: Literal["modern", "workshop"] = flag(
        "modern", "the values of all flags below that are not given: see SETTINGS in the source", group="training"
    )
    epochs: int = flag(10, "passes over the training images", least=1)
    batch: int | None = flag(
        None, "images a step, over all ranks: resizing the world does not change the mathematics (modern: 128)", least=1
    )
    batch_size: int | None = flag(
        None, "images a step of each rank at the start of the run; later its batch stays as it is (workshop: 128)", least=1
    )
    microbatch: int = flag(16, "images that BatchNorm sees at once in any world; at most batch / microbatch ranks", least=1)
    lr: float | None = flag(None, "highest learning rate (0.05, workshop: 0.001)", least=0, also=("learning_rate",))
    schedule: Literal["triangle", "constant"] | None = flag(
        None, "triangle (modern): up in a fifth of the steps, then down in a line to 0; or constant (workshop)"
    )
    momentum: float | None = flag(None, "share of the last step's direction that is kept (0.9)", least=0)
    nesterov: bool | None = flag(None, "Nesterov's momentum (on; workshop: off)")
    weight_decay: float | None = flag(None, "pull of every weight towards 0 (0.0005, workshop: 0.0001)", least=0, also=("wd",))
    smoothing: float | None = flag(None, "share of the label spread over all classes (0.1, workshop: 0)", least=0, most=1)
    flip: bool | None = flag(None, "mirror half of the images; --no-flip for digits and texts (on; workshop: off)")
    shift: int | None = flag(None, "pixels that images move by at most (4, workshop: 0)", least=0, most=31)
    cutout: int | None = flag(None, "side of the square painted over each image, in pixels (8, workshop: 0)", least=0, most=32)
    whiten: bool | None = flag(None, "first filters that decorrelate pixels (on; workshop: off)")
    ema: float | None = flag(
        None, "final weights are an average over about 1 / (1 - ema) steps; 0: the last ones (0.98, workshop: 0)", least=0, most=1
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = flag(
        None, "of convolutions; auto (modern): bfloat16 where that is fast, else float32 (workshop)"
    )
    log_every: int = flag(5, "steps between two lines of the log", least=1, also=("print_freq", "log_interval"))

    evaluate: bool = flag(
        False,
        "measure model.pt, or else the newest checkpoint, on the test images",
        group="instead of training",
        also=("eval_only",),
    )
    checkpoint: str = flag("", "the checkpoint to measure: best, or a step")

    workers: int | None = flag(
        None, "ignored: images are in memory, no process loads them", least=0, group="flags of the workshop's script"
    )
    checkpoint_file: str = flag("", "ignored: checkpoints/ in the output has the newest ones, each complete")


def chosen(s: Settings) -> Settings:
    """The settings with what --setting chooses filled in. Raises OutlastError for two sizes of a batch."""
    if s.batch and s.batch_size:
        raise OutlastError(f"--batch {s.batch} and --batch-size {s.batch_size} are two sizes of a step; leave one of them out")
    sized = s.batch or s.batch_size
    column = ("modern", "workshop").index(s.setting)
    values = {
        name: row[column]
        for name, row in SETTINGS.items()
        if getattr(s, name) is None and not (sized and name in ("batch", "batch_size"))
    }
    return dataclasses.replace(s, **values)


# The network


def network(group: int = 16) -> nn.Sequential:
    """Pixels (b, 3, 32, 32) in 0 ... 1 to logits (b, 10). BatchNorm sees `group` images at once in training."""

    def block(i: int, m: int, o: int) -> list[nn.Module]:  # (b, i, h, w) -> (b, o, h/2, w/2)
        first, second = nn.Conv2d(i, m, 3, padding=1), nn.Conv2d(m, o, 3, padding=1)
        # The workshop has ReLU before the pool: the same numbers, from four times as many.
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
    return cast(nn.Sequential, layers.to(memory_format=torch.channels_last))  # convolutions on a CPU are faster so


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm of `group` images at a time: a rank may compute all of its images at once, and any world computes the same.

    In training it leaves its running statistics alone: `statistics` makes them from those of all ranks.
    """

    def __init__(self, channels: int, group: int) -> None:
        super().__init__(channels)
        self.group = group
        self.seen = torch.empty(0)
        """Mean and variance of this rank's images in the last step, (2, c)."""

    def forward(self, x: Tensor) -> Tensor:  # (b, c, h, w)
        if not self.training:
            return super().forward(x)
        parts = x.split(self.group)
        seen = torch.zeros(len(parts), 2, x.shape[1], device=x.device, dtype=self.weight.dtype)  # of each group
        found = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, (mean, variance) in zip(parts, seen, strict=True)
        ]
        sizes = torch.tensor([len(part) / len(x) for part in parts], device=x.device, dtype=seen.dtype)
        self.seen = (seen * sizes[:, None, None]).sum(0)
        return torch.cat(found)


@torch.no_grad()
def statistics(model: nn.Module, share: float) -> None:
    """Move BatchNorm's running statistics by a tenth towards those of the step, on all ranks.

    `share` of the step's images are this rank's. A collective where there are several ranks.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    seen = torch.cat([norm.seen for norm in norms], 1) * share  # (2, all channels)
    if dist.get_world_size() > 1:
        dist.all_reduce(seen)
    for norm, (mean, variance) in zip(norms, seen.split([norm.num_features for norm in norms], 1), strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean.lerp_(mean, 0.1)
        norm.running_var.lerp_(variance, 0.1)
        norm.num_batches_tracked += 1


@torch.no_grad()
def whiten(first: nn.Conv2d, x: Tensor) -> None:
    """Begin with filters that see decorrelated pixels of variance 1: principal components of patches of images `x`, bytes.

    Half of the filters are the main components, the others their negatives, as a ReLU follows. They are trained like all others.
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


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    torch.backends.cudnn.deterministic = True  # a resumed run has the same bits, on a GPU too
    s = chosen(s)
    writable(s.model_file)
    say(*ignored(s), f"reading {directory(s)}")
    images = cifar.train(directory(s))
    with session.open(seed=s.seed, quiet=True) as run:
        model = network(s.microbatch)
        if s.whiten:
            whiten(cast(nn.Conv2d, model[0]), torch.from_numpy(images.x[:256]))
        model.to(run.device)
        if run.device.type == "cpu":
            memory.keep_freed()
        net = run.ddp(model) if run.world_size > 1 else model
        optimizer = sgd(model, s)
        stream = Images((images.x, images.y), s, run.world_size)
        with results.hyperparameters(optimizer):
            step = first = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        where, dtype = device.of(run.device), device.dtype(str(s.dtype), run.device, run.gather)
        used = {"batch": stream.batch, "batch_size": None, "dtype": str(dtype).removeprefix("torch.")}
        run.parameters(settings.values(s) | used | {"classes": short(images.names)})
        steps, started, final = stream.total_steps, time.monotonic(), None
        clock, since = started, step

        for batch in stream:
            for group in optimizer.param_groups:
                group["lr"] = rate(s, step, steps)
            x, y, share = mine(batch, run.device)  # (b, 3, 32, 32) bytes, (b,)
            x = shown(augmented(s, x, batch))  # (b, 3, 32, 32)
            with where.autocast(dtype):
                logits = net(x)  # (b, 10)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=s.smoothing or 0.0) * share
            loss.backward()  # shares add up to the mean over the global batch
            optimizer.step()
            optimizer.zero_grad()
            statistics(model, share / run.world_size)
            average(optimizer, s.ema, step)
            where.mark_step()
            step += 1

            iteration = (step - 1) % stream.steps_per_epoch + 1
            if iteration % s.log_every == 0 or step == steps:
                now = time.monotonic()
                speed = (step - since) * stream.batch / (now - clock)
                clock, since = now, step
                final = run.log(step, reduce=True, loss=loss.detach(), images_per_s=speed)["loss"]  # of this step's global batch
                say(f"[{batch.epoch + 1}, {iteration:5d}] loss: {final:.3f}")
            else:
                run.log(step)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)

        finish(s, run, averaged(model, optimizer), step, final)
        say(f"Finished Training: {step - first} steps in {time.monotonic() - started:.1f} s, world of {run.world_size}")


def finish(s: Settings, run: Session, model: nn.Module, step: int, loss: float | None) -> None:
    """Write the final weights, by rank 0 and whole or not at all."""
    for name in filter(None, ("model.pt", s.model_file)):
        path = Path(name).absolute() if name == s.model_file else run.output / name
        say(f"saving model: {path}")
        run.export(model, path)
    if run.rank == 0:
        # null when this process had no step left to do
        results.write_json(run.output / "final.json", {"step": step, "loss": loss, "weights_sha256": results.sha256(model)})


class Images(Stream):
    """The order of images. A batch that was given for each rank is that of the ranks which began the run, to its end."""

    def __init__(self, arrays: tuple[NDArray[np.uint8], NDArray[np.int64]], s: Settings, ranks: int) -> None:
        batch = s.batch or (s.batch_size or 0) * ranks
        super().__init__(arrays, batch, microbatch=s.microbatch, seed=s.seed, epochs=s.epochs)
        self._kept = not s.batch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._kept and "batch" in state:
            self.batch = state["batch"]


def mine(batch: Batch, where: torch.device) -> tuple[Tensor, Tensor, float]:
    """This rank's images (b, 3, 32, 32) as bytes, their labels (b,), and their share: all shares sum to the number of ranks."""
    x, y = (torch.cat([data[i] for data, _ in batch.pieces]).to(where, non_blocking=True) for i in range(2))
    return x, y, sum(share for _, share in batch.pieces)


def augmented(s: Settings, x: Tensor, batch: Batch) -> Tensor:
    """Images (b, 3, 32, 32) with random changes that are a function of (seed, epoch, index): the same in any world."""
    index = torch.zeros(len(x), dtype=torch.int64)  # a rank without images in a short last batch computes others' for nothing
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
    """What the network sees of images that are kept as bytes: 0 ... 1."""
    return pixels.normalised(x, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def rate(s: Settings, step: int, steps: int) -> float:
    """The learning rate of a step."""
    assert s.lr is not None
    return s.lr if s.schedule == "constant" else s.lr * min((step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps), 1)


def sgd(model: nn.Module, s: Settings) -> torch.optim.SGD:
    """Stochastic gradient descent."""
    momentum, decay = s.momentum or 0.0, s.weight_decay or 0.0
    nesterov, fused = bool(s.nesterov and momentum), next(model.parameters()).device.type != "xla"
    return torch.optim.SGD(model.parameters(), s.lr or 0.0, momentum, weight_decay=decay, nesterov=nesterov, fused=fused)


AVERAGE = "average"
"""The name of a weight's average in the optimizer's state, where it is saved and restored with the momentum."""


@torch.no_grad()
def average(optimizer: torch.optim.Optimizer, ema: float | None, step: int) -> None:
    """Add the weights after a step to their averages; over fewer steps in the beginning, whose weights are the worst."""
    if not ema:
        return
    weights_ = [p for group in optimizer.param_groups for p in group["params"]]
    averages = [optimizer.state[p].setdefault(AVERAGE, p.clone(memory_format=torch.preserve_format)) for p in weights_]
    torch._foreach_lerp_(averages, weights_, 1 - min(ema, (step + 1) / (step + 10)))


@torch.no_grad()
def averaged(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> nn.Sequential:
    """A copy of the model with the averages of its weights, where the optimizer has any."""
    averages = [optimizer.state[p].get(AVERAGE, p) for p in model.parameters()]
    model = copy.deepcopy(model)
    for p, value in zip(model.parameters(), averages, strict=True):
        p.copy_(value)
    return model


def say(*lines: str) -> None:
    """Lines of the log, from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line, flush=True)


def ignored(s: Settings) -> list[str]:
    """What settings ask for, and a run does otherwise: a sentence for each."""
    found = []
    if s.workers is not None:
        found.append(f"workers {s.workers} is ignored: the images are in memory, and no process loads them")
    if s.checkpoint_file:
        found.append(
            f"checkpoint_file {s.checkpoint_file} is ignored: checkpoints are in the output, and a run resumes by itself"
        )
    return found


def writable(file: str) -> None:
    """Raise OutlastError for a file that cannot be written when the training has ended."""
    path = Path(file).absolute()
    there = next(each for each in path.parents if each.exists())
    if file and (path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK)):
        reason = "it is a directory" if path.is_dir() else f"{there} cannot be written"
        raise OutlastError(f"--model-file {file} cannot be written: {reason}; name a file in another directory")


# Evaluation


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Accuracy on the held-out images, overall and per class."""
    output = Path(os.environ.get(contract.Env.OUTPUT, "out"))
    print(f"reading {directory(s)}")
    images = cifar.test(directory(s))
    where = device.computing()
    model, name = trained(output, s.model_file, s.checkpoint)
    model.to(where).eval()  # BatchNorm's running statistics, not those of the test images

    parts = torch.from_numpy(images.x).split(250)  # (250, 3, 32, 32) each
    predicted = torch.cat([model(shown(x.to(where))).argmax(1).cpu() for x in parts]).numpy()  # (n,)
    right = predicted == images.y  # (n,)
    overall, classes = percent(right), {}
    for label, class_ in enumerate(short(images.names)):
        these = right[images.y == label]
        classes[class_] = {"images": len(these), "right": int(these.sum()), "accuracy": percent(these)}
    document = {"weights": name, "weights_sha256": results.sha256(model), "images": len(images), "accuracy": overall}
    results.write_json(output / "evaluation.json", document | {"classes": classes})

    print(f"Accuracy of the network on the {len(images)} test images: {overall} %")
    width = max(5, *map(len, classes))
    for class_, found in classes.items():
        print(f"Accuracy for class: {class_:<{width}s} is " + (f"{found['accuracy']} %" if found["images"] else "unknown"))
    print("Finished Testing")


def percent(right: NDArray[np.bool_]) -> float | None:
    """How many are right, to one decimal; None of none."""
    return round(100 * float(right.mean()), 1) if len(right) else None


def short(names: Sequence[str]) -> list[str]:
    """Names of classes; CIFAR-10's two long ones as most tables have them."""
    return [{"airplane": "plane", "automobile": "car"}.get(name, name) for name in names]


def trained(output: Path, file: str = "", name: str = "") -> tuple[nn.Sequential, str]:
    """A trained network: the weights in `file`, the checkpoint `name` of `output`, its model.pt, or else its newest checkpoint.

    Returns which weights they are as well. Raises OutlastError when there are none, and for a file that does not hold them.
    """
    if file and name:
        raise OutlastError(f"--model-file {file} and --checkpoint {name} are two models; leave one of them out")
    model = network()
    path = Path(file) if file else output / "model.pt"
    if file or (path.exists() and not name):
        load(model, path)
        return model, path.name
    path = results.checkpoint(output, name)
    optimizer = sgd(model, chosen(Settings()))
    checkpoint.restore(path, {"model": model, "optimizer": optimizer})
    return averaged(model, optimizer), path.name


def load(model: nn.Module, path: Path) -> None:
    """Load a file of weights, also one of the workshop's script. Raises OutlastError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)  # a GPU's weights on a CPU; no code from a pickle
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist; give the file that --model-file or a run has written") from error
    except Exception as error:  # whatever bytes that are no weights make torch do
        reason = str(error).splitlines()[0][:200]
        raise OutlastError(f"{path} cannot be read as weights: {reason}; give a file that torch.save has written") from error
    found = found.get("state_dict", found) if isinstance(found, dict) else {}
    found = {name.removeprefix("module.").removeprefix("network."): value for name, value in found.items()}
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    wrong = [name for name in wanted if getattr(found.get(name), "shape", None) != wanted[name]]
    if wrong or set(found) - set(wanted):
        which = ", ".join((wrong or sorted(set(found) - set(wanted)))[:3])
        raise OutlastError(f"{path} does not hold weights of this network ({which}); give those that this recipe has written")
    model.load_state_dict(found)


def directory(s: Settings) -> Path:
    """Where the images are."""
    named = s.data or os.environ.get(contract.Env.DATA)
    if not named:
        raise OutlastError(f"no data: give --data DIR or set {contract.Env.DATA}; outlast data get digits --to DIR makes some")
    return Path(named)


def main(argv: Sequence[str] | None = None) -> None:
    """Train or evaluate."""
    s = settings.parse(Settings, argv, __doc__)
    results.into(s.output_dir)
    (evaluate if s.evaluate else train)(s)


if __name__ == "__main__":
    settings.run(main)
