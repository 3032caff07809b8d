"""Trains and evaluates ResNet-18 to -152 on ImageNet, tiny-imagenet or any directory of images. Copy it and change it.

    outlast data get tiny-imagenet-200                               # or any DIR with train/CLASS/ and val/CLASS/
    outlast run examples/imagenet.yaml                               # two workers on this machine, made-up images
    outlast evaluate imagenet                                        # acc@1, acc@5 and the worst classes

    python -m outlast.recipes.imagenet data/tiny-imagenet-200 -a resnet18 --image-size 64 -b 256 --epochs 30
    torchrun --nproc-per-node 8 -m outlast.recipes.imagenet --data /data/imagenet -a resnet50 -b 2048 --lr 0.1
    python -m outlast.recipes.imagenet --synthetic -a resnet50 -b 64 --microbatch 64       # how fast a step is

The defaults follow the recipe that trains ResNet-50 in an hour (Goyal et al., "Accurate, large minibatch SGD", 2017), but with a
cosine schedule. For the recipe of older scripts, use --schedule step --label-smoothing 0 --no-zero-gamma --decay-norms. Training
writes checkpoints/ and metrics.jsonl, and at the end model.pt and final.json, to the job's output directory, or to --output_dir
(default: out) if there is no job. --evaluate writes evaluation.json to the same directory.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import images
from outlast.job import contract
from outlast.recipes import imagenet_model, pixels
from outlast.recipes.imagenet_model import ResNet, Statistics
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.loop import Log, Record
from outlast.recipes.shared.settings import flag
from outlast.training import Session, Stream, device
from outlast.training.samples.stream import Batch
from outlast.training.state import checkpoint

ALIASES = {
    "input_path": "data",
    "model_arch": "arch",
    "a": "arch",
    "num_data_workers": "workers",
    "j": "workers",
    "b": "batch_size",
    "wd": "weight_decay",
    "p": "print_freq",
    "checkpoint_file": "checkpoints are in the output, and a run resumes from the newest by itself",
    "dist_backend": "a run finds it: nccl on GPUs, gloo on CPUs",
    "c10d_backend": "a run finds it: nccl on GPUs, gloo on CPUs",
}
"""Flags of both versions of torchelastic's main.py, mapped to this recipe's names or to the reason why they are ignored."""


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory of images or packed images, or their URL; default $OUTLAST_DATA", first=True, group="data")
    output_dir: str = flag("", "output directory; a job's output has precedence")
    num_classes: int | None = flag(None, "outputs of the model; default: the classes of the data", least=1)
    synthetic: bool = flag(False, "synthetic images on the device, to measure the step without reading")
    synthetic_images: int = flag(12800, "synthetic images per epoch", least=1)
    pack: bool | None = flag(None, "decode all images once, to this machine's cache; default: if they need 16 GB or less")
    workers: int = flag(4, "processes per rank that decode unpacked images", least=0)
    skip_bad: bool = flag(False, "leave out images that cannot be decoded, and name them")
    seed: int = flag(0, "seed of the initial weights, the order of images and their augmentation")

    arch: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = flag("resnet18", "the model", group="model")
    weights: str = flag("", "initial weights: a file of torchvision, or a run's model.pt; a run always resumes by itself")
    zero_gamma: bool = flag(True, "initialize the last norm of each residual block with 0, so that the block equals its shortcut")

    image_size: int = flag(224, "side of the model's input in pixels", least=1, group="images")
    stored_size: int | None = flag(None, "side in pixels before cropping; default 8/7 of image_size; 0: unchanged", least=0)
    min_crop: float = flag(0.08, "minimum area of a training crop, as a fraction of the image", least=1e-4, most=1)
    flip: bool = flag(True, "mirror every other training image")
    val_crop: float = flag(0.875, "side of a validation crop, as a fraction of the shorter side", least=1e-4, most=1)

    epochs: int = flag(90, "passes over the training images", least=1, group="training")
    batch_size: int = flag(256, "images per step over all ranks", least=2)
    microbatch: int = flag(32, "images per BatchNorm group in any world; at most batch_size / microbatch ranks", least=2)
    lr: float = flag(0.1, "maximum learning rate per 256 images of a step; proportional to batch_size", least=0)
    schedule: Literal["cosine", "step"] = flag("cosine", "cosine to 0, or a tenth at each of --milestones")
    milestones: tuple[int, ...] = flag((30, 60, 80), "epochs at which the learning rate falls with --schedule=step", least=1)
    warmup_epochs: float | None = flag(None, "warm-up epochs; default 5, or a fifth of fewer than 25 epochs", least=0)
    momentum: float = flag(0.9, "momentum of SGD", least=0, most=0.9999999)
    weight_decay: float = flag(1e-4, "weight decay", least=0)
    decay_norms: bool = flag(False, "apply weight decay to norms and biases, too")
    label_smoothing: float = flag(0.1, "label smoothing", least=0, most=0.9999999)
    ema_decay: float = flag(0.0, "evaluate and save a moving average of the weights with this decay; 0: off", least=0, most=1)

    print_freq: int = flag(10, "steps between two log lines", least=1, group="logs")
    num_checkpoints: int = flag(1, "best checkpoints to keep, by acc@1; a job uses its checkpoint.best", least=0)

    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "auto: bfloat16 where it is faster", group="machine")
    channels_last: bool = flag(True, "channels-last memory format, which is faster on most devices")
    compile: bool = flag(False, "compile the model: a minute at the start, faster steps on GPUs")
    deterministic: bool = flag(False, "use only deterministic kernels on GPUs, which is slower; CPUs are always deterministic")

    evaluate: bool = flag(False, "evaluate the newest weights on all validation images", group="instead of training")
    checkpoint: str = flag("", "checkpoint to evaluate: best, or a step")

    @property
    def piece(self) -> int:
        """Number of images in a micro-batch."""
        return min(self.microbatch, self.batch_size)

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format for weights and images."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


# The data: images from files or packed shards, or synthetic images


PACKED_AT_ONCE = 16 * 2**30  # maximum bytes of decoded images to pack by default: 13 times tiny-imagenet, some minutes of work


def opened(s: Settings, run: Session | None = None) -> Pictures | Synthetic:
    """Open the data that the settings name. All ranks must call this if `run` is given. Raises OutlastError for unusable data."""
    if s.synthetic:
        return Synthetic(s)
    place = directory(s)
    if run is None:
        return Pictures(s, place)
    with run.alive():  # packing takes minutes
        pictures = Pictures(s, place)
    if pictures.packed:
        pixels.agreed(run, pictures.train, pictures.val)
    return pictures


def directory(s: Settings) -> str:
    """Return the path or URL of the images. A directory `train` beside `val` stands for its parent. Raises OutlastError."""
    named = s.data or os.environ.get(contract.Env.DATA, "")
    if not named:
        raise OutlastError(
            f"no data: give a directory (--data DIR), set {contract.Env.DATA}, or train on made ones with --synthetic; "
            "outlast data get tiny-imagenet-200 downloads some"
        )
    path = Path(named)
    if path.name == "train" and (path.parent / "val").is_dir():
        return str(path.parent)
    if "://" not in named and not path.is_dir():
        raise OutlastError(f"data {named}: there is no such directory; give one with train/CLASS/ and val/CLASS/")
    return named


class Pictures:
    """Images in files or packed shards. Provides datasets of them for a `Stream`, and augments micro-batches."""

    def __init__(self, s: Settings, place: str) -> None:
        self._s, self.place = s, place
        self.train: Any
        self.val: Any
        self.classes: list[str]  # names, by label
        if "://" in place or (Path(place) / shard_format.MANIFEST).exists():
            self.train, self.val = (pixels.packed(place, part) for part in ("train", "val"))
        else:
            size = stored(s, Path(place))
            self.train, self.val = (pixels.folder(place, part, size=size, skip_bad=s.skip_bad) for part in ("train", "val"))
            if s.pack or (s.pack is None and self._bytes(size) <= PACKED_AT_ONCE):
                packed = pixels.pack(place, size=size, skip_bad=s.skip_bad)
                self.train, self.val = (pixels.packed(packed, part) for part in ("train", "val"))
        self.packed = isinstance(self.train, pixels.Packed)
        self.bad = int(self.train.bad) if self.packed else 0  # undecodable images that packing has left out
        self.classes = list(self.train.classes) or [str(label) for label in range(s.num_classes or 0)]
        if not self.classes:
            raise OutlastError(f"{place} does not say which classes there are; give their number with --num-classes")
        self.train.classes = self.val.classes = self.classes  # packed images compare their labels with these

    def _bytes(self, size: int | None) -> int:
        side = size or int(self.train[0].x.shape[0])
        return (len(self.train) + len(self.val)) * 3 * side * side

    def bad_names(self) -> list[str]:
        """Return the names of the images that this rank could not decode, or an empty list if images are packed."""
        return [] if self.packed else [*self.train.bad, *self.val.bad]

    def batch(self, piece: Any, epoch: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's images (b, 3, s, s) and labels (b,), on its device.

        The images are augmented if `epoch` is given. Validation passes None.
        """
        s = self._s
        x, y, index, aspect = piece  # (b, h, w, 3) bytes, (b,), (b,), (b,)
        if epoch is None:
            x = pixels.crop_resize(x, pixels.centre(aspect, s.val_crop), s.image_size)
        else:
            u = pixels.draws(s.seed, epoch, index, pixels.CROP + 1)
            boxes = pixels.boxes(u[:, : pixels.CROP], aspect, (s.min_crop, 1.0))
            x = pixels.crop_resize(x, boxes, s.image_size, mirrored=u[:, -1] < 0.5 if s.flip else None)
        return pixels.normalised(x, dtype=dtype, memory_format=s.memory_format), y


def stored(s: Settings, root: Path) -> int | None:
    """Return the side in pixels to which images are resized before cropping; None keeps their original size."""
    if s.stored_size is not None:
        return s.stored_size or None
    if (images.inside(root) / "val" / "val_annotations.txt").exists():  # tiny-imagenet: all are 64 x 64
        return None
    return s.image_size * 8 // 7  # 256 for 224, as is common


class Synthetic:
    """Synthetic images, generated once on the device, so that a measurement covers only the step."""

    place = "synthetic"
    bad = 0

    def __init__(self, s: Settings) -> None:
        self._s, self._pool = s, torch.empty(0)
        self.train = np.arange(s.synthetic_images)
        self.val = np.arange(max(1, s.synthetic_images // 20))
        self.classes = [str(label) for label in range(s.num_classes or 1000)]

    def bad_names(self) -> list[str]:
        """Return an empty list, because no image is decoded."""
        return []

    def batch(self, piece: Any, epoch: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return noise (b, 3, s, s), the same in every micro-batch, and labels (b,) that the model can memorize."""
        if not len(self._pool):
            draw = torch.Generator().manual_seed(self._s.seed)
            pool = torch.randn(self._s.piece, 3, self._s.image_size, self._s.image_size, generator=draw)
            self._pool = pool.to(piece.device, dtype, memory_format=self._s.memory_format)
        labels = torch.arange(len(piece), device=piece.device) % len(self.classes)
        return self._pool[: len(piece)], labels


Images = Pictures | Synthetic


# Training


class Training(loop.Recipe):
    """A training run, whose methods `loop.train` calls."""

    def __init__(self, s: Settings, run: Session) -> None:
        super().__init__(s, run)
        torch.backends.cudnn.benchmark = not s.deterministic
        self.data = data = opened(s, run)
        self.log.line(f"=> creating model: {s.arch}")
        self.model, self.record = first(s, data, self.log)
        placed(s, self.model, run.device)
        self.net = loop.parallel("ddp", run, self.model, compiled=s.compile)
        decays = loop.groups(self.model, s.weight_decay, s.weight_decay if s.decay_norms else 0.0)
        fused = run.device.type != "xla"
        self.optimizer = torch.optim.SGD(decays, lr=s.lr, momentum=s.momentum, fused=fused)
        self.stream = Stream(
            data.train, batch=s.batch_size, microbatch=s.piece, seed=s.seed, epochs=s.epochs, workers=workers(s, data.train)
        )
        self.ema = copy.deepcopy(self.model) if s.ema_decay else None  # running average of the weights
        self.statistics = Statistics(self.model)
        self.dtype = device.dtype(s.dtype, run.device, run.gather)
        self.used = {"dtype": str(self.dtype).removeprefix("torch.")}

    def state(self) -> dict[str, Any]:
        return super().state() | ({"ema": self.ema} if self.ema else {})

    def begin(self, step: int) -> None:
        s, data, steps = self.s, self.data, self.stream.total_steps
        count = sum(p.numel() for p in self.model.parameters())
        self.log.line(
            f"{count:,} parameters, {self.model.classes} classes; {len(data.train):,} images to train on and {len(data.val):,} "
            f"to measure; a step has {s.batch_size}, {-(-s.batch_size // s.piece)} x {s.piece}, over {self.run.world_size} ranks"
        )
        if data.bad:
            self.log.line(f"left out {data.bad} images that cannot be decoded")
        if len(data.classes) < 5:
            self.log.line(f"Acc@5 is not measured: of {len(data.classes)} classes, the first five are all of them")
        done = f"=> going on after step {step} of {steps}" if step else "=> no checkpoint yet, starting from epoch 0"
        self.log.line(done + (f": all {s.epochs} epochs are done; --epochs sets more" if step >= steps else ""))

    def rate(self, step: int, batch: Batch) -> float:
        return rate(self.s, position(batch, self.stream), self.stream.steps_per_epoch)

    def update(self, step: int, batch: Batch) -> None:
        s, where = self.s, device.of(self.run.device)
        self.optimizer.zero_grad()
        self.loss, self.right = torch.zeros(2, device=self.run.device).unbind()
        self.statistics.begin()
        for piece, share in batch.split(self.net):
            x, y = self.data.batch(piece, batch.epoch, self.dtype)  # (b, 3, s, s), (b,)
            if self.net.training != (len(x) > 1):  # an epoch may end with one image, which needs the running statistics
                self.net.train(len(x) > 1)
            with where.autocast(self.dtype):
                logits = self.net(x)  # (b, classes)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=s.label_smoothing)
            (loss * share).backward()  # shares add up to the mean over the global batch
            self.statistics.add(share)
            self.loss = self.loss + loss.detach() * share
            self.right = self.right + (logits.detach().argmax(1) == y).float().mean() * share
        self.statistics.end(self.run.world_size)
        self.optimizer.step()
        if self.ema is not None:
            average(self.ema, self.model, min(s.ema_decay, (1 + step) / (10 + step)))
        where.mark_step()

    def report(self, step: int, batch: Batch) -> None:
        """Log a step every `print_freq` iterations. `data_idx` is the number of images in the epoch's earlier steps."""
        s, log = self.s, self.log
        iteration = batch.start // s.batch_size
        log.done += batch.size
        if iteration % s.print_freq and step != self.stream.total_steps:
            self.run.log(step)
            return
        measures = {"loss": self.loss, "train_acc1": self.right * 100, "lr": self.optimizer.param_groups[0]["lr"]}
        values = self.run.log(step, reduce=True, **measures, images_per_s=log.speed())
        if not math.isfinite(values["loss"]):
            raise OutlastError(
                f"the loss of step {step} is {values['loss']}; lower --lr ({s.lr} per 256 images) or raise --warmup-epochs"
            )
        self.record.losses = {"loss": values["loss"]}
        log.line(
            f"epoch: {batch.epoch}, iteration: {iteration}, data_idx: {batch.start}, loss: {values['loss']:.4f}, "
            f"Acc@1: {values['train_acc1']:.2f}, lr: {values['lr']:.4g}, {values['images_per_s']:.1f} images/s"
        )

    def due(self, step: int, batch: Batch) -> bool:
        if batch.ends_epoch:
            self.record.epoch = batch.epoch
        return batch.ends_epoch

    def measure(self, step: int) -> float:
        """Return acc@1 on all validation images, which are divided among the ranks."""
        run, record = self.run, self.record
        batches = validation(self.s, self.data).batches(run.rank, run.world_size)
        with run.alive():
            part = measured(self.dtype, self.data, self.ema or self.model, batches, run.device)
        record.values = values(sum(run.gather(part)))
        self.log.line(f" * {shown(record.values)}")
        run.log(step, **record.values)
        acc1 = float(record.values["acc1"])
        if acc1 > record.best:
            record.best, record.best_epoch = acc1, record.epoch
            self.log.line(f"=> best model found at epoch {record.epoch}")
        return acc1

    def remember(self) -> None:
        """Add to the record the names of the images that any rank has skipped."""
        if self.s.skip_bad:
            self.record.left_out = sorted({*self.record.left_out, *itertools.chain(*self.run.gather(self.data.bad_names()))})

    def finish(self, step: int) -> None:
        model, record = self.ema or self.model, self.record
        self.run.export(model)
        last = {"step": step, "epochs": record.epoch + 1, "loss": record.losses.get("loss"), **record.values}
        best = {"best_acc1": record.best, "best_epoch": record.best_epoch, "left_out": self.data.bad + len(record.left_out)}
        results.final(self.run, model, **last, **best)


def rate(s: Settings, step: int, per_epoch: int) -> float:
    """Return a step's learning rate: a linear warm-up, then a cosine to 0, or a drop to a tenth at each milestone."""
    epochs = min(5.0, s.epochs / 5) if s.warmup_epochs is None else s.warmup_epochs
    highest, warm = s.lr * s.batch_size / 256, round(epochs * per_epoch)
    if s.schedule == "step" and step >= warm:
        return highest * 0.1 ** sum(step >= epoch * per_epoch for epoch in s.milestones)
    return loop.rate(highest, step, s.epochs * per_epoch, warm)


def position(batch: Any, stream: Stream) -> int:
    """Return the number of steps before a batch, counted with the current batch size."""
    return int(batch.epoch * stream.steps_per_epoch + batch.start // stream.batch)


@torch.no_grad()
def average(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the running averages of weights and statistics towards the current values."""
    for mean, now in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(now, 1 - decay)
        else:
            mean.copy_(now)


def first(s: Settings, data: Images, log: Log) -> tuple[ResNet, Record]:
    """Return the initial model and the record of a new run. Raises OutlastError if the model has too few outputs for the data."""
    needed = len(data.classes)
    classes = needed if s.num_classes is None else s.num_classes
    if classes < needed:
        raise OutlastError(
            f"num_classes ({classes}) is below the {needed} classes of {data.place}; leave it out, or give at least that"
        )
    model = ResNet(s.arch, classes, zero_gamma=s.zero_gamma)
    if s.weights:
        omitted = imagenet_model.load(model, Path(s.weights))
        log.line(f"=> using weights of {s.weights}" + (f", without {omitted}" if omitted else ""))
    about = {"arch": s.arch, "outputs": classes, "classes": list(data.classes), "ema": bool(s.ema_decay)}
    measured_ = {"epoch": -1, "best": -1.0, "best_epoch": -1, "values": {}, "left_out": []}
    return model, Record({"classes": "other classes", "ema": "a run of another --ema-decay"}, **about, **measured_)


def placed(s: Settings, model: nn.Module, where: torch.device) -> None:
    """Move a model to a device, in the settings' memory format."""
    model.to(where, memory_format=s.memory_format)  # type: ignore[call-overload] # as torch documents it


def workers(s: Settings, part: Any) -> int:
    """Return the number of processes that read one part of the data."""
    return s.workers if isinstance(part, pixels.Folder) else 0


# Measuring


def values(sums: Tensor) -> dict[str, float]:
    """Return the mean loss, acc@1 and, with at least five classes, acc@5 in percent, from the sums of `measured`."""
    (loss, top5), (images, right) = sums[:2].tolist(), sums[2:].view(2, -1)
    n = images.sum().item()
    means = {"val_loss": loss / n, "acc1": 100 * right.sum().item() / n}
    return means | ({"acc5": 100 * top5 / n} if len(images) >= 5 else {})


def shown(means: Mapping[str, float]) -> str:
    """Return the accuracies as text."""
    return f"Acc@1 {means['acc1']:.3f}" + (f" Acc@5 {means['acc5']:.3f}" if "acc5" in means else "")


def validation(s: Settings, data: Images) -> Stream:
    """Return a stream of all validation images, in order. Each image is read by a single rank."""
    return Stream(data.val, batch=s.batch_size, microbatch=s.piece, shuffle=False, workers=workers(s, data.val))


@torch.no_grad()
def measured(dtype: torch.dtype, data: Images, model: ResNet, batches: Iterable[Any], where: torch.device) -> Tensor:
    """Return sums over this rank's validation images: loss, top-5 hits, images by class, and top-1 hits by class.

    The result is (2 + 2 classes,), float64 on the CPU. The results of all ranks add up to the total.
    """
    classes = len(data.classes)
    loss, top5 = torch.zeros((), dtype=torch.float64, device=where), torch.zeros((), dtype=torch.int64, device=where)
    images, right = torch.zeros(2, classes, dtype=torch.int64, device=where)
    model.eval()  # BatchNorm's running statistics, not those of the batch
    for batch in batches:
        if not len(batch.indices):
            continue  # other ranks have the images
        for piece, _ in batch.split(model):
            x, y = data.batch(piece, None, dtype)  # (b, 3, s, s), (b,)
            with device.of(where).autocast(dtype):
                logits = model(x)
            logits = logits.float()  # (b, classes)
            best = logits.topk(min(5, logits.shape[1])).indices == y[:, None]  # (b, 5)
            loss += F.cross_entropy(logits, y, reduction="sum")
            top5 += best.sum()
            images += torch.bincount(y, minlength=classes)
            right += torch.bincount(y[best[:, 0]], minlength=classes)
    model.train()
    return torch.cat((torch.stack((loss, top5)), images, right)).double().cpu()


def evaluate(s: Settings) -> None:
    """Measure acc@1 and acc@5 on all validation images. Prints the worst classes, and writes evaluation.json with all classes."""
    where, data = device.computing(), opened(s)
    name, model, names = newest(s, data, results.output())
    if list(names) != list(data.classes):
        other = next(iter(sorted(set(names) ^ set(data.classes))), "the same in another order")
        raise OutlastError(
            f"{name} knows {len(names)} classes, and the data have {len(data.classes)} ({other}); give the data it was trained on"
        )
    placed(s, model, where)
    sums = measured(device.dtype(s.dtype, where), data, model, validation(s, data).batches(0, 1), where)
    means, counts = values(sums), sums[2:].view(2, -1).long().T.tolist()
    by_class = {
        label: {"images": n, "right": right, "accuracy": round(100 * right / n, 3) if n else None}
        for label, (n, right) in zip(data.classes, counts, strict=True)
    }
    results.evaluation(name, model, arch=model.arch, images=len(data.val), **means, classes=by_class)
    print(f"{name}: {shown(means)} on {len(data.val):,} images, loss {means['val_loss']:.4f}")
    if "acc5" not in means:
        print(f"Acc@5 is not measured: of {len(data.classes)} classes, the first five are all of them")
    worst = sorted((right / n, label) for label, (n, right) in zip(data.classes, counts, strict=True) if n)[:10]
    print("the worst classes:" if len(worst) < len(by_class) else "by class:")
    for share, label in worst:
        print(f"  {label:<24s} {share:8.3%} of {by_class[label]['images']}")


def newest(s: Settings, data: Images, output: Path) -> tuple[str, ResNet, Sequence[str]]:
    """Return the name, model and classes of --weights, else of --checkpoint, else of the newest valid checkpoint."""
    if s.weights:
        model = ResNet(s.arch, s.num_classes or len(data.classes))
        if omitted := imagenet_model.load(model, Path(s.weights)):
            raise OutlastError(f"--weights {s.weights} cannot be measured here without {omitted}")
        return Path(s.weights).name, model, data.classes
    path = results.checkpoint(output, s.checkpoint)
    record = Record.read(path)
    model = ResNet(record.arch, record.outputs)
    model.load_state_dict(checkpoint.read(path, "ema" if record.ema else "model"))
    return path.name, model, record.classes


def main(argv: Sequence[str] | None = None) -> None:
    s = settings.parse(Settings, argv, __doc__, ALIASES)
    results.into(s.output_dir, f"{s.num_checkpoints} max acc1")
    if s.evaluate:
        evaluate(s)
    else:
        loop.train(Training, s)


if __name__ == "__main__":
    results.run(main)
