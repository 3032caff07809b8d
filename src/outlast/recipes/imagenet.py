"""ResNet-18 to -152 on ImageNet, tiny-imagenet or any directory of images: trains and measures. Copy it and change it.

    outlast data get tiny-imagenet-200                               # or any DIR with train/CLASS/ and val/CLASS/
    outlast run examples/imagenet.yaml                               # two workers on this machine, made-up images
    outlast evaluate imagenet                                        # acc@1, acc@5 and the worst classes

    python -m outlast.recipes.imagenet data/tiny-imagenet-200 -a resnet18 --image-size 64 -b 256 --epochs 30
    torchrun --nproc-per-node 8 -m outlast.recipes.imagenet --data /data/imagenet -a resnet50 -b 2048 --lr 0.1
    python -m outlast.recipes.imagenet --synthetic -a resnet50 -b 64 --microbatch 64       # how fast a step is

Defaults are the recipe that trains ResNet-50 in an hour (Goyal et al., "Accurate, large minibatch SGD", 2017) with a cosine. That
of older scripts is: --schedule step --label-smoothing 0 --no-zero-gamma --decay-norms. Writes to the job's output, --output_dir
without a job (default: out): checkpoints/, metrics.jsonl, at the end model.pt and final.json; evaluation.json with --evaluate.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from outlast import checkpoints, contract
from outlast.errors import OutlastError
from outlast.recipes import imagenet_data, imagenet_model, memory, pixels, results, settings
from outlast.recipes.imagenet_data import Images
from outlast.recipes.imagenet_model import ResNet, Statistics
from outlast.recipes.settings import flag
from outlast.training import Session, Stream, checkpoint, device, session


@dataclass(frozen=True)
class Settings:
    data: str = flag(
        "", "directory of images, or directory or URL of packed ones; default $OUTLAST_DATA", also=("input_path",), first=True,
        group="data and output",
    )  # fmt: skip
    output_dir: str = flag("", "where to write; a job's output has precedence", also=("out_dir", "output"))
    num_classes: int | None = flag(None, "outputs of the model; default: the classes of the data", least=1)
    synthetic: bool = flag(False, "made images, on the device: reading costs nothing, and what is measured is the step")
    synthetic_images: int = flag(12800, "images of an epoch of these", least=1)
    pack: bool | None = flag(None, "decode all images once, to this machine's cache; default: if that is 16 GB or less")
    workers: int = flag(4, "processes per rank that decode images which are not packed", least=0, also=("num_data_workers", "j"))
    skip_bad: bool = flag(False, "leave out images that cannot be decoded, and name them")
    seed: int = flag(0, "seed of the first weights, the order of images and their augmentation")

    arch: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = flag(
        "resnet18", "the model", also=("model_arch", "a"), group="model"
    )
    weights: str = flag("", "file of first weights: torchvision's, or a run's model.pt; a run always resumes by itself")
    zero_gamma: bool = flag(True, "the last norm of every residual block begins with 0, so that the block begins as its shortcut")

    image_size: int = flag(224, "pixels a side that the model sees", least=1, group="images")
    stored_size: int | None = flag(
        None, "pixels a side they are kept with until they are cropped; default 8/7 of that; 0: as they are", least=0
    )
    min_crop: float = flag(0.08, "smallest share of an image's area that a training crop has", least=1e-4, most=1)
    flip: bool = flag(True, "mirror every other training image")
    val_crop: float = flag(0.875, "share of the shorter side that the crop of a validation image has", least=1e-4, most=1)

    epochs: int = flag(90, "passes over the training images", least=1, group="training")
    batch_size: int = flag(256, "images of a step over all ranks", least=2, also=("batch", "b"))
    microbatch: int | None = flag(
        None, "images that BatchNorm sees at once, in any world; at most batch_size / microbatch ranks; default 32", least=2
    )
    lr: float = flag(
        0.1, "highest learning rate per 256 images of a step: it grows with batch_size", least=0, also=("learning_rate",)
    )
    schedule: Literal["cosine", "step"] = flag("cosine", "how it falls: to 0, or to a tenth at each of --milestones")
    milestones: tuple[int, ...] = flag((30, 60, 80), "epochs at which it falls with --schedule=step", least=1)
    warmup_epochs: float | None = flag(None, "epochs in which it rises; default 5, a fifth of --epochs if that is less", least=0)
    momentum: float = flag(0.9, "share of the last step's direction that is kept", least=0, most=0.9999999)
    weight_decay: float = flag(1e-4, "pull of weights towards 0", least=0, also=("wd",))
    decay_norms: bool = flag(False, "norms and biases are pulled, too")
    label_smoothing: float = flag(0.1, "share of a label that is spread over all classes", least=0, most=0.9999999)
    ema_decay: float = flag(
        0.0, "measure and keep a running mean of the weights with this decay, e.g. 0.9999; 0: none", least=0, most=1
    )

    print_freq: int = flag(
        10, "steps between two lines of the log", least=1, also=("log_interval", "log_every", "p"), group="logs"
    )
    num_checkpoints: int | None = flag(
        None, "checkpoints of the highest acc@1 to keep beside the newest; default 1, in a job its checkpoint.best", least=0
    )
    checkpoint_file: str = flag("", "ignored: checkpoints are in the output, and a run resumes from the newest by itself")

    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of convolutions; auto: bfloat16 where that is faster", group="machine"
    )
    channels_last: bool = flag(True, "keep the channels of a pixel together in memory, which is faster almost everywhere")
    compile: bool = flag(False, "compile the model: a minute at the start, faster steps on GPUs")
    deterministic: bool = flag(False, "only kernels that are exact again on GPUs, at some speed; CPUs always are")
    dist_backend: str = flag("", "ignored: a run finds it, nccl on GPUs, gloo on CPUs", also=("c10d_backend",))

    evaluate: bool = flag(
        False, "measure the newest weights on all validation images", group="instead of training", also=("eval_only",)
    )
    checkpoint: str = flag("", "the checkpoint to measure: best, or a step")

    @property
    def piece(self) -> int:
        """Images of a micro-batch."""
        return min(self.microbatch or 32, self.batch_size)

    @property
    def memory_format(self) -> torch.memory_format:
        """Of weights and images."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


# Training


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last epoch."""
    torch.backends.cudnn.benchmark = not s.deterministic
    if s.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    with session.open(seed=s.seed, quiet=True) as run:
        log = Log(run)
        for sentence in ignored(s, run):
            log.line(sentence)
        data = imagenet_data.opened(s, run)
        log.line(f"=> creating model: {s.arch}")
        model, record = first(s, data, log)
        placed(s, model, run.device)
        if run.device.type == "cpu":
            memory.keep_freed()
        net = run.ddp(model) if run.world_size > 1 else model
        if s.compile:
            model.compile()
        optimizer = torch.optim.SGD(groups(s, model), lr=s.lr, momentum=s.momentum, fused=run.device.type != "xla")
        stream = Stream(
            data.train, batch=s.batch_size, microbatch=s.piece, seed=s.seed, epochs=s.epochs, workers=workers(s, data.train)
        )
        state: dict[str, Any] = {"model": net, "optimizer": optimizer, "stream": stream, "record": record}
        ema = copy.deepcopy(model) if s.ema_decay else None
        with results.hyperparameters(optimizer):
            step = run.resume(state | ({"ema": ema} if ema else {}))
        trainer = Trainer(s, run, log, data, model, ema, net, optimizer, stream, record)
        run.parameters(settings.values(s) | {"dtype": str(trainer.dtype).removeprefix("torch.")})
        log.begin(s, model, data, step, stream)
        if record.ended == step > record.measured:  # whoever ended the epoch had no time to
            trainer.measure(step)
        for batch in stream:
            trainer.update(step, batch)
            step += 1
            trainer.report(step, batch, last=step == stream.total_steps)
            if batch.ends_epoch:
                record.epoch, record.ended = batch.epoch, step
            leaving = run.interrupted()
            if batch.ends_epoch and not leaving:
                trainer.measure(step)
            elif leaving or run.due(step):
                trainer.save(step, math.nan)  # not measured, so it is never the best
        trainer.finish(step)


@dataclass
class Trainer:
    """The parts of a step."""

    s: Settings
    run: Session
    log: Log
    data: Images
    model: ResNet
    """The module itself, on which nothing is exchanged between ranks."""
    ema: ResNet | None
    """The running mean of its weights."""
    net: nn.Module
    """What exchanges gradients."""
    optimizer: torch.optim.Optimizer
    stream: Stream
    record: Record

    def __post_init__(self) -> None:
        self.statistics = Statistics(self.model)
        self.dtype = device.dtype(self.s.dtype, self.run.device, self.run.gather)
        self.loss = self.right = torch.zeros((), device=self.run.device)

    def update(self, step: int, batch: Any) -> None:
        """One step: gradients of all micro-batches, then SGD."""
        s = self.s
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, position(batch, self.stream), self.stream.steps_per_epoch)
        self.optimizer.zero_grad()
        self.loss, self.right = torch.zeros_like(self.loss), torch.zeros_like(self.right)
        self.data.check(batch.pieces)
        self.statistics.begin()
        for piece, share in batch.split(self.net):
            x, y = self.data.batch(piece, batch.epoch, self.dtype)  # (b, 3, s, s), (b,)
            if self.net.training != (len(x) > 1):  # the last image of an epoch may be alone: then by the running statistics
                self.net.train(len(x) > 1)
            with device.of(self.run.device).autocast(self.dtype):
                logits = self.net(x)  # (b, classes)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=s.label_smoothing)
            (loss * share).backward()  # shares add up to the mean over the global batch
            self.statistics.add(share)
            self.loss += loss.detach() * share
            self.right += (logits.detach().argmax(1) == y).float().mean() * share
        self.statistics.end(self.run.world_size)
        self.optimizer.step()
        if self.ema is not None:
            average(self.ema, self.model, min(s.ema_decay, (1 + step) / (10 + step)))
        device.of(self.run.device).mark_step()

    def report(self, step: int, batch: Any, *, last: bool) -> None:
        """Log a step that is due."""
        iteration = batch.start // self.s.batch_size
        self.log.images += batch.size
        if iteration % self.s.print_freq and not last:
            self.run.log(step)
            return
        lr = self.optimizer.param_groups[0]["lr"]
        values = self.run.log(
            step, reduce=True, loss=self.loss, train_acc1=self.right * 100, lr=lr, images_per_s=self.log.speed()
        )
        if not math.isfinite(values["loss"]):
            raise OutlastError(
                f"the loss of step {step} is {values['loss']}; lower --lr ({self.s.lr} per 256 images) or raise --warmup-epochs"
            )
        self.record.loss = values["loss"]
        self.log.iteration(batch, iteration, values)

    def measure(self, step: int) -> None:
        """Accuracy on all validation images over all ranks; then a checkpoint, with acc@1 as its metric."""
        run, record = self.run, self.record
        batches = validation(self.s, self.data).batches(run.rank, run.world_size)
        with run.alive():
            part = measured(self.dtype, self.data, self.ema or self.model, batches, run.device)
        tally = sum(run.gather(part), Tally(len(self.data.classes)))
        self.log.line(f" * {tally}")
        record.values, record.measured = tally.values(), step
        run.log(step, **cast(dict[str, Any], record.values))
        acc1 = record.values["acc1"]
        if acc1 > record.best:
            record.best, record.best_epoch = acc1, record.epoch
            self.log.line(f"=> best model found at epoch {record.epoch}")
        self.save(step, acc1)
        self.log.clock()

    def save(self, step: int, acc1: float) -> None:
        """Save, with the images that any rank has left out."""
        if self.s.skip_bad:
            self.record.left_out = sorted({*self.record.left_out, *itertools.chain(*self.run.gather(self.data.met()))})
        self.run.save(step, metric=acc1)

    def finish(self, step: int) -> None:
        """Write the results."""
        kept, run, record = self.ema or self.model, self.run, self.record
        run.export(kept)
        if run.rank == 0:
            known = {"step": step, "epochs": record.epoch + 1, "loss": record.loss, **record.values}
            best = {"best_acc1": record.best, "best_epoch": record.best_epoch, "left_out": self.data.bad + len(record.left_out)}
            results.write_json(run.output / "final.json", {**known, **best, "weights_sha256": results.sha256(kept)})


def rate(s: Settings, step: int, per_epoch: int) -> float:
    """The learning rate of a step: a line upwards, then a cosine to 0 or a tenth at each milestone.

    It is in proportion to the images of a step, not to the number of ranks, and without warm-up from the first step on.
    """
    highest = s.lr * s.batch_size / 256
    warm = round(warmup(s) * per_epoch)
    if step < warm:
        return highest * (step + 1) / (warm + 1)
    if s.schedule == "step":
        return highest * 0.1 ** sum(step >= epoch * per_epoch for epoch in s.milestones)
    return highest * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, s.epochs * per_epoch - warm)))) / 2


def warmup(s: Settings) -> float:
    """Epochs of the line upwards."""
    return min(5.0, s.epochs / 5) if s.warmup_epochs is None else s.warmup_epochs


def position(batch: Any, stream: Stream) -> int:
    """Steps before this one, as if all had been of the present batch size."""
    return int(batch.epoch * stream.steps_per_epoch + batch.start // stream.batch)


def groups(s: Settings, model: nn.Module) -> list[dict[str, Any]]:
    """Parameters for the optimizer: those that are pulled towards 0, and norms and biases, which are not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": s.weight_decay},
        {"params": vectors, "weight_decay": s.weight_decay if s.decay_norms else 0.0},
    ]


@torch.no_grad()
def average(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Move a running mean of weights and statistics towards those of now."""
    for mean, now in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(now, 1 - decay)
        else:
            mean.copy_(now)


def first(s: Settings, data: Images, log: Log) -> tuple[ResNet, Record]:
    """The model before the first step."""
    found = len(data.classes)
    classes = found if s.num_classes is None else s.num_classes
    if classes < found:
        raise OutlastError(
            f"num_classes ({classes}) is below the {found} classes of {data.place}; leave it out, or give at least that"
        )
    model = ResNet(s.arch, classes, zero_gamma=s.zero_gamma)
    if s.weights:
        omitted = imagenet_model.load(model, Path(s.weights))
        log.line(f"=> using weights of {s.weights}" + (f", without {omitted}" if omitted else ""))
    return model, Record(s.arch, classes, list(data.classes), bool(s.ema_decay))


def placed(s: Settings, model: nn.Module, where: torch.device) -> None:
    """Move a model to a device, in the settings' memory format."""
    model.to(where, memory_format=s.memory_format)  # type: ignore[call-overload] # as torch documents it


def workers(s: Settings, part: Any) -> int:
    """Processes that read a part of the data."""
    return s.workers if isinstance(part, pixels.Folder) else 0


def ignored(s: Settings, run: Session) -> list[str]:
    """What settings ask for, and a run does otherwise: a sentence for each."""
    found = []
    if s.dist_backend:
        found.append(f"dist_backend {s.dist_backend} is ignored: a run finds it, nccl on GPUs and gloo on CPUs")
    if s.checkpoint_file:
        where = run.output / contract.CHECKPOINTS
        found.append(
            f"checkpoint_file {s.checkpoint_file} is ignored: checkpoints are in {where}, each with the whole state of a run"
        )
    kept = checkpoints.Retention.parse(os.environ)
    if s.num_checkpoints not in (None, kept.best):
        found.append(f"num_checkpoints {s.num_checkpoints} is ignored: the job's checkpoint.best is {kept.best}")
    if kept.best and kept.mode == "min":
        found.append("the job keeps the checkpoints of the lowest acc1 as its best; write `mode: max` beside checkpoint.best")
    return found


class Record:
    """What a run remembers beside weights: what its model is, and what it has measured."""

    def __init__(self, arch: str = "", outputs: int = 0, classes: Sequence[str] = (), ema: bool = False) -> None:
        self.arch, self.outputs, self.classes, self.ema = arch, outputs, list(classes), ema
        self.epoch = -1
        """The last epoch that has ended, counted from 0."""
        self.ended = self.measured = -1
        """The steps at which an epoch has ended last, and at which the model was measured last."""
        self.best, self.best_epoch = -1.0, -1
        """Highest acc@1, in percent."""
        self.loss = math.nan
        self.values: dict[str, float] = {}
        """What was measured last."""
        self.left_out: list[str] = []
        """Images that could not be decoded as they were read."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        return {**vars(self), "classes": list(self.classes), "values": dict(self.values), "left_out": list(self.left_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved. Raises OutlastError when it was saved by a run of other classes, or with --ema-decay."""
        if self.classes and (other := sorted(set(self.classes) ^ set(state["classes"]))):  # as many, or the model would not fit
            raise OutlastError(
                f"the run began with other classes than the data have now: {other[0]} is in one of the two only; give the data "
                "it began with, or begin a new run"
            )
        if self.classes and state["ema"] and not self.ema:
            raise OutlastError("the run began with --ema-decay, and has none now; give it again, or begin a new run")
        vars(self).update(state)


class Log:
    """Lines for people, on the screen of rank 0."""

    def __init__(self, run: Session) -> None:
        self._run = run
        self.images = 0
        """Since the last line."""
        self._since = time.monotonic()

    def line(self, text: str) -> None:
        if self._run.rank == 0:
            print(text, flush=True)

    def begin(self, s: Settings, model: ResNet, data: Images, step: int, stream: Stream) -> None:
        """What is trained, on how much."""
        count = sum(p.numel() for p in model.parameters())
        pieces = -(-s.batch_size // s.piece)
        self.line(
            f"{count:,} parameters, {model.classes} classes; {len(data.train):,} images to train on and {len(data.val):,} to "
            f"measure; a step has {s.batch_size}, {pieces} x {s.piece}, over {self._run.world_size} ranks"
        )
        if data.bad:
            self.line(f"left out {data.bad} images that cannot be decoded")
        if len(data.classes) < 5:
            self.line(f"Acc@5 is not measured: of {len(data.classes)} classes, the first five are all of them")
        done = f"=> going on after step {step} of {stream.total_steps}" if step else "=> no checkpoint yet, starting from epoch 0"
        self.line(done + (f": all {s.epochs} epochs are done; --epochs sets more" if step >= stream.total_steps else ""))
        self.clock()

    def clock(self) -> None:
        """Leave out the time up to here: it was no training."""
        self._since, self.images = time.monotonic(), 0

    def speed(self) -> float:
        """Images a second over all ranks since the last line."""
        now, images = time.monotonic(), self.images
        seconds = now - self._since
        self._since, self.images = now, 0
        return images / seconds

    def iteration(self, batch: Any, number: int, values: Mapping[str, float]) -> None:
        """A step. `data_idx`: images of the epoch before it, over all ranks."""
        self.line(
            f"epoch: {batch.epoch}, iteration: {number}, data_idx: {batch.start}, loss: {values['loss']:.4f}, "
            f"Acc@1: {values['train_acc1']:.2f}, lr: {values['lr']:.4g}, {values['images_per_s']:.1f} images/s"
        )


# Measuring


@dataclass
class Tally:
    """What was right, of how many; they add up."""

    classes: int
    loss: float = 0.0
    """Sum over the images."""
    top5: int = 0
    images: list[int] = dataclasses.field(default_factory=list)
    """By class."""
    right: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.images, self.right = self.images or [0] * self.classes, self.right or [0] * self.classes

    def __add__(self, other: Tally) -> Tally:
        images, right = (
            [a + b for a, b in zip(*each, strict=True)] for each in ((self.images, other.images), (self.right, other.right))
        )
        return Tally(self.classes, self.loss + other.loss, self.top5 + other.top5, images, right)

    def values(self) -> dict[str, float]:
        """Mean loss, and acc@1 and acc@5 in percent; no acc@5 of fewer than five classes."""
        n = sum(self.images)
        found = {"val_loss": self.loss / n, "acc1": 100 * sum(self.right) / n}
        return found | ({"acc5": 100 * self.top5 / n} if self.classes >= 5 else {})

    def __str__(self) -> str:
        found = self.values()
        return f"Acc@1 {found['acc1']:.3f}" + (f" Acc@5 {found['acc5']:.3f}" if "acc5" in found else "")


def validation(s: Settings, data: Images) -> Stream:
    """All validation images, in order, each once over all ranks."""
    return Stream(data.val, batch=s.batch_size, microbatch=s.piece, shuffle=False, workers=workers(s, data.val))


@torch.no_grad()
def measured(dtype: torch.dtype, data: Images, model: ResNet, batches: Iterable[Any], where: torch.device) -> Tally:
    """What a model makes of this rank's part of the validation images. The model stays as it is."""
    classes = len(data.classes)
    loss, top5 = torch.zeros((), dtype=torch.float64, device=where), torch.zeros((), dtype=torch.int64, device=where)
    images, right = torch.zeros(2, classes, dtype=torch.int64, device=where)
    model.eval()  # BatchNorm's running statistics, not those of these images
    for batch in batches:
        if not len(batch.indices):
            continue  # others' images
        data.check(batch.pieces)
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
    return Tally(classes, float(loss), int(top5), images.tolist(), right.tolist())


def evaluate(s: Settings) -> None:
    """acc@1 and acc@5 on all validation images, and by class: a table and evaluation.json."""
    output, where = Path(os.environ.get(contract.Env.OUTPUT, "out")), device.computing()
    data = imagenet_data.opened(s)
    name, model, names = newest(s, data, output)
    if list(names) != list(data.classes):
        other = next(iter(sorted(set(names) ^ set(data.classes))), "the same in another order")
        raise OutlastError(
            f"{name} knows {len(names)} classes, and the data have {len(data.classes)} ({other}); give the data it was trained on"
        )
    placed(s, model, where)
    tally = measured(device.dtype(s.dtype, where), data, model, validation(s, data).batches(0, 1), where)
    found = tally.values()
    by_class = {
        label: {"images": n, "right": right, "accuracy": round(100 * right / n, 3) if n else None}
        for label, n, right in zip(data.classes, tally.images, tally.right, strict=True)
    }
    document = {
        "weights": name,
        "weights_sha256": results.sha256(model),
        "arch": model.arch,
        "images": sum(tally.images),
        **found,
    }
    results.write_json(output / "evaluation.json", {**document, "classes": by_class})
    print(f"{name}: {tally} on {sum(tally.images):,} images, loss {found['val_loss']:.4f}")
    if "acc5" not in found:
        print(f"Acc@5 is not measured: of {len(data.classes)} classes, the first five are all of them")
    worst = sorted((right / n, label) for label, n, right in zip(data.classes, tally.images, tally.right, strict=True) if n)[:10]
    print("the worst classes:" if len(worst) < len(by_class) else "by class:")
    for share, label in worst:
        print(f"  {label:<24s} {share:8.3%} of {by_class[label]['images']}")


def newest(s: Settings, data: Images, output: Path) -> tuple[str, ResNet, Sequence[str]]:
    """The weights to measure: those --weights names, or else the newest valid checkpoint, or the one --checkpoint names."""
    if s.weights:
        model = ResNet(s.arch, s.num_classes or len(data.classes))
        if omitted := imagenet_model.load(model, Path(s.weights)):
            raise OutlastError(f"--weights {s.weights} cannot be measured here without {omitted}")
        return Path(s.weights).name, model, data.classes
    path = results.checkpoint(output, s.checkpoint)
    record = Record()
    checkpoint.restore(path, {"record": record})
    model = ResNet(record.arch, record.outputs)
    model.load_state_dict(checkpoint.read(path, "ema" if record.ema else "model"))
    return path.name, model, record.classes


def main(argv: Sequence[str] | None = None) -> None:
    """Train or evaluate."""
    s = settings.parse(Settings, argv, __doc__)
    results.into(s.output_dir, f"{1 if s.num_checkpoints is None else s.num_checkpoints} max acc1")
    (evaluate if s.evaluate else train)(s)


if __name__ == "__main__":
    settings.run(main)
