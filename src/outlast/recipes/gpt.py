"""Trains, evaluates and samples GPT-2 and mixtures of experts, in the style of nanoGPT. Copy it and change it.

    outlast data get python-stdlib                                   # text; or any of yours
    outlast data prepare text data/python-stdlib --to data/python    # train.bin, val.bin, tokenizer.json; or nanoGPT's directory
    outlast run examples/gpt.yaml                                    # two workers on this machine
    outlast evaluate gpt                                             # loss and perplexity on all of the validation text

    python -m outlast.recipes.gpt --data data/python --size tiny --block-size 128 --max-iters 500
    torchrun --nproc-per-node 4 -m outlast.recipes.gpt --config conf.yaml --output_dir out
    python -m outlast.recipes.gpt --output_dir out --sample --prompt "def __init__(self"

Settings have the same names as in nanoGPT. Training writes checkpoints/, metrics.jsonl and log.txt, and at the end model.pt,
ckpt.pt for nanoGPT's sample.py, and final.json, to the job's output directory, or to --output_dir (default: out) if there is no
job. --evaluate writes evaluation.json to the same directory.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from outlast.base.errors import NotFound, OutlastError
from outlast.data import shard_format
from outlast.data.prepare import tokenizer as tokenizers
from outlast.job import contract
from outlast.recipes import gpt_model
from outlast.recipes.gpt_model import GPT, Config, Losses, Pretrained
from outlast.recipes.shared import loop, results, settings
from outlast.recipes.shared.loop import Log, Record
from outlast.recipes.shared.settings import flag
from outlast.training import Session, Shards, Stream, device
from outlast.training.samples.stream import Batch
from outlast.training.state import weights

ALIASES = {
    "out_dir": "output_dir",
    "eval_only": "evaluate",
    "start": "prompt",
    "save_current_ckpt": "a run always keeps its newest checkpoints",
    "backend": "a run finds it: nccl on GPUs, gloo on CPUs",
    "device": "a run finds it: GPUs where there are any",
}
"""Keys of nanoGPT's trainers, dense and with experts, mapped to this recipe's names or to the reason why they are ignored."""


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory or URL of prepared data; default $OUTLAST_DATA, then data/DATASET", group="data and output")
    dataset: str = flag("", "name of a directory below data/, as in nanoGPT")
    output_dir: str = flag("", "output directory; a job's output has precedence")
    init_from: str = flag(
        "scratch", "initial weights: scratch, nanoGPT's ckpt.pt, or a directory with GPT-2; a run always resumes"
    )
    seed: int = flag(1337, "seed of the initial weights, the order of samples, and --sample")

    size: Literal["tiny", "124M", "350M", "774M", "1.5B"] = flag("124M", "preset of layers, heads and width", group="model")
    n_layer: int | None = flag(None, "blocks; default by --size", least=1)
    n_head: int | None = flag(None, "heads of the attention; default by --size", least=1)
    n_embd: int | None = flag(None, "width of the residual stream; default by --size", least=1)
    block_size: int = flag(1024, "context length and sample length in tokens", least=1)
    dropout: float = flag(0.0, "dropout probability in training", least=0, most=1)
    bias: bool = flag(False, "biases in linear layers and norms, as in GPT-2")

    use_moe: bool = flag(False, "a mixture of experts in each block", group="mixture of experts")
    num_experts: int = flag(6, "experts per block, including static experts", least=1)
    num_experts_per_tok: int = flag(2, "routed experts per token", least=1)
    static_experts: int = flag(2, "experts that process every token", least=0)
    expert_hidden: int | None = flag(None, "hidden units of an expert; default 4 n_embd, as in a dense block", least=1)
    moe_loss: bool = flag(True, "add a loss that balances the use of experts")
    moe_loss_type: Literal["entropy_regularization", "variance_penalty", "diversity_regularization"] = flag(
        "entropy_regularization", "measure of the imbalance"
    )
    moe_loss_coef: float = flag(0.01, "weight of that loss", least=0)

    batch_size: int = flag(12, "samples per micro-batch", least=1, group="training")
    gradient_accumulation_steps: int = flag(40, "micro-batches per step over all ranks", least=1)
    max_iters: int = flag(600000, "steps", least=1)
    learning_rate: float = flag(6e-4, "maximum learning rate", least=0)
    warmup_iters: int = flag(2000, "warm-up steps", least=0)
    decay_lr: bool = flag(True, "cosine decay after the warm-up")
    lr_decay_iters: int | None = flag(None, "step at which the learning rate reaches min_lr; default max_iters", least=1)
    min_lr: float = flag(6e-5, "minimum learning rate", least=0)
    weight_decay: float = flag(0.1, "weight decay of matrices", least=0)
    beta1: float = flag(0.9, "AdamW's decay rate of the mean gradient", least=0, most=0.9999999)
    beta2: float = flag(0.95, "AdamW's decay rate of the squared gradient", least=0, most=0.9999999)
    grad_clip: float = flag(1.0, "maximum norm of the gradient; 0: no limit", least=0)

    eval_interval: int = flag(2000, "steps between two evaluations, each with a checkpoint", least=1, group="evaluation and logs")
    eval_iters: int = flag(200, "micro-batches per evaluation over all ranks, always the same", least=1)
    log_interval: int = flag(1, "steps between two log lines", least=1)
    always_save_checkpoint: bool = flag(True, "save at every evaluation, not only when the validation loss is the best so far")
    num_checkpoints: int = flag(2, "best checkpoints to keep, by validation loss; a job uses its checkpoint.best", least=0)
    export_nanogpt: bool = flag(False, "write current_ckpt.pt at every evaluation and ckpt.pt at the best, with the optimizer")

    parallel: Literal["ddp", "fsdp"] = flag("ddp", "whole model on every rank, or sharded (FSDP2)", group="machine")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "type of matrix products; auto: bfloat16 on GPUs that support it"
    )
    compile: bool = flag(False, "compile the model: a minute at the start, faster steps on GPUs")
    deterministic: bool = flag(False, "use only deterministic kernels on GPUs, which is slower; CPUs are always deterministic")

    evaluate: bool = flag(False, "evaluate the newest weights on the whole validation text", group="instead of training")
    checkpoint: str = flag("", "checkpoint to evaluate or sample: best, or a step")
    sample: bool = flag(False, "print texts generated by the newest weights")
    prompt: str = flag("\n", "beginning of the texts")
    num_samples: int = flag(10, "texts to print", least=1)
    max_new_tokens: int = flag(500, "tokens to generate per text", least=1)
    temperature: float = flag(0.8, "below 1 less random, above 1 more random; 0: always the most likely token", least=0)
    top_k: int = flag(200, "number of tokens to sample from; 0: all", least=0)
    final_samples: int = flag(0, "texts to print at the end of training", least=0)


# The text and its tokenizer, which `outlast data prepare text` or nanoGPT has prepared


VOCABULARY = 50304
"""Default vocabulary size: GPT-2's 50,257 tokens, rounded up to a multiple of 64 for faster kernels (nanoGPT)."""


class Corpus:
    """Prepared text in a directory, or below a URL in a store. Raises OutlastError for unusable data."""

    def __init__(self, place: str, block: int) -> None:
        self.place = place
        self.train, self.val = (Shards(place, part, block=block) for part in ("train", "val"))
        manifest = self.train.manifest
        self.tokenizer = Tokenizer.read(self.train.file(manifest.tokenizer)) if manifest.tokenizer else None
        self.vocab_size: int = manifest.vocab_size or VOCABULARY
        shard_format.check_dtype(self.vocab_size, manifest.dtype, place)

    def check(self, tokens: Tensor) -> None:
        """Raise OutlastError for a token outside the vocabulary. `tokens` must be on the CPU."""
        if (largest := int(tokens.max())) >= self.vocab_size:
            raise OutlastError(
                f"{self.place} holds token {largest}, and its vocabulary has {self.vocab_size}, so it was made by another "
                "tokenizer; prepare it again, or correct meta.pkl"
            )


def spread(part: Shards, count: int) -> Tensor:
    """Return at most `count` blocks (n, block + 1), int64, spread evenly over a part. They are the same every time."""
    n = min(count, len(part))
    return cast(Tensor, part.take(np.arange(n) * len(part) // n))


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer in a file: `tokenizer.json` from `outlast data prepare text`, or nanoGPT's characters in `meta.pkl`."""

    file: Path
    digest: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def read(cls, file: Path) -> Tokenizer:
        """Read the tokenizer in a file. Raises OutlastError."""
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        if file.suffix == ".pkl":
            vocabulary = shard_format.vocabulary(file)
            encode = _characters(vocabulary.stoi, file)
            unknown = "\N{REPLACEMENT CHARACTER}"
            return cls(file, digest, encode, lambda ids: "".join(vocabulary.itos.get(i, unknown) for i in ids))
        made = tokenizers.library().Tokenizer.from_file(str(file))
        return cls(file, digest, lambda text: list(made.encode(text).ids), lambda ids: str(made.decode(list(ids))))


def _characters(ids: Mapping[str, int], file: Path) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if strange := sorted(set(text) - set(ids)):
            raise OutlastError(f"the text has {strange[0]!r}, which {file.name} has no token for; leave it out")
        return [ids[character] for character in text]

    return encode


def record(config: Config, digest: str = "") -> Record:
    """Return a new run's record: sizes, tokenizer and best loss. The model is measured before the first step."""
    about = {"config": dataclasses.asdict(config), "tokenizer": digest, "best": float("inf")}
    return Record({"tokenizer": "another tokenizer"}, owed=True, **about)


def same_tokenizer(of_model: str, of_data: str, name: str) -> None:
    """Raise OutlastError if the digests of the model's and the data's tokenizers are both known and differ."""
    if of_model and of_data and of_model != of_data:
        raise OutlastError(
            f"{name} was trained with tokenizer {of_model}, and the data were made by {of_data}: the same numbers mean other "
            "text; give the data it was trained on, or begin a new run"
        )


def keep_tokenizer(tokenizer: Tokenizer | None, output: Path) -> None:
    """Copy the tokenizer to the output directory, so that `--sample` needs no data."""
    if tokenizer is not None:
        shutil.copyfile(tokenizer.file, partial := output / f".{tokenizer.file.name}.writing")
        partial.replace(output / tokenizer.file.name)


def kept_tokenizer(output: Path) -> Tokenizer | None:
    """Return the tokenizer in an output directory, or None."""
    files = (output / name for name in (shard_format.TOKENIZER, shard_format.META))
    return next((Tokenizer.read(file) for file in files if file.exists()), None)


# Training


class Training(loop.Recipe):
    """A training run, whose methods `loop.train` calls."""

    def __init__(self, s: Settings, run: Session) -> None:
        super().__init__(s, run)
        self.log = Log(run, "log.txt")
        self.corpus = Corpus(place(s), s.block_size)
        self.model, self.record = first(s, self.corpus)
        self.model.to(run.device)
        self.net = loop.parallel(s.parallel, run, self.model, list(self.model.h), compiled=s.compile)
        groups = loop.groups(self.model, s.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)
        step = s.batch_size * s.gradient_accumulation_steps  # samples over all ranks
        pieces = s.batch_size if s.gradient_accumulation_steps >= run.world_size else None
        self.stream = Stream(self.corpus.train, batch=step, microbatch=pieces, seed=s.seed, steps=s.max_iters)
        self.blocks = {
            name: spread(part, s.eval_iters * s.batch_size)
            for name, part in (("train", self.corpus.train), ("val", self.corpus.val))
        }
        self.tokens = step * s.block_size
        self.balance = s.moe_loss_coef if s.use_moe and s.moe_loss else 0.0
        self.norm = torch.zeros((), device=run.device)
        self.dtype = dtype(s, run.device, run)

    def begin(self, step: int) -> None:
        s, run = self.s, self.run
        count = sum(p.numel() for p in self.model.parameters())
        self.log.line(
            f"{count / 1e6:.2f}M parameters, a vocabulary of {self.corpus.vocab_size}, {len(self.corpus.train):,} blocks of "
            f"{s.block_size} tokens; tokens per iteration will be: {self.tokens:,}"
        )
        if self.balance and s.gradient_accumulation_steps < run.world_size:
            self.log.line(
                f"{run.world_size} ranks share {s.gradient_accumulation_steps} micro-batches: experts balance otherwise"
            )
        if step >= s.max_iters:
            self.log.line(f"all {s.max_iters} steps are done; --max-iters sets more")

    def rate(self, step: int, batch: Batch | None = None) -> float:
        s = self.s
        last = s.lr_decay_iters or s.max_iters
        return loop.rate(s.learning_rate, step, last, s.warmup_iters, lowest=s.min_lr, falls=s.decay_lr)

    def forward(self, net: nn.Module, tokens: Tensor) -> Losses:  # (b, t + 1)
        with device.of(self.run.device).autocast(self.dtype):
            return cast(Losses, net(tokens[:, :-1], tokens[:, 1:]))

    def update(self, step: int, batch: Batch) -> None:
        for data, _ in batch.pieces:
            self.corpus.check(data)
        self.totals, self.usage = torch.zeros(2, device=self.run.device), torch.zeros((), device=self.run.device)
        for tokens, share in batch.split(self.net):  # (b, t + 1)
            losses = self.forward(self.net, tokens)
            loss = losses.main + self.balance * losses.aux if self.balance else losses.main
            (loss * share).backward()  # shares add up to the mean over the global batch
            self.totals += torch.stack((losses.main, losses.aux)).detach() * share
            self.usage = self.usage + losses.usage * share
        if self.s.grad_clip:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, step: int, batch: Batch) -> None:
        run, log = self.run, self.log
        log.done += self.tokens
        if step % self.s.log_interval and step != self.s.max_iters:
            run.log(step)
            return
        main, aux = self.totals.tolist()
        values = {"loss": main + self.balance * aux, "main_loss": main, "aux_loss": aux}
        shares = {f"{block}.{expert}": share for block, row in enumerate(self.usage.tolist()) for expert, share in enumerate(row)}
        every = values | shares
        summed = [sum(each) / run.world_size for each in zip(*run.gather(list(every.values())), strict=True)]  # in rank order
        means = dict(zip(every, summed, strict=True))
        values = {name: means[name] for name in values}
        speed = log.speed()
        timed = {"ms": 1000 * self.tokens / speed, "tokens_per_s": speed}
        if peak := device.of(run.device).peak_flops():
            timed["mfu"] = self.model.flops_per_token(self.s.block_size) * speed / (peak * run.world_size)
        more: dict[str, Any] = {"lr": self.rate(step - 1), "grad_norm": loop.plain(self.norm), **timed}
        run.log(step, **values, **more)
        loss, main, aux = values.values()
        mfu = f"{timed['mfu']:.2%}" if "mfu" in timed else "-"
        log.line(f"Iter {step}: Loss {loss:.4f}, Main Loss {main:.4f}, Aux Loss {aux:.4f}, Time {timed['ms']:.2f}ms, MFU {mfu}")
        for block in range(len(self.usage) if shares else 0):
            row = [means[f"{block}.{expert}"] for expert in range(self.usage.shape[1])]
            log.line(f"Block {block} usage: " + ", ".join(f"Expert {i}: {share:.1%}" for i, share in enumerate(row)))
        self.record.losses |= values

    def due(self, step: int, batch: Batch) -> bool:
        return bool(step % self.s.eval_interval == 0 or step == self.s.max_iters)

    def measure(self, step: int) -> float | None:
        """Measure the losses on fixed blocks of train and val. Returns the validation loss, or None if no save is due."""
        train, val = (self.mean(self.blocks[name]) for name in ("train", "val"))
        self.log.line(f"step {step}: train loss {train:.4f}, val loss {val:.4f}")
        self.run.log(step, val_loss=val, train_eval_loss=train)
        self.record.losses |= {"val_loss": val, "train_eval_loss": train}
        better = val < self.record.best
        self.record.best = min(val, self.record.best)
        if not (step and (better or self.s.always_save_checkpoint)):
            return None
        if self.s.export_nanogpt:  # before the checkpoint, so that a run killed here measures and writes again
            self.export(step, (gpt_model.CURRENT, gpt_model.CHECKPOINT) if better else (gpt_model.CURRENT,))
        return val

    @torch.no_grad()
    def mean(self, blocks: Tensor) -> float:
        """Return the mean loss over blocks (n, t + 1), which are divided among the ranks.

        Every rank does the same number of passes, as FSDP requires.
        """
        self.model.eval()
        run, parts = self.run, blocks.split(self.s.batch_size)
        total = torch.zeros((), device=run.device, dtype=torch.float64)
        for first_ in range(0, len(parts), run.world_size):
            own = first_ + run.rank
            part = parts[min(own, len(parts) - 1)]
            loss = self.forward(self.model, part.to(run.device)).main
            total += loss.double() * (len(part) if own < len(parts) else 0)
            run.alive()
        self.model.train()
        return float(sum(run.gather(total.item())) / len(blocks))

    def export(self, step: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Write the files for nanoGPT, with the optimizer's state if --export-nanogpt is set. Returns the weights on rank 0."""
        tensors = weights.whole(self.model, keep=self.run.rank == 0)
        about = {**dataclasses.asdict(self.s), "dataset": self.s.dataset or "data"}
        more: dict[str, Any] = {"iter_num": step, "config": about}
        if self.s.export_nanogpt:
            more["optimizer"] = numbered(self.model, self.optimizer)
        with results.by_rank_0(self.run) as writes:
            for name in names if writes else ():
                gpt_model.write_nanogpt(self.run.output / name, tensors, self.record, more)
        return tensors

    def finish(self, step: int) -> None:
        s, run = self.s, self.run
        best = run.output / gpt_model.CHECKPOINT
        tensors = self.export(step, (gpt_model.CURRENT,) if s.export_nanogpt and best.exists() else (gpt_model.CHECKPOINT,))
        run.export(self.model)
        results.final(run, tensors, step=step, **self.record.losses, best_val_loss=self.record.best)
        if run.rank == 0:
            keep_tokenizer(self.corpus.tokenizer, run.output)
            if s.final_samples:
                model = GPT(self.model.config)
                model.load_state_dict(tensors)
                with run.alive():
                    show(dataclasses.replace(s, num_samples=s.final_samples), model.to(run.device), self.corpus.tokenizer)


def place(s: Settings) -> str:
    """Return the path or URL of the data. Raises OutlastError if none is given."""
    if named := s.data or os.environ.get(contract.Env.DATA) or (f"data/{s.dataset}" if s.dataset else ""):
        return named
    raise OutlastError(
        f"no data: give --data DIR, --dataset NAME or set {contract.Env.DATA}; outlast data prepare text makes some"
    )


def shape(s: Settings, vocab_size: int) -> Config:
    """Return the model's sizes from the settings."""
    layers, heads, width = gpt_model.SIZES[s.size]
    c = Config(s.n_layer or layers, s.n_head or heads, s.n_embd or width, s.block_size, vocab_size, s.bias, s.dropout)
    names = ("num_experts", "num_experts_per_tok", "static_experts", "expert_hidden", "moe_loss_type")
    more: dict[str, Any] = {name: getattr(s, name) or 0 for name in names}
    return dataclasses.replace(c, **more) if s.use_moe else c


def first(s: Settings, corpus: Corpus) -> tuple[GPT, Record]:
    """Return the initial model, and the record of a new run. Raises OutlastError if the model does not fit the data."""
    digest = corpus.tokenizer.digest if corpus.tokenizer else ""
    if s.init_from in ("scratch", "resume"):
        config = shape(s, corpus.vocab_size)
        return GPT(config), record(config, digest)
    pretrained = gpt_model.pretrained(s.init_from, s.block_size, s.dropout)
    if s.use_moe and not pretrained.config.num_experts:
        raise OutlastError(f"init_from {s.init_from} is a dense model, and use_moe asks for experts; leave out one of the two")
    same_tokenizer(pretrained.digest, digest, s.init_from)
    if corpus.tokenizer and corpus.vocab_size > pretrained.config.vocab_size:
        raise OutlastError(
            f"init_from {s.init_from} knows {pretrained.config.vocab_size} tokens, and the data have {corpus.vocab_size}: they "
            "were made by another tokenizer; prepare the text with the model's own"
        )
    corpus.vocab_size = pretrained.config.vocab_size
    return pretrained.model(), record(pretrained.config, digest or pretrained.digest)


def dtype(s: Settings, where: torch.device, run: Session | None = None) -> torch.dtype:
    """Return the data type for matrix products. All ranks must call this if `run` is given."""
    requested = "float32" if s.dtype == "auto" and where.type == "cpu" else s.dtype
    return device.dtype(requested, where, run.gather if run else None)


def numbered(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state in nanoGPT's format, which numbers parameters, first those with weight decay. All ranks must
    call this."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=whole)
    if not state:
        return {}  # on ranks that do not write
    named = list(model.named_parameters())
    order = [name for decays in (True, False) for name, p in named if (p.dim() > 1) == decays]
    numbers = {name: i for i, name in enumerate(order)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}


# Measuring and sampling


def newest(s: Settings) -> Pretrained:
    """Return the weights of --init_from, else of --checkpoint or the newest valid checkpoint, else of ckpt.pt."""
    output = results.output()
    if s.init_from not in ("scratch", "resume"):
        return gpt_model.pretrained(s.init_from)
    try:
        return gpt_model.trained(results.checkpoint(output, s.checkpoint))
    except NotFound:
        if s.checkpoint or not (path := output / gpt_model.CHECKPOINT).exists():
            raise
        return gpt_model.pretrained(str(path))


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Measure loss and perplexity on all blocks of the validation text."""
    where, pretrained = device.computing(), newest(s)
    corpus = Corpus(place(s), pretrained.config.block_size)
    same_tokenizer(pretrained.digest, corpus.tokenizer.digest if corpus.tokenizer else "", pretrained.name)
    corpus.vocab_size = pretrained.config.vocab_size
    model = pretrained.model().to(where).eval()
    total, blocks = 0.0, len(corpus.val)
    for batch in Stream(corpus.val, batch=s.batch_size, shuffle=False):
        for x, _ in batch.split(model):
            corpus.check(x.cpu())
            with device.of(where).autocast(dtype(s, where)):
                total += model(x[:, :-1], x[:, 1:]).main.item() * len(x)
    loss = total / blocks
    name, tokens = Path(pretrained.name).name, blocks * pretrained.config.block_size
    results.evaluation(name, model, tokens=tokens, loss=loss, perplexity=math.exp(loss))
    print(f"{name}: val loss {loss:.4f}, perplexity {math.exp(loss):.2f} on {tokens:,} tokens")


def sample(s: Settings) -> None:
    """Print text generated with the newest weights."""
    pretrained = newest(s)
    tokenizer = kept_tokenizer(results.output())
    if tokenizer is None and (s.data or s.dataset or contract.Env.DATA in os.environ):
        tokenizer = Corpus(place(s), pretrained.config.block_size).tokenizer
    show(s, pretrained.model().to(device.computing()), tokenizer)


def show(s: Settings, model: GPT, tokenizer: Tokenizer | None) -> None:
    """Print text generated by a model, or the token ids if there is no tokenizer."""
    start = tokenizer.encode(s.prompt) if tokenizer else [0]
    if not start:
        raise OutlastError(f"the prompt {s.prompt!r} is no token; give a longer one")
    device_ = next(model.parameters()).device
    tokens = torch.tensor([start] * s.num_samples, device=device_)  # (n, t)
    for row in gpt_model.generate(model, tokens, s.max_new_tokens, s.temperature, s.top_k, s.seed).tolist():
        print(tokenizer.decode(row) if tokenizer else " ".join(map(str, row)))
        print("---------------", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    s = settings.parse(Settings, argv, __doc__, ALIASES)
    results.into(s.output_dir, f"{s.num_checkpoints} min val_loss")
    if s.evaluate or s.sample:
        (evaluate if s.evaluate else sample)(s)
    else:
        loop.train(Training, s)


if __name__ == "__main__":
    results.run(main)
