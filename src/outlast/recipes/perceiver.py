"""Perceiver IO: video, sound and a label through 784 latents and back. Trains, measures and writes clips. Copy it and change it.

    outlast run examples/perceiver.yaml                                  # two workers on this machine, on videos made here
    outlast evaluate perceiver                                           # reconstruction losses, PSNR and accuracy

    python -m outlast.recipes.perceiver --size tiny --max-steps 200 --lr 1e-3
    python -m outlast.recipes.perceiver --evaluate --reconstruct out/clip.mp4
    torchrun --nproc-per-node 8 -m outlast.recipes.perceiver --dataset kinetics --dataset-dir data/kinetics --batch 64
    outlast data prepare video data/kinetics --to data/clips             # decoded once; then --data data/clips

Kinetics: directories train/CLASS/*.mp4 and val/CLASS/*.mp4, or CLASS/*.mp4, or a list of labels. Writes to the job's output,
--output_dir without a job (default: out): checkpoints/, metrics.jsonl, at the end model.pt and final.json; evaluation.json with
--evaluate.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import collections
import dataclasses
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outlast import contract
from outlast.errors import OutlastError
from outlast.recipes import perceiver_data, perceiver_measure, perceiver_model, results, settings
from outlast.recipes.perceiver_data import Clips, Data, Remarks
from outlast.recipes.perceiver_model import Config, Perceiver, Points
from outlast.recipes.settings import flag
from outlast.training import Session, Stream, checkpoint, device, session
from outlast.training.stream import dealt


@dataclass(frozen=True)
class Settings:
    data: str = flag(
        "",
        "directory of videos, or directory or URL of prepared shards; default $OUTLAST_DATA, then $DATASET_DIR",
        group="data and output",
        also=("dataset_dir",),
    )
    dataset: Literal["synthetic", "kinetics-small", "kinetics"] | None = flag(
        None,
        "synthetic: small videos that are made here; kinetics: those of --data, kinetics-small: 1,100 of them; default kinetics "
        "where there are data",
    )
    labels: str = flag("", "CSV with the classes of the videos (file,label, or a list of Kinetics); default: their directories")
    val: float = flag(0.1, "share of the videos to measure on, where no directory is named val", least=0, most=0.9)
    skip_bad: bool = flag(False, "leave out clips that cannot be read, and name and count them, instead of stopping")
    output_dir: str = flag("", "where to write; a job's output has precedence", also=("logdir", "out_dir", "output"))
    init_from: str = flag("", "directory with a Perceiver of Hugging Face (config.json, weights) to begin with")
    seed: int = flag(0, "seed of the first weights, of the order of clips and of their moments")

    size: Literal["tiny", "small", "base"] = flag("base", "all sizes below at once; base is the paper's", group="model")
    frames: int | None = flag(None, "frames of a clip", least=1)
    image_size: int | None = flag(None, "pixels of a frame's side", least=1)
    num_labels: int | None = flag(None, "classes the model knows; default 700 for base, else those of the data", least=1)
    num_latents: int | None = flag(None, "latents", least=1)
    d_latents: int | None = flag(None, "their width", least=1)
    num_blocks: int | None = flag(None, "times that all self-attentions are applied", least=1)
    num_self_attends: int | None = flag(None, "self-attentions", least=0)
    num_heads: int | None = flag(None, "heads of a self-attention", least=1)
    num_cross_heads: int | None = flag(None, "heads of the attention to the inputs; its work grows with them", least=1)
    widening: int | None = flag(None, "hidden units of an MLP, in widths", least=1)
    d_output: int | None = flag(None, "width before the last layers", least=1)
    patch: int | None = flag(None, "pixels of an input patch's side", least=1)
    samples_per_patch: int | None = flag(None, "samples of sound of a patch", least=1)
    image_bands: int | None = flag(None, "frequencies of a pixel's position, per dimension", least=1)
    audio_bands: int | None = flag(None, "frequencies of a moment", least=1)
    label_channels: int | None = flag(None, "width of the label's query", least=1)
    dropout: float = flag(0.1, "share of attention weights dropped in training", least=0, most=0.9)

    batch: int | None = flag(
        None,
        "clips of a step over all ranks; default 8, or $BATCH_SIZE x $NPROC_PER_NODE",
        least=1,
        group="training",
        also=("batch_size",),
    )
    microbatch: int | None = flag(None, "most clips that a rank computes at once; default: its whole share of a step", least=1)
    epochs: int = flag(2, "passes over the training clips", least=1, also=("num_epochs",))
    max_steps: int | None = flag(None, "stop after so many steps; default $MAX_STEPS, else after the epochs", least=1)
    lr: float = flag(5e-5, "highest learning rate", least=0, also=("learning_rate",))
    warmup_steps: int = flag(0, "steps in which it rises to that", least=0)
    lr_schedule: Literal["constant", "cosine"] = flag("constant", "how it goes on: cosine falls to 0 at the last step")
    weight_decay: float = flag(0.1, "pull of every weight towards 0", least=0, also=("wd",))
    grad_clip: float = flag(10.0, "longest gradient; 0: any", least=0)
    image_points: int = flag(512, "pixels that are decoded in a step, the same for all clips", least=1)
    audio_points: int = flag(512, "patches of sound that are decoded in a step", least=1)
    image_weight: float = flag(0.03, "weight of the pixels' L1 loss", least=0)
    audio_weight: float = flag(1.0, "weight of the sound's L1 loss", least=0)
    label_weight: float = flag(1e-4, "weight of the label's cross-entropy", least=0)
    label_dropout: float = flag(1.0, "share of clips whose label is hidden from the encoder in training", least=0, most=1)

    do_eval: bool = flag(True, "measure on the validation clips after every epoch", group="evaluation and logs")
    eval_every: int | None = flag(None, "steps between two measurements instead", least=1)
    test_batch_size: int = flag(8, "clips that a rank measures at once", least=1)
    log_steps: int = flag(
        20, "steps between two lines of the log; only there the loss is waited for", least=1, also=("log_interval",)
    )
    metrics_debug: bool = flag(False, "also log the length of the gradient and of the weights")
    expected_throughput: float = flag(
        0.0,
        "clips a second: the run fails at its end if the mean of its last 10 log lines is below 0.95 of that; 0: any",
        least=0,
        also=("expected_average_throughput",),
    )

    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of matrix products; auto: bfloat16 where it is fast", group="machine"
    )
    workers: int = flag(0, "processes that decode videos, per rank", least=0, also=("num_workers",))
    drop_last: bool = flag(False, "the source's; a short last step counts as what it is, and nothing is dropped")

    evaluate: bool = flag(
        False,
        "measure the newest weights on all points of all validation clips",
        group="instead of training",
        also=("eval_only",),
    )
    checkpoint: str = flag("", "the checkpoint to measure: best, or a step")
    eval_points: int = flag(0, "pixels of a clip to measure; 0: all", least=0)
    reconstruct: str = flag("", "with --evaluate: an .mp4 file to write, a clip and beside it what the model makes of it")
    clip: int = flag(0, "which validation clip that is", least=0)

    @property
    def samples(self) -> int:
        """Clips of a step over all ranks."""
        return self.batch or 8


# Training


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    with session.open(seed=s.seed, quiet=True) as run:
        log = Log(run)
        for sentence in ignored(s, run):
            log.line(sentence)
        model, data = first(s, run)
        model.to(run.device)
        net = run.ddp(model) if run.world_size > 1 else model
        optimizer = model.optimizer(s.lr, s.weight_decay)
        record = Record(model.config, data.digest)
        stream = Stream(data.train, batch=s.samples, microbatch=s.microbatch, seed=s.seed, epochs=s.epochs, workers=s.workers)
        if s.max_steps and s.max_steps < stream.total_steps:
            stream = Stream(
                data.train, batch=s.samples, microbatch=s.microbatch, seed=s.seed, steps=s.max_steps, workers=s.workers
            )
        with results.hyperparameters(optimizer):
            step = run.resume({"record": record, "model": net, "optimizer": optimizer, "stream": stream})
        trainer = Trainer(s, run, log, model, net, optimizer, stream, data, record)
        run.parameters(settings.values(s) | {"batch": s.samples, "computed_in": str(trainer.dtype).removeprefix("torch.")})
        log.begin(model, data, s)
        if record.owed and s.do_eval:
            trainer.measure(step)
        for batch in stream:
            trainer.update(step, batch)
            log.trained(batch.size)
            step += 1
            trainer.report(step, batch.epoch)
            leaving = run.interrupted()
            record.owed = trainer.measures(step, batch.ends_epoch)
            if record.owed and not leaving:
                trainer.measure(step)
            elif leaving or run.due(step) or step == stream.total_steps:
                trainer.save(step)
        problem = trainer.finish(step)
    if problem:
        raise OutlastError(problem)


class Record:
    """What a run remembers beside weights."""

    def __init__(self, config: Config | None = None, digest: str = "") -> None:
        self.config, self.digest = config, digest
        self.losses: dict[str, float] = {}
        """The newest of each kind."""
        self.remarks = Remarks()
        self.owed = False
        """Whether the validation clips are due: the run had to leave before it could measure them."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        shape = dataclasses.asdict(self.config) if self.config else {}
        known = {"losses": dict(self.losses), "remarks": self.remarks.state_dict(), "owed": self.owed}
        return {"config": shape, "data": self.digest, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved. Raises OutlastError when it was saved over other videos."""
        if self.digest and state["data"] != self.digest:
            raise OutlastError(
                f"the checkpoint was trained on other clips ({state['data']}) than those there now ({self.digest}); resume with "
                "the same data, or start a new run"
            )
        saved = Config(**state["config"])
        self.config = self.config or saved
        for field in dataclasses.fields(Config):
            then, now = getattr(saved, field.name), getattr(self.config, field.name)
            if then != now and field.name != "dropout":
                raise OutlastError(
                    f"the checkpoint is of a model with {field.name} {then}, and the settings say {now}; resume with {then}, or "
                    "start a new run in another output directory"
                )
        self.digest, self.losses = state["data"], dict(state["losses"])
        self.remarks.load_state_dict(state["remarks"])
        self.owed = state["owed"]


@dataclass
class Trainer:
    """The parts of a step."""

    s: Settings
    run: Session
    log: Log
    model: Perceiver
    """The module itself, on which nothing is exchanged between ranks."""
    net: nn.Module
    """What exchanges gradients."""
    optimizer: torch.optim.Optimizer
    stream: Stream
    data: Data
    record: Record

    def __post_init__(self) -> None:
        self.device = device.of(self.run.device)
        self.dtype = device.dtype(self.s.dtype, self.run.device, self.run.gather)
        self.totals = torch.zeros(4, device=self.run.device)
        self.norm = torch.zeros((), device=self.run.device)

    def update(self, step: int, batch: Any) -> None:
        """One step: gradients of all micro-batches, then AdamW."""
        s, where = self.s, self.run.device
        points = queried(self.model.config, s, step)
        points = Points(*(each.to(where, non_blocking=True) for each in points))
        beside = []
        indices = batch.indices if len(batch.indices) else np.zeros(s.samples, np.int64)  # of a rank that stands in
        for data, _ in batch.pieces:
            n = len(data["label"])
            weight = self.usable(data, indices[:n])
            beside.append((weight.to(where, non_blocking=True), hidden(s, step, indices[:n]).to(where, non_blocking=True)))
            indices = indices[n:]
        more = torch.ones((), device=where)  # 1 / the part of the global batch that is usable
        if s.skip_bad:
            usable = sum(share * weight.mean() for (_, share), (weight, _) in zip(batch.pieces, beside, strict=True)) + 0 * more
            if self.run.world_size > 1:
                dist.all_reduce(usable)
            more = self.run.world_size / usable.clamp(min=1e-6)
        totals = torch.zeros_like(self.totals)
        for (data, share), (weight, masked) in zip(batch.split(self.net), beside, strict=True):
            label = data["label"] * weight.long()
            with self.device.autocast(self.dtype):
                made = self.net(data["video"], data["audio"], label, masked, points)
            image, audio = perceiver_model.targets(data["video"], data["audio"], points, self.model.config)
            each = perceiver_model.losses(made, image, audio, label, weight)
            loss = s.image_weight * each.image + s.audio_weight * each.audio + s.label_weight * each.label
            (loss * share * more).backward()  # shares add up to the mean over the usable clips of the global batch
            totals += torch.stack((loss, *each)).detach() * share * more
        self.totals = totals
        if s.grad_clip:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, step, self.stream.total_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def usable(self, data: Mapping[str, Any], indices: Any, part: str = "train") -> Tensor:
        """Which clips of a batch on the CPU count: (b,) of 1 or 0. Raises OutlastError for a bad one, unless told to skip it."""
        dataset = self.data.train if part == "train" else self.data.val
        weight = torch.ones(len(data["label"]))
        if isinstance(dataset, Clips):
            for row, problem in enumerate(data["problem"]):
                name = dataset.name(int(indices[row]))
                if problem and not self.s.skip_bad:
                    raise OutlastError(problem)
                for kind, found in (("bad", problem), ("silent", data["silent"][row]), ("short", data["short"][row])):
                    if found and (sentence := self.record.remarks.see(kind, name)):
                        print(sentence + (f" ({problem})" if problem else ""), file=sys.stderr, flush=True)
                weight[row] = not problem
        perceiver_data.checked(data["label"], self.model.config.classes, self.data.place)
        return weight

    def report(self, step: int, epoch: int) -> None:
        """Log a step that is due."""
        s, run = self.s, self.run
        if step % s.log_steps and step != self.stream.total_steps:
            run.log(step)
            return
        names = ("loss", "image_loss", "audio_loss", "label_loss")
        found = dict(zip(names, self.totals.tolist(), strict=True))  # waits for the device
        lr, speed = rate(s, step - 1, self.stream.total_steps), self.log.speed()
        more: dict[str, Any] = {"lr": lr, "throughput": speed}
        if s.metrics_debug:
            squares = [p.detach().float().square().sum() for p in self.model.parameters()]
            more |= {"grad_norm": self.norm, "weight_norm": torch.stack(squares).sum().sqrt()}
        logged = run.log(step, reduce=True, **found, **more)  # means over ranks: losses of the global batch
        self.record.losses |= {name: logged[name] for name in names}
        self.log.step(step, epoch, lr, logged["loss"], speed)

    def measures(self, step: int, ends_epoch: bool) -> bool:
        """Whether the validation clips are due."""
        if not self.s.do_eval:
            return False
        due = step % self.s.eval_every == 0 if self.s.eval_every else ends_epoch
        return due or step == self.stream.total_steps

    @torch.inference_mode()
    def measure(self, step: int) -> None:
        """Losses on the validation clips, each on one rank, at points that are always the same; then a checkpoint."""
        s, run, val = self.s, self.run, self.data.val
        assert val is not None
        points = queried(self.model.config, s, -1)
        first, last = dealt(len(val), run.world_size, run.rank)
        self.model.eval()
        sums = perceiver_measure.Sums()
        with run.alive():
            for at, data in perceiver_measure.read(val, first, last, s.test_batch_size, s.workers):
                weight = self.usable(data, range(at, at + len(data["label"])), "val")
                sums.add(perceiver_measure.measured(self.model, data, weight, points, self.dtype))
        self.model.train()
        found = perceiver_measure.Sums.of(run.gather(sums.values)).means(s)
        self.record.losses |= {f"val_{name}": value for name, value in found.items()}
        self.record.owed = False
        values: dict[str, Any] = {f"val_{name}": value for name, value in found.items()}
        run.log(step, **values)
        self.log.line(f"Step={step} " + " ".join(f"Val_{name}={value:.5f}" for name, value in found.items()))
        self.save(step, found["loss"])
        self.log.clock()

    def save(self, step: int, metric: float = math.nan) -> None:
        """A checkpoint; `metric` nan: not measured, so it is never the best."""
        self.record.remarks.add(self.run.gather(self.record.remarks.state_dict()))
        self.run.save(step, metric=metric)

    def finish(self, step: int) -> str:
        """Write the results; what is wrong with the speed, on all ranks, or nothing."""
        s, run = self.s, self.run
        run.export(self.model)
        speed = run.gather(self.log.average())[0]
        counts = self.record.remarks.counts()
        if run.rank == 0:
            document = {"step": step, **self.record.losses, "throughput": speed, **counts}
            results.write_json(run.output / "final.json", {**document, "weights_sha256": results.sha256(self.model)})
        if counts["bad"]:
            names = ", ".join(sorted(self.record.remarks.found["bad"])[:3])
            self.log.line(
                f"{counts['bad']} clips could not be read and were left out: {names}{', ...' if counts['bad'] > 3 else ''}"
            )
        if not s.expected_throughput:
            return ""
        if speed is None:
            self.log.line(f"expected_throughput is not checked: this start made fewer than {s.log_steps} steps after its first")
            return ""
        if speed >= 0.95 * s.expected_throughput:
            return ""
        return (
            f"throughput {speed:.2f} clips/s is below 0.95 of the expected {s.expected_throughput:g}; the results are written. "
            "Find out what is slow, or expect less with --expected-throughput"
        )


def rate(s: Settings, step: int, steps: int) -> float:
    """The learning rate of a step: a line upwards, then constant or a cosine down to 0."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / (s.warmup_steps + 1)
    if s.lr_schedule == "constant":
        return s.lr
    done = min(1.0, (step - s.warmup_steps) / max(1, steps - s.warmup_steps))
    return s.lr * (1 + math.cos(math.pi * done)) / 2


def queried(config: Config, s: Settings, step: int) -> Points:
    """The points that a step decodes: a function of (seed, step) alone; step -1 is that of all measurements."""
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(s.seed), step + 1])))
    image = draw.choice(config.image_points, min(s.image_points, config.image_points), replace=False)
    audio = draw.choice(config.audio_points, min(s.audio_points, config.audio_points), replace=False)
    return Points(torch.from_numpy(image), torch.from_numpy(audio))


def hidden(s: Settings, step: int, indices: Any) -> Tensor:
    """Whose label the encoder does not see: (b,) bool, a function of (seed, step, index) alone."""
    if s.label_dropout in (0, 1):
        return torch.full((len(indices),), bool(s.label_dropout))
    drawn = [np.random.SeedSequence([abs(s.seed), step, int(index), 1]).generate_state(1)[0] / 2**32 for index in indices]
    return torch.tensor(drawn) < s.label_dropout


def first(s: Settings, run: Session) -> tuple[Perceiver, Data]:
    """The model before the first step, and the data. Raises OutlastError if they do not fit, or nothing can be measured."""
    config, weights = shape(s)
    with run.alive():
        data = place(s, config, run.output)
    known = s.num_labels or (config.classes if s.init_from or s.size == "base" else len(data.classes) or config.classes)
    config = dataclasses.replace(config, classes=known)
    if len(data.classes) > known:
        raise OutlastError(f"{data.place} has {len(data.classes)} classes, and the model knows {known}; set --num-labels")
    if s.do_eval and data.val is None:
        raise OutlastError(f"{data.place} has no validation clips; give a directory val, raise --val, or set --no-do-eval")
    model = Perceiver(config)
    if weights is not None:
        model.load_state_dict(perceiver_model.imported(weights, config))
    return model, data


def shape(s: Settings) -> tuple[Config, Mapping[str, Tensor] | None]:
    """The model that the settings describe, and its first weights if there are any."""
    names = {field.name for field in dataclasses.fields(Config)} & {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name in names if (value := getattr(s, name)) is not None}
    if s.init_from:
        return perceiver_data.pretrained(s.init_from, given)
    config = Config(**{**perceiver_model.SIZES[s.size], **given})
    config.check()
    return config, None


def place(s: Settings, config: Config, output: Path) -> Data:
    """Where the data are, made first if they are synthetic."""
    named = s.data or os.environ.get(contract.Env.DATA) or os.environ.get("DATASET_DIR", "")
    if s.dataset == "synthetic" or not (s.dataset or named):
        named = str(perceiver_data.synthetic(Path(named) if named else output))
    elif not named:
        raise OutlastError(f"--dataset {s.dataset} needs videos: give --data DIR, or set {contract.Env.DATA} or DATASET_DIR")
    return perceiver_data.opened(named, config, labels=s.labels, share=s.val, small=s.dataset == "kinetics-small")


def ignored(s: Settings, run: Session) -> list[str]:
    """What settings and variables ask for, and a run does otherwise: a sentence for each."""
    found = []
    if s.drop_last:
        found.append(
            "drop_last is ignored: a short last step counts as what it is; let --batch divide the clips if it must not be"
        )
    processes = os.environ.get("NPROC_PER_NODE", "")
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if processes and processes != local:
        found.append(f"NPROC_PER_NODE {processes} is ignored: this machine has {local} processes, as torchrun or the job says")
    if s.init_from and s.size != "base":
        found.append(f"size {s.size} is ignored: the sizes are those of {s.init_from}")
    return found


class Log:
    """Lines for people, from rank 0, and the speed."""

    WINDOWS = 10
    """Log lines over which the throughput is averaged."""

    def __init__(self, run: Session) -> None:
        self._run = run
        self._begun = self._since = time.monotonic()
        self._compiled = False
        self._clips = 0
        self._windows: collections.deque[float] = collections.deque(maxlen=self.WINDOWS)

    def line(self, text: str) -> None:
        """Print on rank 0."""
        if self._run.rank == 0:
            print(text, flush=True)

    def begin(self, model: Perceiver, data: Data, s: Settings) -> None:
        """What is trained, on what."""
        c, count = model.config, sum(p.numel() for p in model.parameters())
        self.line(
            f"{count / 1e6:.2f}M parameters; clips of {c.frames} frames of {c.image_size} x {c.image_size} and {c.samples} "
            f"samples of sound: {len(data.train)} to train on and {len(data.val) if data.val is not None else 0} to measure; "
            f"{c.classes} classes; {s.samples} clips a step"
        )

    def trained(self, clips: int) -> None:
        """Count the clips of a step, over all ranks."""
        self._clips += clips

    def clock(self) -> None:
        """Leave out the time and the clips up to here: it was no training alone."""
        self._since, self._clips = time.monotonic(), 0

    def speed(self) -> float:
        """Clips a second over all ranks: the mean of the last windows. The first window of a start is none: it compiles."""
        now = time.monotonic()
        if self._compiled and self._clips:
            self._windows.append(self._clips / (now - self._since))
        self._compiled = True
        self.clock()
        return self.average() or 0.0

    def average(self) -> float | None:
        """The mean of the last windows; None before the first."""
        return sum(self._windows) / len(self._windows) if self._windows else None

    def step(self, step: int, epoch: int, lr: float, loss: float, speed: float) -> None:
        """A line of a step."""
        seconds = time.monotonic() - self._begun
        self.line(
            f"| Training Device={self._run.device} Epoch={epoch + 1} Step={step} Learning_Rate={lr:g} Loss={loss:.5f} "
            f"Throughput={speed:.5f} Time={seconds:.1f}"
        )


# Afterwards


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Reconstruction losses, PSNR and accuracy on the validation clips, at all of their points."""
    output, where = Path(os.environ.get(contract.Env.OUTPUT, "out")), device.computing()
    path = results.checkpoint(output, s.checkpoint)
    record = Record()
    checkpoint.restore(path, {"record": record})
    assert record.config is not None
    model = Perceiver(record.config)
    model.load_state_dict(checkpoint.read(path, "model"))
    model.to(where).eval()
    data = place(s, record.config, output)
    if data.val is None:
        raise OutlastError(f"{data.place} has no validation clips; give a directory val, or raise --val")
    if s.reconstruct and s.clip >= len(data.val):
        raise OutlastError(f"--clip {s.clip} is not there: {data.place} has {len(data.val)} validation clips, counted from 0")
    points, kind = perceiver_measure.every(record.config), device.dtype(s.dtype, where)
    if s.eval_points:
        points = Points(queried(record.config, dataclasses.replace(s, image_points=s.eval_points), -1).image, points.audio)
    sums, remarks = perceiver_measure.Sums(), Remarks()
    for at, batch in perceiver_measure.read(data.val, 0, len(data.val), s.test_batch_size, s.workers):
        problems = batch.get("problem", [""] * len(batch["label"]))
        for row, problem in enumerate(problems):
            if problem and not s.skip_bad:
                raise OutlastError(problem)
            if problem and isinstance(data.val, Clips) and (sentence := remarks.see("bad", data.val.name(at + row))):
                print(sentence, file=sys.stderr)
        perceiver_data.checked(batch["label"], record.config.classes, data.place)
        weight = torch.tensor([float(not problem) for problem in problems])
        sums.add(perceiver_measure.measured(model, batch, weight, points, kind))
    found = sums.means(s)
    known = {"weights": path.name, "weights_sha256": results.sha256(model), "clips": int(sums.values[0])}
    results.write_json(output / "evaluation.json", {**known, "skipped": remarks.counts()["bad"], **found})
    print(f"{path.name} on {known['clips']} validation clips of {data.place}")
    for name, value in found.items():
        print(f"  {name:<10s} {value:10.5f}{perceiver_measure.UNITS.get(name, '')}")
    if s.reconstruct:
        shown = perceiver_measure.beside(model, data.val, s.clip, kind)
        perceiver_data.write(Path(s.reconstruct), *shown)
        print(f"{s.reconstruct}: clip {s.clip}, and beside it what {known['weights']} makes of it")


def main(argv: Sequence[str] | None = None) -> None:
    """Train or evaluate."""
    given = list(sys.argv[1:] if argv is None else argv)
    given = [each.replace("--config_file_path", "--config").replace("--config-file-path", "--config") for each in given]
    s = from_variables(settings.parse(Settings, given, __doc__))
    results.into(s.output_dir)
    (evaluate if s.evaluate or s.reconstruct else train)(s)


def from_variables(s: Settings) -> Settings:
    """Settings that are not given, from MAX_STEPS, BATCH_SIZE and NPROC_PER_NODE. Raises OutlastError for what is no number."""
    found = {}
    for name in ("MAX_STEPS", "BATCH_SIZE", "NPROC_PER_NODE"):
        if text := os.environ.get(name, ""):
            if not (text.isdecimal() and int(text) > 0):
                raise OutlastError(f"the variable {name} is {text!r}, and a whole number above 0 is needed; correct or remove it")
            found[name] = int(text)
    if "MAX_STEPS" in found and s.max_steps is None:
        s = dataclasses.replace(s, max_steps=found["MAX_STEPS"])
    if "BATCH_SIZE" in found and s.batch is None:
        s = dataclasses.replace(s, batch=found["BATCH_SIZE"] * found.get("NPROC_PER_NODE", 1))
    return s


if __name__ == "__main__":
    settings.run(main)
