"""Fine-tunes a causal language model of Hugging Face on JSON lines, whole or by LoRA. Copy it and change it.

    outlast run examples/llm.yaml                                    # a tiny model, nothing to download
    outlast evaluate llm                                             # loss and perplexity on the validation file

    python -m outlast.recipes.llm --model-local-dir models/Qwen2.5-3B-Instruct --local-files-only \\
        --data data/train.jsonl --output out --lora --bf16
    torchrun --nproc-per-node 4 -m outlast.recipes.llm --config conf.yaml --data data --output out

A line of the data is {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...};
prompts are not learned. Writes to the job's output, --output without a job (default: out): checkpoints/, metrics.jsonl, epoch-1/,
epoch-2/ ..., best.json that names the best of them, model/ (all as Hugging Face reads them), merged/ with --merge, final.json;
evaluation.json with --evaluate.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast import contract
from outlast.data.prepare import chat
from outlast.errors import OutlastError
from outlast.recipes import llm_data, memory, results, settings
from outlast.recipes.llm_data import Row, Samples
from outlast.recipes.settings import flag
from outlast.training import Session, Stream, checkpoint, device, session
from outlast.training.stream import Batch, dealt

if TYPE_CHECKING:
    from outlast.recipes.llm_model import Tuned

log = logging.getLogger("llm")
BEST = "best.json"
"""Names the directory of the epoch with the lowest validation loss."""


@dataclass(frozen=True)
class Settings:
    model: str = flag("Qwen/Qwen2.5-3B-Instruct", "a directory, a model below $OUTLAST_MODELS, or a name at Hugging Face")
    model_local_dir: str = flag("", "directory of the model; has precedence over --model")
    tokenizer_local_dir: str = flag("", "directory of the tokenizer; default: the model's")
    local_files_only: bool = flag(False, "download nothing")

    data: str = flag(
        "", "train.jsonl, the directory that holds it, or a prepared one; default $OUTLAST_DATA", group="data and output"
    )
    val: str = flag("", "validation file, or none; default: val.jsonl beside the training file")
    skip_bad: bool = flag(False, "leave out lines that are no records, count them and name the first")
    output_dir: str = flag("", "where to write; a job's output has precedence", also=("output", "out_dir"))
    report_json: str = flag("", "file for world_size, tokens_total, elapsed_sec, tokens_per_sec")
    epoch_results: bool = flag(True, "write epoch-N/ after every epoch")
    merge: bool = flag(False, "with --lora, write merged/ at the end: weights that need no peft")

    epochs: int = flag(2, "passes over the training data", least=1, group="training")
    max_steps: int | None = flag(None, "end after so many steps", least=1)
    batch: int = flag(2, "samples of a micro-batch", least=1, also=("batch_size",))
    grad_accum: int = flag(
        8,
        "micro-batches of a step over all ranks: any number of ranks computes the same step",
        least=1,
        also=("gradient_accumulation_steps",),
    )
    seq_len: int = flag(4096, "tokens of a sample; longer ones lose their end", least=2)
    packing: bool = flag(True, "lay samples one after another instead of padding them; attention stays within each")
    lr: float = flag(2e-4, "highest learning rate", least=0, also=("learning_rate",))
    warmup: float = flag(0.05, "share of all steps in which it rises to that; then it falls to 0", least=0, most=1)
    wd: float = flag(0.05, "AdamW's weight decay, of matrices", least=0, also=("weight_decay",))
    grad_clip: float = flag(1.0, "longest gradient; 0: any", least=0)
    seed: int = flag(42, "seed of LoRA's first weights, of dropout and of the order of samples")

    lora: bool = flag(False, "train small matrices beside the weights, which stay as they are", group="LoRA")
    lora_r: int = flag(16, "rank of these matrices", least=1)
    lora_alpha: int = flag(16, "they count alpha / r", least=1)
    lora_dropout: float = flag(0.05, "share of their inputs dropped in training", least=0, most=1)
    target_modules: tuple[str, ...] = flag(("q_proj", "k_proj", "v_proj", "o_proj"), "the modules that get them")

    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of matrix products; auto: bfloat16 where the device has it. Frozen weights are kept in it", group="machine"
    )
    bf16: bool = flag(False, "the same as --dtype bfloat16")
    parallel: Literal["ddp", "fsdp"] = flag("ddp", "whole model on every rank, or sharded by layer (FSDP2)")
    gradient_checkpointing: bool = flag(False, "compute activations twice instead of keeping them: less memory, a third slower")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = flag("INFO", "which lines to print", group="logs")
    log_interval: int = flag(50, "steps between two lines [TRAIN]", least=1, also=("log_every",))
    log_batches: Literal["all", "first-last", "none"] = flag("first-last", "which batches of an epoch get a line [COLLATE]")

    evaluate: bool = flag(False, "measure a checkpoint on the validation file", group="instead of training", also=("eval_only",))
    checkpoint: str = flag("", "the checkpoint to measure: best, or a step; default: the newest")

    @property
    def accumulated(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch * self.grad_accum


# Training


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    with session.open(seed=s.seed, quiet=True) as run:
        logged(s, run.rank)
        results.writable(s.report_json, "--report-json")
        if run.device.type == "cpu":
            memory.keep_freed()
        parts = Parts.found(s, run.device, run)
        tuned, record = parts.tuned, parts.record
        net = parallel(s, run, tuned)
        trains = parts.training()
        optimizer = adamw(s, trains, run.device)
        pieces = s.batch if not parts.packing and s.grad_accum >= run.world_size else None
        stream = Stream(
            parts.train, s.accumulated, seed=s.seed, epochs=s.epochs, steps=s.max_steps, microbatch=pieces, collate=list
        )
        with results.hyperparameters(optimizer):
            step = run.resume({"model": trains, "optimizer": optimizer, "stream": stream, "record": record})
        run.parameters(settings.values(s) | {"dtype": "bfloat16" if parts.bfloat16 else "float32", "packing": parts.packing})
        trainer = Trainer(s, run, parts, net, optimizer, stream)
        trainer.begin(step)
        if record.epoch < stream.epoch:  # killed, or interrupted, before its results were written
            trainer.results(step, stream.epoch)
        for batch in stream.batches(run.rank, run.world_size):  # by hand: the state does not show that FSDP shards over all ranks
            trainer.update(step, batch)
            step += 1
            trainer.report(step, batch)
            leaving = run.interrupted()
            if not leaving and (batch.ends_epoch or step == s.max_steps):
                trainer.results(step, batch.epoch + 1, whole=batch.ends_epoch)
            elif leaving or run.due(step):
                record.elapsed_s = trainer.clock.elapsed_s
                run.save(step, metric=math.nan)  # not measured, so it is never the best
        trainer.finish(step)


class Record:
    """What a run remembers beside weights: what it began with, and what it has measured."""

    def __init__(self, base: str = "", data: str = "") -> None:
        self.base, self.data = base, data
        self.epoch = 0
        """Epochs whose results are written."""
        self.measured = -1
        """The last step at which the validation loss was measured."""
        self.best: dict[str, Any] = {}
        """Epoch, step, loss and perplexity of the best, and its directory if it has one."""
        self.losses: dict[str, float] = {}
        """The newest of each kind."""
        self.tokens = 0
        """Tokens trained on, over all ranks and without padding."""
        self.elapsed_s = 0.0
        """Time of the steps of all generations."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank but for the time."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved. Raises OutlastError when it was saved by a run on other weights or other data."""
        for name, what, remedy in (
            ("base", "another base model", "its base"),
            ("data", "other training data", "the same data and --seq-len"),
        ):
            theirs, ours = state[name], getattr(self, name)
            if theirs and ours and theirs != ours:
                raise OutlastError(
                    f"the checkpoint belongs to {what} ({theirs}) than the one here ({ours}); resume with {remedy}, or "
                    "start a new run in another output"
                )
        vars(self).update({**state, "base": self.base or state["base"], "data": self.data or state["data"]})


class Clock:
    """The time that steps take, without evaluations and what comes before the first step."""

    def __init__(self, elapsed_s: float) -> None:
        self._before, self._since = elapsed_s, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._before + time.monotonic() - self._since

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what is done meanwhile."""
        before = self.elapsed_s
        yield
        self._before, self._since = before, time.monotonic()


@dataclass
class Parts:
    """Model, tokenizer and data."""

    tuned: Tuned
    tokenizer: Any
    train: Samples
    val: Samples | None
    directory: Path
    """Of the base model."""
    record: Record
    bfloat16: bool
    packing: bool

    @classmethod
    def found(cls, s: Settings, where: torch.device, run: Session | None) -> Parts:
        """Read everything. One process of each machine tokenizes, and all say what is wrong with it. A collective with `run`."""
        started = time.monotonic()
        llm_model = _llm_model()
        offline = s.local_files_only
        named = llm_model.place(s.model, s.model_local_dir, offline=offline)
        directory = llm_model.downloaded(named)
        tokenizer = directory
        if s.tokenizer_local_dir:
            tokenizer = Path(llm_model.place("", s.tokenizer_local_dir, offline=offline, what="tokenizer"))
        known = chat.load(tokenizer.resolve(), chat.digest(tokenizer))
        log.info(f"[STEP] tokenizer {tokenizer}: {len(known):,} tokens")
        low = bfloat16(s, where, run)
        model = llm_model.load(directory, torch.bfloat16 if low and s.lora else torch.float32, s.seq_len, where)
        model.name_or_path = str(directory.resolve()) if Path(named).is_dir() else named  # what an adapter says it belongs to
        train, val = data(s, tokenizer, model.get_input_embeddings().num_embeddings, run)
        record = Record(llm_model.fingerprint(model) if s.lora else "", train.digest)
        if s.lora:
            model = llm_model.adapted(model, llm_model.Lora(s.lora_r, s.lora_alpha, s.lora_dropout, s.target_modules))
        whole = run is None or s.parallel == "ddp" or llm_model.needs_gpu(model)
        tuned = llm_model.Tuned(model.to(where) if whole else model, low=low)  # FSDP takes it to the device layer by layer
        tuned.train()
        cannot = tuned.check()
        if cannot and s.packing:
            log.warning("[CFG] %s", cannot)
        if s.gradient_checkpointing:
            llm_model.recompute(tuned.base)
        trains, every = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
        kind, seconds = type(tuned.base).__name__, time.monotonic() - started
        log.info(f"[STEP] model {directory}: {kind}, {trains:,} of {every:,} parameters train, {seconds:.1f}s")
        return cls(tuned, known, train, val, directory, record, low, s.packing and not cannot)

    def training(self) -> nn.Module:
        """What a checkpoint holds of the model."""
        found: nn.Module = _llm_model().training(self.tuned.model)
        return found

    def rows(self, pieces: Sequence[Sequence[llm_data.Sample]], room: int) -> list[Row]:
        """The forward passes for some micro-batches."""
        if self.packing:
            return llm_data.packed([sample for piece in pieces for sample in piece], room)
        return [llm_data.padded(piece) for piece in pieces]


def _llm_model() -> Any:
    """The module that imports transformers, which takes seconds: --help does without."""
    from outlast.recipes import llm_model

    return llm_model


def data(s: Settings, tokenizer: Path, vocabulary: int, run: Session | None) -> tuple[Samples, Samples | None]:
    """What to train on and to measure. Raises OutlastError, on all ranks when one finds a bad line."""
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
                    ours = run is None or run.local_rank == 0
                    directories[source] = llm_data.cached(
                        source, tokenizer, skip_bad=s.skip_bad, ours=ours, say=lambda text: log.warning("[DATA] %s", text)
                    )
    except OutlastError as error:
        if run is None:
            raise
        problem = str(error)
    if run and (found := [each for each in run.gather(problem) if each]):
        raise OutlastError(found[0])
    read = {source: Samples(directory, source.part, s.seq_len, vocabulary) for source, directory in directories.items()}
    for source, samples in read.items():
        log.info(f"[DATA] {source.path}: {len(samples):,} samples, {samples.tokens:,} tokens")
        if samples.cut:
            log.warning(f"[DATA] {samples.cut:,} samples are longer than --seq-len {s.seq_len} and lose their end")
        if samples.without:
            log.warning(f"[DATA] {samples.without:,} samples are left out: nothing to learn within --seq-len {s.seq_len}")
    return read[train], read.get(val) if val else None


def bfloat16(s: Settings, where: torch.device, run: Session | None) -> bool:
    """Whether matrix products are in bfloat16. A collective with `run`."""
    if s.bf16 and s.dtype == "float32":
        raise OutlastError("--bf16 and --dtype float32 contradict each other; leave out one of the two")
    return s.bf16 or device.dtype(s.dtype, where, run.gather if run else None) == torch.bfloat16


def parallel(s: Settings, run: Session, tuned: Tuned) -> nn.Module:
    """What trains the model on all ranks."""
    if s.parallel == "fsdp":
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        for layer in _llm_model().layers(tuned.base):
            fully_shard(layer, mesh=mesh)
        fully_shard(tuned, mesh=mesh)
        return tuned
    if run.world_size == 1:
        return tuned
    frozen = [name for name, each in tuned.named_parameters() if not each.requires_grad] + [
        name for name, _ in tuned.named_buffers()
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tuned, frozen)  # every rank has read them
    return run.ddp(tuned)


def adamw(s: Settings, model: nn.Module, where: torch.device) -> torch.optim.AdamW:
    """AdamW, in one kernel where there is one. Matrices decay, norms and biases do not."""
    parameters = list(model.parameters())
    decayed, others = ([p for p in parameters if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": some, "weight_decay": wd} for some, wd in ((decayed, s.wd), (others, 0.0)) if some]
    return torch.optim.AdamW(groups, lr=s.lr, betas=(0.9, 0.95), eps=1e-8, fused=where.type in ("cpu", "cuda"))


def rate(s: Settings, step: int, steps: int) -> float:
    """The learning rate of a step: a line upwards, then one down to 0 at the last of all `steps`."""
    rising = math.ceil(s.warmup * steps)
    if step < rising:
        return s.lr * (step + 1) / rising
    return s.lr * (steps - step) / max(1, steps - rising)


@dataclass
class Trainer:
    """The parts of a step."""

    s: Settings
    run: Session
    parts: Parts
    net: nn.Module
    """What exchanges gradients."""
    optimizer: torch.optim.Optimizer
    stream: Stream

    def __post_init__(self) -> None:
        self.tuned, self.record = self.parts.tuned, self.parts.record
        self.room = self.s.batch * self.s.seq_len
        self.epochs = -(-self.stream.total_steps // self.stream.steps_per_epoch) if self.s.max_steps else self.s.epochs
        self.clock = Clock(self.record.elapsed_s)
        self.printed = self.record.tokens, self.record.elapsed_s

    def begin(self, step: int) -> None:
        """Say what is trained."""
        s, run = self.s, self.run
        steps = self.stream.total_steps
        self.say("CFG", world_size=run.world_size, device=run.device, dtype="bfloat16" if self.parts.bfloat16 else "float32",
                 parallel=s.parallel, packing=self.parts.packing, gradient_checkpointing=s.gradient_checkpointing)  # fmt: skip
        self.say("CFG", batch=s.batch, grad_accum=s.grad_accum, samples_a_step=s.accumulated, steps=steps,
                 epochs=self.epochs, lr=s.lr, warmup_steps=math.ceil(s.warmup * steps), wd=s.wd,
                 grad_clip=s.grad_clip, seq_len=s.seq_len)  # fmt: skip
        if s.lora:
            targets = ",".join(s.target_modules)
            self.say("CFG", lora_r=s.lora_r, lora_alpha=s.lora_alpha, lora_dropout=s.lora_dropout, target_modules=targets)
        if step >= self.stream.total_steps:
            log.info(f"[CFG] all {step} steps are done; --epochs or --max-steps sets more")

    def say(self, kind: str, **values: Any) -> None:
        """A line of values by name."""
        log.info(f"[{kind}] " + " ".join(f"{name}={value}" for name, value in values.items()))

    def update(self, step: int, batch: Batch) -> None:
        """One step: gradients of the mean loss over all learned tokens of the global batch, then AdamW."""
        s, world = self.s, self.run.world_size
        rows = self.parts.rows([data for data, _ in batch.pieces], self.room)
        real = bool(len(batch.indices))  # else they are another rank's, and take part without counting
        ours = [sum(len(row.targets) for row in rows) * real, sum(row.real for row in rows) * real]
        passes = [len(rows) if rank == self.run.rank else 0 for rank in range(world)]
        counts = torch.tensor([*ours, *passes], device=self.run.device)
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
        self.norm = nn.utils.clip_grad_norm_(self.trained, s.grad_clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, step, self.stream.total_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        device.of(self.run.device).mark_step()
        self.loss = sum(self.run.gather(total.item())) / world if world > 1 else total.item()
        self.record.tokens += tokens
        self.collated(step + 1, batch, rows)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that train."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def collated(self, step: int, batch: Batch, rows: Sequence[Row]) -> None:
        """Describe rank 0's part of a batch, if that is wanted."""
        if self.s.log_batches == "none" or not (self.s.log_batches == "all" or batch.ends_epoch or batch.start == 0):
            return
        cells = sum(row.tokens.numel() for row in rows)
        real = sum(row.real for row in rows)
        learned = sum(len(row.targets) for row in rows)
        shapes = ",".join("x".join(map(str, row.tokens.shape)) for row in rows[:4])
        self.say("COLLATE", epoch=batch.epoch + 1, step=step, samples=len(batch.indices), rows=len(rows), shapes=shapes,
                 tokens=real, learned=learned, padding=f"{1 - real / cells:.1%}")  # fmt: skip

    def report(self, step: int, batch: Batch) -> None:
        """Log a step."""
        last = batch.ends_epoch or step == self.stream.total_steps
        speed: dict[str, float] = {}
        if step % self.s.log_interval == 0 or last:
            elapsed = self.clock.elapsed_s
            tokens, since = self.printed
            speed = {"tokens_per_s": (self.record.tokens - tokens) / max(1e-9, elapsed - since)}
            self.printed = self.record.tokens, elapsed
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        lr = rate(self.s, step - 1, self.stream.total_steps)
        values: dict[str, Any] = {"loss": self.loss, "lr": lr, "grad_norm": norm, "epoch": batch.epoch + 1}
        values |= {"tokens": self.record.tokens, **speed}
        self.run.log(step, **values)
        self.record.losses["loss"] = self.loss
        if speed:
            about = f"epoch={batch.epoch + 1}/{self.epochs} step={step} tokens/s={speed['tokens_per_s']:.0f}"
            log.info(f"[TRAIN] {about} loss={self.loss:.4f} lr={lr:.3g}")

    def results(self, step: int, epoch: int, *, whole: bool = True) -> None:
        """Measure an epoch or, at the end, a part of one; write what it made; save, with the validation loss as metric."""
        run, record = self.run, self.record
        with self.clock.stopped():
            elapsed = self.clock.elapsed_s
            directory = f"epoch-{epoch}" if whole and self.s.epoch_results else ""
            if directory:
                self.write(directory)
            measured = self.measure(step, directory, epoch)
            said = f" val_loss={measured:.4f} perplexity={perplexity(measured):.2f}" if math.isfinite(measured) else ""
            log.info(f"[EPOCH] {epoch}/{self.epochs} tokens_seen={record.tokens} time={elapsed:.2f}s{said}")
            record.epoch, record.elapsed_s = epoch if whole else record.epoch, elapsed
            run.save(step, metric=measured)

    def measure(self, step: int, directory: str, epoch: int) -> float:
        """The validation loss, NaN without validation data; notes the best, and the directory that keeps it. A collective."""
        record = self.record
        if self.parts.val is None:
            return math.nan
        loss, _ = self.mean(self.parts.val)
        record.measured = step
        record.losses |= {"val_loss": loss, "perplexity": perplexity(loss)}
        self.run.log(step, val_loss=loss, perplexity=perplexity(loss))
        if not record.best or loss < record.best["val_loss"]:
            kept = {"directory": directory} if directory else {}  # never `model`, which the next run overwrites
            record.best = {"epoch": epoch, "step": step, **kept, "val_loss": loss, "perplexity": perplexity(loss)}
            if self.run.rank == 0:
                results.write_json(self.run.output / BEST, record.best)
        return loss

    def mean(self, samples: Samples) -> tuple[float, int]:
        """Mean loss over the learned tokens of all samples, each computed by one rank, and their number. A collective."""
        run = self.run
        begin, end = dealt(len(samples), run.world_size, run.rank)
        rows = validation(self.parts, samples, range(begin, end), self.s)
        passes = max(run.gather(len(rows)))
        stand_in = validation(self.parts, samples, range(1), self.s)[:1]
        total = torch.zeros((), device=run.device, dtype=torch.float64)
        net = self.net if self.s.parallel == "fsdp" else self.tuned  # FSDP gathers weights in every pass, on all ranks
        net.eval()
        with torch.no_grad():
            for number in range(passes):
                row = rows[number] if number < len(rows) else stand_in[0]
                loss: Tensor = net(_llm_model().moved(row, run.device))
                if number < len(rows):
                    total += loss.double()
                run.alive()
        net.train()
        found = run.gather((total.item(), sum(len(row.targets) for row in rows)))
        learned = sum(count for _, count in found)
        return sum(each for each, _ in found) / learned, learned

    def write(self, name: str) -> dict[str, Tensor]:
        """Write a directory as Hugging Face reads it. Returns what trains on rank 0. A collective."""
        llm_model, run = _llm_model(), self.run
        tensors: dict[str, Tensor] = llm_model.whole(self.tuned.model, keep=run.rank == 0)
        problem = ""
        if run.rank == 0:
            with run.alive():
                try:
                    dtype = llm_model.stored(self.parts.directory)
                    llm_model.write(self.tuned.model, self.parts.tokenizer, run.output / name, tensors, dtype)
                except OutlastError as error:
                    problem = str(error)
        if problem := run.gather(problem)[0]:
            raise OutlastError(problem)
        return tensors

    def finish(self, step: int) -> None:
        """Write the results."""
        s, run, record = self.s, self.run, self.record
        with self.clock.stopped():
            elapsed = self.clock.elapsed_s
            if record.measured < step:  # --max-steps may end within an epoch
                record.elapsed_s = elapsed
                self.measure(step, "", record.epoch + 1)
            tensors = self.write("model")
        speed = record.tokens / max(1e-9, elapsed)
        about = f"epochs={self.epochs} total_tokens={record.tokens} elapsed={elapsed:.2f}s (~{speed:.0f} tok/s)"
        log.info(f"[DONE] training finished: {about}")
        if run.rank:
            return
        if s.merge and s.lora:
            with run.alive():
                _llm_model().merge(self.parts.directory, run.output / "model", run.output / "merged", self.parts.tokenizer)
        known = {"step": step, **record.losses, "tokens_total": record.tokens, "best": record.best}
        results.write_json(run.output / "final.json", {**known, "weights_sha256": results.sha256(tensors)})
        if s.report_json:
            report = {"world_size": run.world_size, "tokens_total": record.tokens, "elapsed_sec": round(elapsed, 3)}
            results.write_json(Path(s.report_json), {**report, "tokens_per_sec": round(speed, 3)})


def validation(parts: Parts, samples: Samples, numbers: range, s: Settings) -> list[Row]:
    """The forward passes for some validation samples."""
    pieces = [[samples[i] for i in numbers[at : at + s.batch]] for at in range(0, len(numbers), s.batch)]
    return parts.rows(pieces, s.batch * s.seq_len)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


# Afterwards


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Loss and perplexity of a checkpoint on the validation file."""
    logged(dataclasses.replace(s, log_level="WARNING"), 0)
    output, where = Path(os.environ.get(contract.Env.OUTPUT, "out")), device.computing()
    found = results.checkpoint(output, s.checkpoint)
    parts = Parts.found(s, where, None)
    if parts.val is None:
        raise OutlastError("there is nothing to measure on; name a validation file with --val")
    parts.record.data = ""  # the validation file counts
    checkpoint.restore(found, {"model": parts.training(), "record": parts.record})
    parts.tuned.eval()
    total, learned = 0.0, 0
    for row in validation(parts, parts.val, range(len(parts.val)), s):
        total += parts.tuned(_llm_model().moved(row, where)).item()
        learned += len(row.targets)
    loss = total / learned
    document = {"weights": found.name, "weights_sha256": results.sha256(parts.training()), "samples": len(parts.val)}
    document |= {"tokens": learned, "loss": loss, "perplexity": perplexity(loss)}
    results.write_json(output / "evaluation.json", document)
    print(f"{'weights':<24}{'samples':>10}{'learned tokens':>16}{'val loss':>12}{'perplexity':>12}")
    print(f"{found.name:<24}{len(parts.val):>10,}{learned:>16,}{loss:>12.4f}{perplexity(loss):>12.2f}", flush=True)


def logged(s: Settings, rank: int) -> None:
    """Print lines, from rank 0 only."""
    log.handlers = [logging.StreamHandler(sys.stdout)]
    log.handlers[0].setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    log.propagate = False
    log.setLevel(getattr(logging, s.log_level) if rank == 0 else logging.CRITICAL)


def main(argv: Sequence[str] | None = None) -> None:
    """Train or evaluate."""
    s = settings.parse(Settings, argv, __doc__)
    results.into(s.output_dir, "1 min val_loss")
    (evaluate if s.evaluate else train)(s)


if __name__ == "__main__":
    settings.run(main)
