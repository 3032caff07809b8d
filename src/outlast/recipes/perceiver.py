"""Trains Perceiver IO, which encodes video, audio and a label as 784 latents, and reconstructs them. Copy it and change it.

    outlast run examples/perceiver.yaml                                  # two workers on this machine, on videos made here
    outlast evaluate perceiver                                           # reconstruction losses, PSNR and accuracy

    python -m outlast.recipes.perceiver --size tiny --max-steps 200 --lr 1e-3
    python -m outlast.recipes.perceiver --evaluate --reconstruct out/clip.mp4
    torchrun --nproc-per-node 8 -m outlast.recipes.perceiver --dataset kinetics --dataset-dir data/kinetics --batch 64
    outlast data prepare video data/kinetics --to data/clips             # decoded once; then --data data/clips

A directory of Kinetics contains train/CLASS/*.mp4 and val/CLASS/*.mp4, or CLASS/*.mp4, or any videos if --labels names a list of
their classes. Training writes checkpoints/ and metrics.jsonl, and at the end model.pt and final.json, to the job's output
directory, or to --output_dir (default: out) if there is no job. --evaluate writes evaluation.json to the same directory.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import collections
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.recipes import perceiver_data, perceiver_model
from outlast.recipes.perceiver_data import Clips, Data
from outlast.recipes.perceiver_model import Config, Decoded, Perceiver, Points
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.loop import Record
from outlast.recipes.shared.settings import flag
from outlast.training import Session, Shards, Stream, device
from outlast.training.samples.stream import Batch, share_of
from outlast.training.state import checkpoint

ALIASES = {
    "dataset_dir": "data",
    "logdir": "output_dir",
    "batch_size": "batch",
    "num_epochs": "epochs",
    "num_workers": "workers",
    "expected_average_throughput": "expected_throughput",
    "config_file_path": "config",
    "drop_last": "a short last step counts as what it is, and nothing is dropped",
}
"""Flags of train_trn.py, mapped to this recipe's names or to the reason why they are ignored. All others have the same names."""


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory of videos, or of prepared shards, or their URL; default $OUTLAST_DATA", group="data")
    dataset: Literal["synthetic", "kinetics-small", "kinetics"] | None = flag(
        None, "synthetic videos, 1,100 videos of --data, or all of them; default: kinetics if data are given"
    )
    labels: str = flag("", "CSV with the classes of the videos (file,label, or a list of Kinetics); default: their directories")
    val: float = flag(0.1, "fraction of the videos in val, if no directory is named val", least=0, most=0.9)
    skip_bad: bool = flag(False, "skip, report and count clips that cannot be read, instead of stopping")
    output_dir: str = flag("", "output directory; a job's output has precedence")
    init_from: str = flag("", "directory with initial weights, a Perceiver of Hugging Face (config.json, weights)")
    seed: int = flag(0, "seed of the initial weights, of the order of clips and of their times")

    size: Literal["tiny", "small", "base"] = flag("base", "preset of all sizes below; base is the paper's", group="model")
    frames: int | None = flag(None, "frames per clip", least=1)
    image_size: int | None = flag(None, "side of a frame in pixels", least=1)
    num_labels: int | None = flag(None, "classes of the model; default 700 for base, else the number in the data", least=1)
    num_latents: int | None = flag(None, "number of latents", least=1)
    d_latents: int | None = flag(None, "width of the latents", least=1)
    num_blocks: int | None = flag(None, "number of times that all self-attention layers are applied", least=1)
    num_self_attends: int | None = flag(None, "number of self-attention layers", least=0)
    num_heads: int | None = flag(None, "heads of a self-attention layer", least=1)
    num_cross_heads: int | None = flag(None, "heads of the attention to the inputs; its cost grows with them", least=1)
    widening: int | None = flag(None, "hidden units of an MLP, as a multiple of its width", least=1)
    d_output: int | None = flag(None, "width before the last layers", least=1)
    patch: int | None = flag(None, "side of an input patch in pixels", least=1)
    samples_per_patch: int | None = flag(None, "sound samples per patch", least=1)
    image_bands: int | None = flag(None, "frequencies of a pixel's position encoding, per dimension", least=1)
    audio_bands: int | None = flag(None, "frequencies of a sound patch's position encoding", least=1)
    label_channels: int | None = flag(None, "width of the label's query", least=1)
    dropout: float = flag(0.1, "dropout probability of attention weights in training", least=0, most=0.9)

    batch: int | None = flag(
        None, "clips per step over all ranks; default 8, or $BATCH_SIZE x $NPROC_PER_NODE", least=1, group="training"
    )
    microbatch: int | None = flag(
        None, "maximum clips per rank and forward pass; default: the rank's whole share of a step", least=1
    )
    epochs: int = flag(2, "passes over the training clips", least=1)
    max_steps: int | None = flag(None, "maximum number of steps; default $MAX_STEPS, else all epochs", least=1)
    lr: float = flag(5e-5, "maximum learning rate", least=0)
    warmup_steps: int = flag(0, "warm-up steps", least=0)
    lr_schedule: Literal["constant", "cosine"] = flag(
        "constant", "schedule after the warm-up; cosine falls to 0 at the last step"
    )
    weight_decay: float = flag(0.1, "weight decay", least=0)
    grad_clip: float = flag(10.0, "maximum norm of the gradient; 0: no limit", least=0)
    image_points: int = flag(512, "pixels to decode per step, the same for all clips", least=1)
    audio_points: int = flag(512, "sound patches to decode per step", least=1)
    image_weight: float = flag(0.03, "weight of the pixels' L1 loss", least=0)
    audio_weight: float = flag(1.0, "weight of the sound's L1 loss", least=0)
    label_weight: float = flag(1e-4, "weight of the label's cross-entropy", least=0)
    label_dropout: float = flag(1.0, "fraction of clips whose label is hidden from the encoder in training", least=0, most=1)

    do_eval: bool = flag(True, "evaluate on the validation clips after every epoch", group="evaluation and logs")
    eval_every: int | None = flag(None, "steps between two evaluations instead", least=1)
    test_batch_size: int = flag(8, "clips per rank and forward pass of an evaluation", least=1)
    log_steps: int = flag(20, "steps between two log lines; only these steps wait for the loss", least=1)
    metrics_debug: bool = flag(False, "also log the norms of the gradient and of the weights")
    expected_throughput: float = flag(0.0, "clips per second; below 0.95 of it the run fails at its end; 0: no check", least=0)

    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "auto: bfloat16 where it is fast", group="machine")
    workers: int = flag(0, "processes that decode videos, per rank", least=0)

    evaluate: bool = flag(False, "evaluate the newest weights on all validation clips", group="instead of training")
    checkpoint: str = flag("", "checkpoint to evaluate: best, or a step")
    eval_points: int = flag(0, "pixels per clip to evaluate; 0: all", least=0)
    reconstruct: str = flag("", "with --evaluate, .mp4 file to write with a clip and its reconstruction side by side")
    clip: int = flag(0, "index of this validation clip", least=0)

    @property
    def samples(self) -> int:
        """Number of clips in a step over all ranks."""
        return self.batch or 8


class Training(loop.Recipe):
    """A training run, whose methods `loop.train` calls."""

    def __init__(self, s: Settings, run: Session) -> None:
        super().__init__(s, run)
        self.model, self.data = first(s, run)
        self.model.to(run.device)
        self.net = loop.parallel("ddp", run, self.model)
        self.optimizer = self.model.optimizer(s.lr, s.weight_decay)
        self.record = record(self.model.config, self.data.digest)
        self.bad: set[str] = set()  # names of the clips that cannot be read
        how: dict[str, Any] = {"batch": s.samples, "microbatch": s.microbatch, "seed": s.seed, "workers": s.workers}
        self.stream = Stream(self.data.train, epochs=s.epochs, **how)
        if s.max_steps and s.max_steps < self.stream.total_steps:
            self.stream = Stream(self.data.train, steps=s.max_steps, **how)
        self.device, self.dtype = device.of(run.device), device.dtype(s.dtype, run.device, run.gather)
        self.used = {"batch": s.samples, "computed_in": str(self.dtype).removeprefix("torch.")}
        self.norm = torch.zeros((), device=run.device)
        self.speed = Speed()

    def begin(self, step: int) -> None:
        c, data, count = self.model.config, self.data, sum(p.numel() for p in self.model.parameters())
        self.record.owed = self.record.owed and self.s.do_eval
        self.bad = set(self.record.bad)
        self.log.line(
            f"{count / 1e6:.2f}M parameters; clips of {c.frames} frames of {c.image_size} x {c.image_size} and {c.samples} "
            f"samples of sound: {len(data.train)} to train on and {len(data.val) if data.val is not None else 0} to measure; "
            f"{c.classes} classes; {self.s.samples} clips a step"
        )

    def rate(self, step: int, batch: Batch | None = None) -> float:
        return rate(self.s, step, self.stream.total_steps)

    def update(self, step: int, batch: Batch) -> None:
        s, where = self.s, self.run.device
        points = queried(self.model.config, s, step)
        points = Points(*(each.to(where, non_blocking=True) for each in points))
        extras = []  # weights and hidden labels of each micro-batch
        indices: Any = batch.indices if len(batch.indices) else np.zeros(s.samples, np.int64)  # for a rank without clips
        for data, _ in batch.pieces:
            n = len(data["label"])
            weight = usable(s, self.data, self.bad, data, indices[:n], self.model.config.classes)
            extras.append((weight.to(where, non_blocking=True), hidden(s, step, indices[:n]).to(where, non_blocking=True)))
            indices = indices[n:]
        scale = torch.ones((), device=where)  # 1 / the usable share of the global batch
        if s.skip_bad:
            counted = sum(share * weight.mean() for (_, share), (weight, _) in zip(batch.pieces, extras, strict=True)) + 0 * scale
            if self.run.world_size > 1:
                dist.all_reduce(counted)
            scale = self.run.world_size / counted.clamp(min=1e-6)
        self.totals = torch.zeros(4, device=where)
        for (data, share), (weight, masked) in zip(batch.split(self.net), extras, strict=True):
            label = data["label"] * weight.long()
            with self.device.autocast(self.dtype):
                made = self.net(data["video"], data["audio"], label, masked, points)
            image, audio = perceiver_model.targets(data["video"], data["audio"], points, self.model.config)
            each = perceiver_model.losses(made, image, audio, label, weight)
            loss = s.image_weight * each.image + s.audio_weight * each.audio + s.label_weight * each.label
            (loss * share * scale).backward()  # shares add up to the mean over the usable clips of the global batch
            self.totals += torch.stack((loss, *each)).detach() * share * scale
        if s.grad_clip:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, step: int, batch: Batch) -> None:
        s, run, log = self.s, self.run, self.log
        log.done += batch.size
        if step % s.log_steps and step != self.stream.total_steps:
            run.log(step)
            return
        names = ("loss", "image_loss", "audio_loss", "label_loss")
        losses = dict(zip(names, self.totals.tolist(), strict=True))  # waits for the device
        lr, speed = self.rate(step - 1), self.speed.add(log.speed())
        more: dict[str, Any] = {"lr": lr, "throughput": speed}
        if s.metrics_debug:
            squares = [p.detach().float().square().sum() for p in self.model.parameters()]
            more |= {"grad_norm": self.norm, "weight_norm": torch.stack(squares).sum().sqrt()}
        logged = run.log(step, reduce=True, **losses, **more)  # means over ranks: losses of the global batch
        self.record.losses |= {name: logged[name] for name in names}
        log.line(
            f"| Training Device={run.device} Epoch={batch.epoch + 1} Step={step} Learning_Rate={lr:g} Loss={logged['loss']:.5f} "
            f"Throughput={speed:.5f} Time={log.elapsed_s:.1f}"
        )

    def due(self, step: int, batch: Batch) -> bool:
        s = self.s
        ends = step % s.eval_every == 0 if s.eval_every else batch.ends_epoch
        return bool(s.do_eval and (ends or step == self.stream.total_steps))

    @torch.inference_mode()
    def measure(self, step: int) -> float:
        """Return the mean loss on the validation clips, which are divided among the ranks. Every measurement uses the same points
        of a clip."""
        s, run = self.s, self.run
        points = queried(self.model.config, s, -1)
        first, last = share_of(len(self.data.val or ()), run.world_size, run.rank)
        self.model.eval()
        with run.alive():
            sums = summed(s, self.data, self.model, range(first, last), points, self.dtype, self.bad)
        self.model.train()
        means = averages(sum(run.gather(sums)), s)
        values: dict[str, Any] = {f"val_{name}": value for name, value in means.items()}
        self.record.losses |= values
        run.log(step, **values)
        self.log.line(f"Step={step} " + " ".join(f"Val_{name}={value:.5f}" for name, value in means.items()))
        return means["loss"]

    def remember(self) -> None:
        """Add to the record the names of the clips that any rank could not read."""
        self.bad.update(*self.run.gather(self.bad))
        self.record.bad = sorted(self.bad)

    def finish(self, step: int) -> None:
        s, run = self.s, self.run
        self.remember()
        run.export(self.model)
        speed, bad = run.gather(self.speed.mean)[0], self.record.bad
        results.final(run, self.model, step=step, **self.record.losses, throughput=speed, bad=len(bad))
        if bad:
            self.log.line(
                f"{len(bad)} clips could not be read and were left out: {', '.join(bad[:3])}{', ...' if bad[3:] else ''}"
            )
        if s.expected_throughput and speed is None:
            self.log.line(f"expected_throughput is not checked: this start made fewer than {s.log_steps} steps after its first")
        elif s.expected_throughput and speed < 0.95 * s.expected_throughput:
            self.problem = (
                f"throughput {speed:.2f} clips/s is below 0.95 of the expected {s.expected_throughput:g}; the results are "
                "written. Find out what is slow, or expect less with --expected-throughput"
            )


def usable(
    s: Settings, d: Data, bad: set[str], data: Mapping[str, Any], indices: Any, classes: int, part: str = "train"
) -> Tensor:
    """Return the weights of clips, (b,): 0 for one that cannot be read, whose name is added to `bad`, otherwise 1.

    Without --skip-bad, such a clip raises OutlastError, and so does a label outside the model's classes.
    """
    if wrong := [label for label in data["label"].tolist() if not 0 <= label < classes]:
        raise OutlastError(
            f"{d.place} has label {wrong[0]}, and the model knows 0 to {classes - 1}; set --num-labels, or correct the data"
        )
    dataset = d.train if part == "train" else d.val
    if not isinstance(dataset, Clips):
        return torch.ones(len(data["label"]))
    for row, problem in enumerate(data["problem"]):
        if problem and not s.skip_bad:
            raise OutlastError(problem)
        if problem and (name := dataset.name(int(indices[row]))) not in bad:
            bad.add(name)
            if len(bad) <= 3:
                print(f"{name} cannot be read and is left out ({problem})", file=sys.stderr, flush=True)
    return torch.tensor([float(not problem) for problem in data["problem"]])


class Speed:
    """Averages the speed over the last ten log lines. A process's first line is left out, because it includes compilation."""

    def __init__(self) -> None:
        self._windows: collections.deque[float] = collections.deque(maxlen=10)
        self._compiled = False

    @property
    def mean(self) -> float | None:
        """Mean number of clips per second, or None until the log has two lines."""
        return sum(self._windows) / len(self._windows) if self._windows else None

    def add(self, speed: float) -> float:
        """Add the speed that a log line reports. Returns the mean, or 0 for the first line."""
        if self._compiled and speed:
            self._windows.append(speed)
        self._compiled = True
        return self.mean or 0.0


def record(config: Config, digest: str) -> Record:
    """Return a new run's record."""
    fixed = {"data": "other clips", "config": "another model"}
    # Dropout may change between starts.
    shape = {name: value for name, value in dataclasses.asdict(config).items() if name != "dropout"}
    return Record(fixed, config=shape, data=digest, bad=[])


def rate(s: Settings, step: int, steps: int) -> float:
    """Return a step's learning rate, which after a linear warm-up is constant or falls to 0 along a cosine."""
    return loop.rate(s.lr, step, steps, s.warmup_steps, falls=s.lr_schedule == "cosine")


def queried(config: Config, s: Settings, step: int) -> Points:
    """Return the points to decode in a step, which depend only on (seed, step). Measurements use step -1."""
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(s.seed), step + 1])))
    image = draw.choice(config.image_points, min(s.image_points, config.image_points), replace=False)
    audio = draw.choice(config.audio_points, min(s.audio_points, config.audio_points), replace=False)
    return Points(torch.from_numpy(image), torch.from_numpy(audio))


def hidden(s: Settings, step: int, indices: Any) -> Tensor:
    """Return a mask, (b,) bool, of clips whose label is hidden from the encoder. It depends only on (seed, step, index)."""
    if s.label_dropout in (0, 1):
        return torch.full((len(indices),), bool(s.label_dropout))
    drawn = [np.random.SeedSequence([abs(s.seed), step, int(index), 1]).generate_state(1)[0] / 2**32 for index in indices]
    return torch.tensor(drawn) < s.label_dropout


def first(s: Settings, run: Session) -> tuple[Perceiver, Data]:
    """Return the initial model, and the data. Raises OutlastError if they do not match or there is no validation data."""
    config, weights = shape(s)
    with run.alive():
        data = place(s, config, run.output)
    classes = s.num_labels or (config.classes if s.init_from or s.size == "base" else len(data.classes) or config.classes)
    config = dataclasses.replace(config, classes=classes)
    if len(data.classes) > classes:
        raise OutlastError(f"{data.place} has {len(data.classes)} classes, and the model knows {classes}; set --num-labels")
    if s.do_eval and data.val is None:
        raise OutlastError(f"{data.place} has no validation clips; give a directory val, raise --val, or set --no-do-eval")
    model = Perceiver(config)
    if weights is not None:
        model.load_state_dict(perceiver_model.imported(weights, config))
    return model, data


def shape(s: Settings) -> tuple[Config, Mapping[str, Tensor] | None]:
    """Return the model's sizes, and the pretrained weights if --init-from is given."""
    names = {field.name for field in dataclasses.fields(Config)} & {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name in names if (value := getattr(s, name)) is not None}
    if s.init_from:
        return perceiver_data.pretrained(s.init_from, given)
    config = Config(**{**perceiver_model.SIZES[s.size], **given})
    config.check()
    return config, None


def place(s: Settings, config: Config, output: Path) -> Data:
    """Open the data, after generating them if they are synthetic."""
    named = s.data or os.environ.get(contract.Env.DATA) or os.environ.get("DATASET_DIR", "")
    if s.dataset == "synthetic" or not (s.dataset or named):
        named = str(perceiver_data.synthetic(Path(named) if named else output))
    elif not named:
        raise OutlastError(f"--dataset {s.dataset} needs videos: give --data DIR, or set {contract.Env.DATA} or DATASET_DIR")
    return perceiver_data.opened(named, config, labels=s.labels, share=s.val, small=s.dataset == "kinetics-small")


# Measuring


def summed(s: Settings, d: Data, model: Perceiver, clips: range, points: Points, kind: torch.dtype, bad: set[str]) -> Tensor:
    """Return the sums of `measured` over the validation clips at the indices `clips`."""
    assert d.val is not None
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    for at, data in batches(d.val, clips.start, clips.stop, s.test_batch_size, s.workers):
        weight = usable(s, d, bad, data, range(at, clips.stop), model.config.classes, "val")
        sums = sums + measured(model, data, weight, points, kind)
    return sums


SUMS = ("clips", "image_l1", "audio_l1", "label_ce", "squares", "top1", "top5")  # names of the sums over clips, in order
_CHUNK = 8192  # points to decode at a time; arbitrary


def averages(sums: Tensor, s: Any) -> dict[str, float]:
    """Return means from the sums: the loss, its parts, PSNR in dB for pixels from 0 to 1, and accuracies from 0 to 1."""
    clips = float(sums[0])
    if not clips:
        raise OutlastError("no validation clip can be read; see the sentences above")
    means = {name: each / clips for name, each in zip(SUMS[1:], sums.tolist()[1:], strict=True)}
    loss = s.image_weight * means["image_l1"] + s.audio_weight * means["audio_l1"] + s.label_weight * means["label_ce"]
    psnr = -10 * math.log10(max(means.pop("squares"), 1e-12))
    right = {name: means.pop(name) for name in ("top1", "top5")}
    return {"loss": loss, **means, "psnr": psnr, **right}


def batches(dataset: Clips | Shards, begin: int, end: int, size: int, workers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield batches of `size` clips from `begin` up to `end`, each with the index of its first clip."""
    if isinstance(dataset, Clips):
        some: Any = Subset(cast(Any, dataset), range(begin, end))
        loader = DataLoader(some, size, num_workers=workers, generator=torch.Generator())
        for number, data in enumerate(loader):
            yield begin + number * size, data
    else:
        for at in range(begin, end, size):
            yield at, dataset.take(np.arange(at, min(at + size, end)))


def measured(model: Perceiver, data: Mapping[str, Any], weight: Tensor, points: Points, kind: torch.dtype) -> Tensor:
    """Return sums over the clips with weight 1, in the order of `SUMS`, on the CPU. Labels are hidden from the model."""
    where = model.latents.device
    keep = weight.bool()
    if not keep.any():
        return torch.zeros(len(SUMS), dtype=torch.float64)
    video, audio, label = (data[name][keep].to(where) for name in ("video", "audio", "label"))
    made = reconstructed(model, video, audio, points, kind)
    image, sound = perceiver_model.targets(video, audio, Points(*(each.to(where) for each in points)), model.config)
    ones = weight.new_ones(len(label), device=where)
    each = perceiver_model.losses(made, image, sound, label, ones)
    squares = (made.image.float().clamp(0, 1) - image).square().mean((1, 2)).sum()
    best = made.label.topk(min(5, made.label.shape[1])).indices == label[:, None]
    n = len(label)
    sums = [n, *(float(loss) * n for loss in each), float(squares), int(best[:, 0].sum()), int(best.sum())]
    return torch.tensor(sums, dtype=torch.float64)


def reconstructed(model: Perceiver, video: Tensor, audio: Tensor, points: Points, kind: torch.dtype) -> Decoded:
    """Reconstruct clips with hidden labels, at any number of points. The latents are computed only once."""
    where, b = video.device, len(video)
    no_label = torch.zeros(b, dtype=torch.int64, device=where)
    parts = []
    with device.of(where).autocast(kind):
        latents = model.encode(video, audio, no_label, torch.ones(b, dtype=torch.bool, device=where))
        image = points.image.split(_CHUNK)
        sound = points.audio.split(_CHUNK)
        for number in range(max(len(image), len(sound))):
            some = Points(*(each[number] if number < len(each) else each[0][:0] for each in (image, sound)))
            parts.append(model.decode(latents, Points(*(each.to(where) for each in some))))
    return Decoded(torch.cat([part.image for part in parts], 1), torch.cat([part.audio for part in parts], 1), parts[0].label)


def every_point(config: Config) -> Points:
    """Return all points of a clip."""
    return Points(torch.arange(config.image_points), torch.arange(config.audio_points))


UNITS = {"psnr": " dB", "label_ce": " nats"}


def beside(model: Perceiver, dataset: Clips | Shards, index: int, kind: torch.dtype) -> tuple[Any, Any]:
    """Return a clip and its reconstruction side by side, (t, h, 2 w, 3) uint8, and the reconstructed audio, (samples,) int16."""
    c, where = model.config, model.latents.device
    _, data = next(batches(dataset, index, index + 1, 1, 0))
    if problem := data.get("problem", [""])[0]:
        raise OutlastError(problem)
    made = reconstructed(model, data["video"].to(where), data["audio"].to(where), every_point(c), kind)
    image = (made.image[0].float().clamp(0, 1) * 255).round().byte().view(c.frames, c.image_size, c.image_size, 3).cpu()
    sound = (made.audio[0].float().flatten().clamp(-1, 1) * 32767).short().cpu()
    return torch.cat((data["video"][0], image), 2).numpy(), sound.numpy()


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Measure reconstruction losses, PSNR and accuracy on the validation clips. With --reconstruct, also writes a clip."""
    output, where = results.output(), device.computing()
    path = results.checkpoint(output, s.checkpoint)
    config = Config(**Record.read(path).config)
    model = Perceiver(config)
    model.load_state_dict(checkpoint.read(path, "model"))
    model.to(where).eval()
    data = place(s, config, output)
    if data.val is None:
        raise OutlastError(f"{data.place} has no validation clips; give a directory val, or raise --val")
    if s.reconstruct and s.clip >= len(data.val):
        raise OutlastError(f"--clip {s.clip} is not there: {data.place} has {len(data.val)} validation clips, counted from 0")
    points, kind = every_point(config), device.dtype(s.dtype, where)
    if s.eval_points:
        points = Points(queried(config, dataclasses.replace(s, image_points=s.eval_points), -1).image, points.audio)
    bad = set[str]()
    sums = summed(s, data, model, range(len(data.val)), points, kind, bad)
    means, clips = averages(sums, s), int(sums[0])
    results.evaluation(path.name, model, clips=clips, skipped=len(bad), **means)
    print(f"{path.name} on {clips} validation clips of {data.place}")
    for name, value in means.items():
        print(f"  {name:<10s} {value:10.5f}{UNITS.get(name, '')}")
    if s.reconstruct:
        shown = beside(model, data.val, s.clip, kind)
        perceiver_data.write(Path(s.reconstruct), *shown)
        print(f"{s.reconstruct}: clip {s.clip}, and beside it what {path.name} makes of it")


def main(argv: Sequence[str] | None = None) -> None:
    s = from_variables(settings.parse(Settings, argv, __doc__, ALIASES))
    results.into(s.output_dir)
    if s.evaluate or s.reconstruct:
        evaluate(s)
    else:
        loop.train(Training, s)


def from_variables(s: Settings) -> Settings:
    """Take missing settings from the environment variables MAX_STEPS, BATCH_SIZE and NPROC_PER_NODE. Raises OutlastError."""
    variables = {}
    for name in ("MAX_STEPS", "BATCH_SIZE", "NPROC_PER_NODE"):
        if text := os.environ.get(name, ""):
            if not (text.isdecimal() and int(text) > 0):
                raise OutlastError(f"the variable {name} is {text!r}, and a whole number above 0 is needed; correct or remove it")
            variables[name] = int(text)
    if "MAX_STEPS" in variables and s.max_steps is None:
        s = dataclasses.replace(s, max_steps=variables["MAX_STEPS"])
    if "BATCH_SIZE" in variables and s.batch is None:
        s = dataclasses.replace(s, batch=variables["BATCH_SIZE"] * variables.get("NPROC_PER_NODE", 1))
    return s


if __name__ == "__main__":
    results.run(main)
