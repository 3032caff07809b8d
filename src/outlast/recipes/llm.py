"""Fine-tunes a Hugging Face causal language model, in full or with LoRA, on JSON lines. Copy it and change it.

    outlast run examples/llm.yaml                                    # a tiny model, nothing to download
    outlast evaluate llm                                             # loss and perplexity on the validation file

    python -m outlast.recipes.llm --model-local-dir models/Qwen2.5-3B-Instruct --local-files-only \\
        --data data/train.jsonl --output out --lora --bf16
    torchrun --nproc-per-node 4 -m outlast.recipes.llm --config conf.yaml --data data --output out

Each line of the data is {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}.
The loss excludes prompts. Training writes checkpoints/, metrics.jsonl, best.json with the best epoch, and at the end
final.json. It also writes models in Hugging Face's format: epoch-1/, epoch-2/ and so on after each epoch, model/ at the end, and
merged/ with --merge. All are written to the job's output directory, or to --output (default: out) if there is no job. --evaluate
writes evaluation.json to the same directory.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from outlast.base.errors import OutlastError
from outlast.data.prepare import chat
from outlast.job import contract
from outlast.recipes import llm_data
from outlast.recipes.llm_data import Row, Samples
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.loop import Record
from outlast.recipes.shared.settings import flag
from outlast.training import Session, Stream, device
from outlast.training.samples.stream import Batch, share_of
from outlast.training.state import checkpoint, weights

if TYPE_CHECKING:
    from outlast.recipes.llm_model import Tuned

log = logging.getLogger("llm")
BEST = "best.json"
"""Name of the file that records the epoch with the lowest validation loss and the directory of that epoch's model."""
ALIASES = {"output": "output_dir"}
"""Flags of train_framework.py, mapped to this recipe's names for them. All other flags have the same names."""


@dataclass(frozen=True)
class Settings:
    model: str = flag("Qwen/Qwen2.5-3B-Instruct", "a directory, a model below $OUTLAST_MODELS, or a name at Hugging Face")
    model_local_dir: str = flag("", "directory of the model; has precedence over --model")
    tokenizer_local_dir: str = flag("", "directory of the tokenizer; default: the model's")
    local_files_only: bool = flag(False, "download nothing")

    data: str = flag("", "train.jsonl, its directory, or a prepared one; default $OUTLAST_DATA", group="data and output")
    val: str = flag("", "validation file, or none; default: val.jsonl beside the training file")
    skip_bad: bool = flag(False, "skip and count lines that are not records, and report the first")
    output_dir: str = flag("", "output directory; a job's output has precedence")
    report_json: str = flag("", "file for world_size, tokens_total, elapsed_sec, tokens_per_sec")
    epoch_results: bool = flag(True, "write epoch-N/ after every epoch")
    merge: bool = flag(False, "with --lora, write merged weights, which need no peft, to merged/ at the end")

    epochs: int = flag(2, "passes over the training data", least=1, group="training")
    max_steps: int | None = flag(None, "maximum number of steps", least=1)
    batch: int = flag(2, "samples per micro-batch", least=1)
    grad_accum: int = flag(8, "micro-batches per step over all ranks", least=1)
    seq_len: int = flag(4096, "maximum tokens of a sample; longer samples are truncated", least=2)
    packing: bool = flag(True, "pack samples into rows instead of padding them; attention stays within each sample")
    lr: float = flag(2e-4, "maximum learning rate", least=0)
    warmup: float = flag(0.05, "warm-up, as a fraction of all steps; then the learning rate falls to 0", least=0, most=1)
    wd: float = flag(0.05, "AdamW's weight decay of matrices", least=0)
    grad_clip: float = flag(1.0, "maximum norm of the gradient; 0: no limit", least=0)
    seed: int = flag(42, "seed of LoRA's initial weights, of dropout and of the order of samples")

    lora: bool = flag(False, "train small matrices beside the frozen weights", group="LoRA")
    lora_r: int = flag(16, "rank of these matrices", least=1)
    lora_alpha: int = flag(16, "their scale is alpha / r", least=1)
    lora_dropout: float = flag(0.05, "dropout probability of their inputs in training", least=0, most=1)
    target_modules: tuple[str, ...] = flag(("q_proj", "k_proj", "v_proj", "o_proj"), "modules that get these matrices")

    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "auto: bfloat16 where the device supports it", group="machine")
    bf16: bool = flag(False, "the same as --dtype bfloat16")
    parallel: Literal["ddp", "fsdp"] = flag("ddp", "whole model on every rank, or sharded by layer (FSDP2)")
    gradient_checkpointing: bool = flag(False, "recompute activations instead of keeping them: less memory, a third slower")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = flag(
        "INFO", "minimum level of printed lines", group="logs"
    )
    log_interval: int = flag(50, "steps between two [TRAIN] lines", least=1)
    log_batches: Literal["all", "first-last", "none"] = flag("first-last", "batches of an epoch with a [COLLATE] line")

    evaluate: bool = flag(False, "evaluate a checkpoint on the validation file", group="instead of training")
    checkpoint: str = flag("", "checkpoint to evaluate: best, or a step; default: the newest")


class Training(loop.Recipe):
    """A training run, whose methods `loop.train` calls."""

    def __init__(self, s: Settings, run: Session) -> None:
        super().__init__(s, run)
        logged(s, run.rank)
        results.writable(s.report_json, "--report-json")
        self.parts = Parts.load(s, run.device, run)
        self.tuned, self.record = self.parts.tuned, self.parts.record
        self.net = self.parallel()
        self.trains = self.parts.training()
        fused = run.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(loop.groups(self.trains, s.wd), lr=s.lr, betas=(0.9, 0.95), fused=fused)
        pieces = s.batch if not self.parts.packing and s.grad_accum >= run.world_size else None
        step = s.batch * s.grad_accum  # samples over all ranks
        self.stream = Stream(
            self.parts.train, step, seed=s.seed, epochs=s.epochs, steps=s.max_steps, microbatch=pieces, collate=list
        )
        self.steps = self.stream.total_steps
        self.epochs = -(-self.steps // self.stream.steps_per_epoch) if s.max_steps else s.epochs
        self.dtype = "bfloat16" if self.parts.bfloat16 else "float32"
        self.used = {"dtype": self.dtype, "packing": self.parts.packing}

    def state(self) -> dict[str, Any]:
        return super().state() | {"model": self.trains}

    def parallel(self) -> nn.Module:
        """Wrap the model for training on all ranks."""
        s, tuned = self.s, self.tuned
        if s.parallel == "fsdp":
            return loop.parallel("fsdp", self.run, tuned, _llm_model().layers(tuned.base))
        frozen = [name for name, each in tuned.named_parameters() if not each.requires_grad]
        frozen += [name for name, _ in tuned.named_buffers()]  # no broadcast is needed, because every rank has read them
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tuned, frozen)
        return loop.parallel("ddp", self.run, tuned)

    def begin(self, step: int) -> None:
        s, run = self.s, self.run
        self.before_s, self.whole = self.record.elapsed_s, self.stream.epoch > self.record.epoch
        say("CFG", world_size=run.world_size, device=run.device, dtype=self.dtype, parallel=s.parallel,
            packing=self.parts.packing, gradient_checkpointing=s.gradient_checkpointing)  # fmt: skip
        say("CFG", batch=s.batch, grad_accum=s.grad_accum, samples_a_step=s.batch * s.grad_accum, steps=self.steps,
            epochs=self.epochs, lr=s.lr, warmup_steps=math.ceil(s.warmup * self.steps), wd=s.wd, grad_clip=s.grad_clip,
            seq_len=s.seq_len)  # fmt: skip
        if s.lora:
            targets = ",".join(s.target_modules)
            say("CFG", lora_r=s.lora_r, lora_alpha=s.lora_alpha, lora_dropout=s.lora_dropout, target_modules=targets)
        if step >= self.steps:
            log.info(f"[CFG] all {step} steps are done; --epochs or --max-steps sets more")

    def batches(self) -> Iterator[Batch]:
        """Return this rank's batches. Rank and world size are passed, because `iter(stream)` would fail with a sharded model."""
        return self.stream.batches(self.run.rank, self.run.world_size)

    def rate(self, step: int, batch: Batch | None = None) -> float:
        return rate(self.s, step, self.steps)

    def update(self, step: int, batch: Batch) -> None:
        """Do one step: compute the gradients of the mean loss over all learned tokens of the global batch, then call AdamW."""
        s, world = self.s, self.run.world_size
        rows = self.parts.rows([data for data, _ in batch.pieces], s.batch * s.seq_len)
        real = bool(len(batch.indices))  # otherwise the rows are another rank's, with weight 0
        own = [sum(len(row.targets) for row in rows) * real, sum(row.real for row in rows) * real]
        passes = [len(rows) if rank == self.run.rank else 0 for rank in range(world)]
        counts = torch.tensor([*own, *passes], device=self.run.device)
        if world > 1:
            dist.all_reduce(counts)
        learned, tokens, *passes = counts.tolist()
        share = world / learned if real else 0.0  # DDP and FSDP average over the ranks
        total = torch.zeros((), device=self.run.device)
        batch = dataclasses.replace(batch, pieces=tuple((row, share) for row in rows), most=max(passes))
        for row, share in batch.split(self.net):
            loss: Tensor = self.net(row) * share
            loss.backward()
            total += loss.detach()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.norm = nn.utils.clip_grad_norm_(trained, s.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        device.of(self.run.device).mark_step()
        self.loss = sum(self.run.gather(total.item())) / world if world > 1 else total.item()
        self.record.tokens += tokens
        self.log.done += tokens
        if s.log_batches == "all" or (s.log_batches == "first-last" and (batch.ends_epoch or batch.start == 0)):
            collated(step + 1, batch, rows)

    def report(self, step: int, batch: Batch) -> None:
        speed: dict[str, Any] = {}
        if step % self.s.log_interval == 0 or batch.ends_epoch or step == self.steps:
            speed = {"tokens_per_s": self.log.speed()}
        lr, tokens = self.rate(step - 1), self.record.tokens
        values: dict[str, Any] = {"loss": self.loss, "lr": lr, "grad_norm": loop.plain(self.norm), "epoch": batch.epoch + 1}
        self.run.log(step, **values, tokens=tokens, **speed)
        self.record.losses["loss"] = self.loss
        if speed:
            about = f"epoch={batch.epoch + 1}/{self.epochs} step={step} tokens/s={speed['tokens_per_s']:.0f}"
            log.info(f"[TRAIN] {about} loss={self.loss:.4f} lr={lr:.3g}")

    def due(self, step: int, batch: Batch) -> bool:
        self.whole = batch.ends_epoch
        return super().due(step, batch)

    def measure(self, step: int) -> float:
        """Return the validation loss, or NaN if there is no validation data. After a complete epoch, writes the model first."""
        s, record, elapsed = self.s, self.record, self.elapsed_s
        epoch = record.epoch + 1
        directory = f"epoch-{epoch}" if self.whole and s.epoch_results else ""
        if directory:
            self.write(directory)
        loss = self.validate(step, directory, epoch)
        measured = f" val_loss={loss:.4f} perplexity={perplexity(loss):.2f}" if math.isfinite(loss) else ""
        log.info(f"[EPOCH] {epoch}/{self.epochs} tokens_seen={record.tokens} time={elapsed:.2f}s{measured}")
        record.epoch = epoch if self.whole else record.epoch
        return loss

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has trained, including the time before it was resumed."""
        return float(self.before_s + self.log.elapsed_s)

    def remember(self) -> None:
        self.record.elapsed_s = self.elapsed_s

    def validate(self, step: int, directory: str, epoch: int) -> float:
        """Return the validation loss, or NaN if there is no validation data. Records the best loss so far. All ranks must call
        this."""
        record = self.record
        if self.parts.val is None:
            return math.nan
        loss = self.mean(self.parts.val)
        measured: dict[str, Any] = {"val_loss": loss, "perplexity": perplexity(loss)}
        record.losses |= measured
        self.run.log(step, **measured)
        if not record.best or loss < record.best["val_loss"]:
            place = {"directory": directory} if directory else {}  # never `model`, which the next run overwrites
            record.best = {"epoch": epoch, "step": step, **place, **measured}
            if self.run.rank == 0:
                results.write_json(self.run.output / BEST, record.best)
        return loss

    def mean(self, samples: Samples) -> float:
        """Return the mean loss over the learned tokens of all samples, which are divided among the ranks. All ranks must call
        this."""
        run = self.run
        begin, end = share_of(len(samples), run.world_size, run.rank)
        rows = validation(self.parts, samples, range(begin, end), self.s)
        passes = max(run.gather(len(rows)))
        stand_in = validation(self.parts, samples, range(1), self.s)[:1]
        total = torch.zeros((), device=run.device, dtype=torch.float64)
        net = self.net if self.s.parallel == "fsdp" else self.tuned  # FSDP gathers weights in every pass, on all ranks
        net.eval()
        with torch.no_grad():
            for number in range(passes):
                row = rows[number] if number < len(rows) else stand_in[0]
                loss: Tensor = net(row)
                if number < len(rows):
                    total += loss.double()
                run.alive()
        net.train()
        sums = run.gather((total.item(), sum(len(row.targets) for row in rows)))
        return float(sum(each for each, _ in sums) / sum(count for _, count in sums))

    def write(self, name: str) -> dict[str, Tensor]:
        """Write the model to a directory in Hugging Face's format. Returns the trained tensors on rank 0. All ranks must call
        this."""
        llm_model, run, parts = _llm_model(), self.run, self.parts
        tensors: dict[str, Tensor] = llm_model.whole(self.tuned.model, keep=run.rank == 0)
        with results.by_rank_0(run) as writes:
            if writes:
                dtype = llm_model.stored(parts.directory)
                llm_model.write(self.tuned.model, parts.tokenizer, run.output / name, tensors, dtype)
        return tensors

    def finish(self, step: int) -> None:
        s, run, record = self.s, self.run, self.record
        elapsed, tokens = self.elapsed_s, record.tokens
        tensors = self.write("model")
        speed = tokens / max(1e-9, elapsed)
        about = f"epochs={self.epochs} total_tokens={tokens} elapsed={elapsed:.2f}s (~{speed:.0f} tok/s)"
        log.info(f"[DONE] training finished: {about}")
        if run.rank:
            return
        if s.merge and s.lora:
            with run.alive():
                _llm_model().merge(self.parts.directory, run.output / "model", run.output / "merged", self.parts.tokenizer)
        results.final(run, tensors, step=step, **record.losses, tokens_total=tokens, best=record.best)
        if s.report_json:
            report = {"world_size": run.world_size, "tokens_total": tokens, "elapsed_sec": round(elapsed, 3)}
            results.write_json(Path(s.report_json), {**report, "tokens_per_sec": round(speed, 3)})


def say(kind: str, **values: Any) -> None:
    """Print a line of named values."""
    log.info(f"[{kind}] " + " ".join(f"{name}={value}" for name, value in values.items()))


def collated(step: int, batch: Batch, rows: Sequence[Row]) -> None:
    """Print a description of rank 0's part of a batch."""
    cells, real = sum(row.tokens.numel() for row in rows), sum(row.real for row in rows)
    shapes = ",".join("x".join(map(str, row.tokens.shape)) for row in rows[:4])
    say("COLLATE", epoch=batch.epoch + 1, step=step, samples=len(batch.indices), rows=len(rows), shapes=shapes, tokens=real,
        learned=sum(len(row.targets) for row in rows), padding=f"{1 - real / cells:.1%}")  # fmt: skip


def rate(s: Settings, step: int, steps: int) -> float:
    """Return a step's learning rate, which rises linearly during the warm-up, and then falls linearly to 0 at step `steps`."""
    warmup = math.ceil(s.warmup * steps)
    if step < warmup:
        return s.lr * (step + 1) / warmup
    return s.lr * (steps - step) / max(1, steps - warmup)


@dataclass
class Parts:
    """The model, the tokenizer and the data."""

    tuned: Tuned
    tokenizer: Any
    train: Samples
    val: Samples | None
    directory: Path  # of the base model
    record: Record
    bfloat16: bool
    packing: bool

    @classmethod
    def load(cls, s: Settings, where: torch.device, run: Session | None) -> Parts:
        """Load all parts. All ranks must call this if `run` is given.

        One process per machine tokenizes the data, and its errors are raised on all ranks.
        """
        started = time.monotonic()
        llm_model = _llm_model()
        directory, name = llm_model.place(s.model, s.model_local_dir, offline=s.local_files_only)
        tokenizer = directory
        if s.tokenizer_local_dir:
            tokenizer, _ = llm_model.place("", s.tokenizer_local_dir, offline=True, what="tokenizer")
        words = chat.load(tokenizer.resolve(), chat.digest(tokenizer))
        log.info(f"[STEP] tokenizer {tokenizer}: {len(words):,} tokens")
        low = bfloat16(s, where, run)
        model = llm_model.load(directory, torch.bfloat16 if low and s.lora else torch.float32, s.seq_len, where)
        model.name_or_path = name
        train, val = data(s, tokenizer, model.get_input_embeddings().num_embeddings, run)
        about = {"base": llm_model.fingerprint(model) if s.lora else "", "data": train.digest}
        progress = {"epoch": 0, "best": {}, "tokens": 0, "elapsed_s": 0.0}  # `epoch`: number of epochs whose results are written
        record = Record({"base": "another base model", "data": "other training data"}, **about, **progress)
        if s.lora:
            options = {"r": s.lora_r, "lora_alpha": s.lora_alpha, "lora_dropout": s.lora_dropout}
            model = llm_model.adapted(model, s.target_modules, **options)
        whole = run is None or s.parallel == "ddp" or llm_model.needs_gpu(model)
        tuned = llm_model.Tuned(model.to(where) if whole else model, low=low)  # FSDP moves it to the device layer by layer
        tuned.train()
        obstacle = tuned.check()
        if obstacle and s.packing:
            log.warning("[CFG] %s", obstacle)
        if s.gradient_checkpointing:
            llm_model.recompute(tuned.base)
        trains, every = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
        kind, seconds = type(tuned.base).__name__, time.monotonic() - started
        log.info(f"[STEP] model {directory}: {kind}, {trains:,} of {every:,} parameters train, {seconds:.1f}s")
        return cls(tuned, words, train, val, directory, record, low, s.packing and not obstacle)

    def training(self) -> nn.Module:
        """Return the trainable parameters, for checkpoints."""
        return weights.trained(self.tuned.model)

    def rows(self, pieces: Sequence[Sequence[llm_data.Sample]], size: int) -> list[Row]:
        """Return the rows of the given micro-batches. Packed rows have at most `size` tokens."""
        if self.packing:
            return llm_data.packed([sample for piece in pieces for sample in piece], size)
        return [llm_data.padded(piece) for piece in pieces]


def _llm_model() -> Any:
    """Import `llm_model` only when it is needed, because it imports transformers, which would delay --help by seconds."""
    from outlast.recipes import llm_model

    return llm_model


def data(s: Settings, tokenizer: Path, vocabulary: int, run: Session | None) -> tuple[Samples, Samples | None]:
    """Return the samples for training and validation. If a line is invalid, OutlastError is raised on all ranks."""
    named = s.data or os.environ.get(contract.Env.DATA, "")
    if not named:
        raise OutlastError(f"no data: give --data train.jsonl, or set {contract.Env.DATA}; --help shows what a line looks like")
    train, val, sentence = llm_data.sources(named, s.val)
    if sentence:
        log.warning("[CFG] %s", sentence)
    directories: dict[llm_data.Source, Path] = {}
    problem = ""
    try:
        with run.alive() if run else contextlib.nullcontext():
            for source in (train, val):
                if source is not None:
                    make = run is None or run.local_rank == 0
                    directories[source] = llm_data.cached(
                        source, tokenizer, skip_bad=s.skip_bad, make=make, say=lambda text: log.warning("[DATA] %s", text)
                    )
    except OutlastError as error:
        if run is None:
            raise
        problem = str(error)
    if run and (problems := [each for each in run.gather(problem) if each]):
        raise OutlastError(problems[0])
    read = {source: Samples(directory, source.part, s.seq_len, vocabulary) for source, directory in directories.items()}
    for source, samples in read.items():
        log.info(f"[DATA] {source.path}: {len(samples):,} samples, {samples.tokens:,} tokens")
        if samples.cut:
            log.warning(f"[DATA] {samples.cut:,} samples are longer than --seq-len {s.seq_len} and lose their end")
        if samples.without:
            log.warning(f"[DATA] {samples.without:,} samples are left out: nothing to learn within --seq-len {s.seq_len}")
    return read[train], read.get(val) if val else None


def bfloat16(s: Settings, where: torch.device, run: Session | None) -> bool:
    """Return whether matrix products are computed in bfloat16. All ranks must call this if `run` is given."""
    if s.bf16 and s.dtype == "float32":
        raise OutlastError("--bf16 and --dtype float32 contradict each other; leave out one of the two")
    return s.bf16 or device.dtype(s.dtype, where, run.gather if run else None) == torch.bfloat16


def validation(parts: Parts, samples: Samples, numbers: range, s: Settings) -> list[Row]:
    """Return the rows of the validation samples at the indices `numbers`."""
    pieces = [[samples[i] for i in numbers[at : at + s.batch]] for at in range(0, len(numbers), s.batch)]
    return parts.rows(pieces, s.batch * s.seq_len)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


# Measuring


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Measure a checkpoint's loss and perplexity on the validation file."""
    logged(dataclasses.replace(s, log_level="WARNING"), 0)
    where, path = device.computing(), results.checkpoint(results.output(), s.checkpoint)
    parts = Parts.load(s, where, None)
    if parts.val is None:
        raise OutlastError("there is nothing to measure on; name a validation file with --val")
    parts.record.data = ""  # a different training file does not matter here
    checkpoint.restore(path, {"model": parts.training(), "record": parts.record})
    parts.tuned.eval()
    total, learned = 0.0, 0
    for row in validation(parts, parts.val, range(len(parts.val)), s):
        total += parts.tuned(row).item()
        learned += len(row.targets)
    loss = total / learned
    about = {"samples": len(parts.val), "tokens": learned, "loss": loss, "perplexity": perplexity(loss)}
    results.evaluation(path.name, parts.training(), **about)
    print(f"{'weights':<24}{'samples':>10}{'learned tokens':>16}{'val loss':>12}{'perplexity':>12}")
    print(f"{path.name:<24}{len(parts.val):>10,}{learned:>16,}{loss:>12.4f}{perplexity(loss):>12.2f}", flush=True)


def logged(s: Settings, rank: int) -> None:
    """Configure the log to print lines on rank 0 only."""
    log.handlers = [logging.StreamHandler(sys.stdout)]
    log.handlers[0].setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    log.propagate = False
    log.setLevel(getattr(logging, s.log_level) if rank == 0 else logging.CRITICAL)


def main(argv: Sequence[str] | None = None) -> None:
    s = settings.parse(Settings, argv, __doc__, ALIASES)
    results.into(s.output_dir, "1 min val_loss")
    if s.evaluate:
        evaluate(s)
    else:
        loop.train(Training, s)


if __name__ == "__main__":
    results.run(main)
