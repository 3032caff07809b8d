"""GPT-2 and mixtures of experts in nanoGPT's manner: trains, measures and samples. Copy it and change it.

    outlast data get python-stdlib                                   # text; or any of yours
    outlast data prepare text data/python-stdlib --to data/python    # train.bin, val.bin, tokenizer.json; or nanoGPT's directory
    outlast run examples/gpt.yaml                                    # two workers on this machine
    outlast evaluate gpt                                             # loss and perplexity on all of the validation text

    python -m outlast.recipes.gpt --data data/python --size tiny --block-size 128 --max-iters 500
    torchrun --nproc-per-node 4 -m outlast.recipes.gpt --config conf.yaml --output_dir out
    python -m outlast.recipes.gpt --output_dir out --sample --prompt "def __init__(self"

Settings have the names of nanoGPT. Writes to the job's output, --output_dir without a job (default: out): checkpoints/,
metrics.jsonl and log.txt, at the end model.pt, ckpt.pt for nanoGPT's sample.py, and final.json; evaluation.json with --evaluate.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast import checkpoints, contract
from outlast.errors import NotFound, OutlastError
from outlast.recipes import gpt_data, gpt_model, memory, results, settings
from outlast.recipes.gpt_data import Corpus, Pretrained, Record
from outlast.recipes.gpt_model import GPT, Config, Losses
from outlast.recipes.settings import flag
from outlast.training import Session, Stream, device, session, weights


@dataclass(frozen=True)
class Settings:
    data: str = flag("", "directory or URL of prepared data; default $OUTLAST_DATA, then data/DATASET", group="data and output")
    dataset: str = flag("", "name of a directory below data/, as nanoGPT has it")
    output_dir: str = flag("", "where to write; a job's output has precedence", also=("out_dir", "output"))
    init_from: str = flag(
        "scratch",
        "first weights: scratch, nanoGPT's ckpt.pt, or a directory with GPT-2; a run always resumes by itself",
        also=("init",),
    )
    seed: int = flag(1337, "seed of the first weights, the order of samples, and --sample")

    size: Literal["tiny", "124M", "350M", "774M", "1.5B"] = flag("124M", "layers, heads and width at once", group="model")
    n_layer: int | None = flag(None, "blocks; default by --size", least=1)
    n_head: int | None = flag(None, "heads of the attention; default by --size", least=1)
    n_embd: int | None = flag(None, "width of the residual stream; default by --size", least=1)
    block_size: int = flag(1024, "tokens the model looks at, and tokens of a sample", least=1)
    dropout: float = flag(0.0, "share of activations dropped in training", least=0, most=1)
    bias: bool = flag(False, "biases in linear layers and norms, as GPT-2 has them")

    use_moe: bool = flag(False, "a mixture of experts in each block", group="mixture of experts")
    num_experts: int = flag(6, "experts of a block, static ones included", least=1)
    num_experts_per_tok: int = flag(2, "experts that a token chooses", least=1)
    static_experts: int = flag(2, "experts that every token passes", least=0)
    expert_hidden: int | None = flag(None, "hidden units of one expert; default 4 n_embd, as a dense block has", least=1)
    moe_loss: bool = flag(True, "add a loss that balances the use of experts")
    moe_loss_type: Literal["entropy_regularization", "variance_penalty", "diversity_regularization"] = flag(
        "entropy_regularization", "how unevenness is measured"
    )
    moe_loss_coef: float = flag(0.01, "weight of that loss", least=0)

    batch_size: int = flag(12, "samples of a micro-batch", least=1, group="training")
    gradient_accumulation_steps: int = flag(
        40, "micro-batches of a step over all ranks: any number of ranks up to this one computes the same step", least=1
    )
    max_iters: int = flag(600000, "steps", least=1, also=("max_steps",))
    learning_rate: float = flag(6e-4, "highest learning rate", least=0, also=("lr",))
    warmup_iters: int = flag(2000, "steps in which it rises to that", least=0)
    decay_lr: bool = flag(True, "lower it by a cosine afterwards")
    lr_decay_iters: int | None = flag(None, "step at which it has reached min_lr; default max_iters", least=1)
    min_lr: float = flag(6e-5, "lowest learning rate after that", least=0)
    weight_decay: float = flag(0.1, "pull of matrices towards 0", least=0, also=("wd",))
    beta1: float = flag(0.9, "AdamW's decay rate of the mean gradient", least=0, most=0.9999999)
    beta2: float = flag(0.95, "AdamW's decay rate of its square", least=0, most=0.9999999)
    grad_clip: float = flag(1.0, "longest gradient; 0: any", least=0)

    eval_interval: int = flag(2000, "steps between two evaluations, each with a checkpoint", least=1, group="evaluation and logs")
    eval_iters: int = flag(200, "micro-batches of an evaluation over all ranks, always the same", least=1)
    log_interval: int = flag(1, "steps between two lines of the log", least=1)
    always_save_checkpoint: bool = flag(True, "save at every evaluation, not only when the validation loss is the best so far")
    num_checkpoints: int | None = flag(
        None,
        "checkpoints of the lowest validation loss to keep beside the newest; default 2, in a job its checkpoint.best",
        least=0,
    )
    save_current_ckpt: bool = flag(
        True, "nanoGPT's name for what a run always does: it keeps the newest checkpoints to resume from"
    )
    export_nanogpt: bool = flag(False, "write current_ckpt.pt at every evaluation and ckpt.pt at the best, with the optimizer")

    parallel: Literal["ddp", "fsdp"] = flag("ddp", "whole model on every rank, or sharded (FSDP2)", group="machine")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of matrix products; auto: bfloat16 on GPUs that have it")
    compile: bool = flag(False, "compile the model: a minute at the start, faster steps on GPUs")
    deterministic: bool = flag(False, "only kernels that are exact again on GPUs, at some speed; CPUs always are")
    backend: str = flag("", "nanoGPT's; a run finds it: nccl on GPUs, gloo on CPUs")
    device: str = flag("", "nanoGPT's; a run finds it: GPUs where there are any")

    evaluate: bool = flag(
        False, "measure the newest weights on all of the validation text", group="instead of training", also=("eval_only",)
    )
    checkpoint: str = flag("", "the checkpoint to measure or sample: best, or a step")
    sample: bool = flag(False, "print texts that the newest weights make")
    prompt: str = flag("\n", "how the texts begin", also=("start",))
    num_samples: int = flag(10, "texts to print", least=1)
    max_new_tokens: int = flag(500, "tokens of a text after the prompt", least=1)
    temperature: float = flag(0.8, "below 1 less random, above 1 more; 0: always the likeliest", least=0)
    top_k: int = flag(200, "choose among so many tokens; 0: among all", least=0)
    final_samples: int = flag(0, "texts to print at the end of training", least=0)

    @property
    def accumulated(self) -> int:
        """Samples of a step over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps


# Training


def train(s: Settings) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    if s.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    with session.open(seed=s.seed, quiet=True) as run:
        log = Log(run)
        for sentence in ignored(s, run):
            log.line(sentence)
        corpus = Corpus(place(s), s.block_size)
        model, record = first(s, corpus)
        model.to(run.device)
        if run.device.type == "cpu":
            memory.keep_freed()
        net = parallel(s, run, model)
        optimizer = model.optimizer(s.learning_rate, (s.beta1, s.beta2), s.weight_decay)
        pieces = s.batch_size if s.gradient_accumulation_steps >= run.world_size else None
        stream = Stream(corpus.train, batch=s.accumulated, microbatch=pieces, seed=s.seed, steps=s.max_iters)
        with results.hyperparameters(optimizer):
            step = run.resume({"model": net, "optimizer": optimizer, "stream": stream, "record": record})
        run.parameters(settings.values(s))
        log.begin(s, model, stream.batch, corpus)
        trainer = Trainer(s, run, log, model, net, optimizer, corpus, record)
        if (step % s.eval_interval == 0 or step == s.max_iters) and record.measured < step:
            trainer.measure(step)
        log.clock(step)
        if step >= s.max_iters:
            log.line(f"all {s.max_iters} steps are done; --max-iters sets more")

        for batch in stream:
            trainer.update(step, batch)
            step += 1
            trainer.report(step, last=step == s.max_iters)
            leaving = run.interrupted()
            if not leaving and (step % s.eval_interval == 0 or step == s.max_iters):
                trainer.measure(step)
                log.clock(step)
            elif leaving or run.due(step):
                run.save(step, metric=math.nan)  # not measured, so it is never the best
        trainer.finish(step)


@dataclass
class Trainer:
    """The parts of a step."""

    s: Settings
    run: Session
    log: Log
    model: GPT
    """The module itself, on which nothing is exchanged between ranks; sharded if --parallel=fsdp."""
    net: nn.Module
    """What exchanges gradients."""
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    record: Record

    def __post_init__(self) -> None:
        self.blocks = {
            name: gpt_data.spread(part, self.s.eval_iters * self.s.batch_size)
            for name, part in (("train", self.corpus.train), ("val", self.corpus.val))
        }
        self.totals = torch.zeros(2, device=self.run.device)
        self.usage = torch.zeros(0, 0, device=self.run.device)
        self.norm = torch.zeros((), device=self.run.device)
        self.dtype = dtype(self.s, self.run.device, self.run)

    def forward(self, net: nn.Module, tokens: Tensor) -> Losses:  # (b, t + 1)
        with device.of(self.run.device).autocast(self.dtype):
            return cast(Losses, net(tokens[:, :-1], tokens[:, 1:]))

    def update(self, step: int, batch: Any) -> None:
        """One step: gradients of all micro-batches, then AdamW."""
        s = self.s
        for data, _ in batch.pieces:
            self.corpus.check(data)
        totals, usage = torch.zeros_like(self.totals), torch.zeros((), device=self.run.device)
        for tokens, share in batch.split(self.net):  # (b, t + 1)
            losses = self.forward(self.net, tokens)
            loss = losses.main + s.moe_loss_coef * losses.aux if s.use_moe and s.moe_loss else losses.main
            (loss * share).backward()  # shares add up to the mean over the global batch
            totals += torch.stack((losses.main, losses.aux)).detach() * share
            usage = usage + losses.usage * share
        self.totals, self.usage = totals, usage
        if s.grad_clip:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self, step: int, *, last: bool) -> None:
        """Log a step that is due."""
        s, run = self.s, self.run
        if step % s.log_interval and not last:
            run.log(step)
            return
        main, aux = self.totals.tolist()
        coefficient = s.moe_loss_coef if s.use_moe and s.moe_loss else 0.0
        values = {"loss": main + coefficient * aux, "main_loss": main, "aux_loss": aux}
        shares = {f"{block}.{expert}": share for block, row in enumerate(self.usage.tolist()) for expert, share in enumerate(row)}
        found = summed(run, values | shares)
        values = {name: found[name] for name in values}
        norm = self.norm.full_tensor() if hasattr(self.norm, "full_tensor") else self.norm
        speed = self.log.speed(step)
        logged: dict[str, Any] = {**values, "lr": rate(s, step - 1), "grad_norm": norm, **speed}
        run.log(step, **logged)
        self.log.iteration(step, values, speed)
        for block in range(len(self.usage) if shares else 0):
            row = [found[f"{block}.{expert}"] for expert in range(self.usage.shape[1])]
            self.log.line(f"Block {block} usage: " + ", ".join(f"Expert {i}: {share:.1%}" for i, share in enumerate(row)))
        self.record.losses |= values

    def measure(self, step: int) -> None:
        """Mean losses on the fixed blocks of both parts; then a checkpoint, with the validation loss as its metric."""
        losses = {f"{name}_loss": self.mean(blocks) for name, blocks in self.blocks.items()}
        losses["train_eval_loss"] = losses.pop("train_loss")
        self.log.line(f"step {step}: train loss {losses['train_eval_loss']:.4f}, val loss {losses['val_loss']:.4f}")
        self.run.log(step, **cast(dict[str, Any], losses))
        self.record.losses |= losses
        better = losses["val_loss"] < self.record.best
        self.record.best, self.record.measured = min(losses["val_loss"], self.record.best), step
        if step and (better or self.s.always_save_checkpoint):
            if self.s.export_nanogpt:  # first: who is killed here measures again, and writes them again
                names = (gpt_data.CURRENT, gpt_data.CHECKPOINT) if better else (gpt_data.CURRENT,)
                self.export(step, names)
            self.run.save(step, metric=losses["val_loss"])

    @torch.no_grad()
    def mean(self, blocks: Tensor) -> float:
        """Mean loss over blocks (n, t + 1), each computed once by one rank; all ranks make as many calls."""
        self.model.eval()
        run, parts = self.run, blocks.split(self.s.batch_size)
        total = torch.zeros((), device=run.device, dtype=torch.float64)
        for first_ in range(0, len(parts), run.world_size):
            mine = first_ + run.rank
            part = parts[min(mine, len(parts) - 1)]
            loss = self.forward(self.model, part.to(run.device)).main
            total += loss.double() * (len(part) if mine < len(parts) else 0)
            run.alive()
        self.model.train()
        return float(sum(run.gather(total.item())) / len(blocks))

    def export(self, step: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Write nanoGPT's files, with the optimizer when --export-nanogpt asks for them. Returns the weights on rank 0."""
        tensors = weights.whole(self.model, keep=self.run.rank == 0)
        more: dict[str, Any] = {"iter_num": step, "config": {**settings.values(self.s), "dataset": self.s.dataset or "data"}}
        if self.s.export_nanogpt:
            more["optimizer"] = numbered(self.model, self.optimizer)
        problem = ""
        if self.run.rank == 0:
            try:
                for name in names:
                    gpt_data.write_nanogpt(self.run.output / name, tensors, self.record, more)
            except OutlastError as error:
                problem = str(error)
        if problem := self.run.gather(problem)[0]:
            raise OutlastError(problem)
        return tensors

    def finish(self, step: int) -> None:
        """Write the results."""
        s, run = self.s, self.run
        best = run.output / gpt_data.CHECKPOINT
        tensors = self.export(step, (gpt_data.CURRENT,) if s.export_nanogpt and best.exists() else (gpt_data.CHECKPOINT,))
        run.export(self.model)
        if run.rank == 0:
            gpt_data.keep_tokenizer(self.corpus.tokenizer, run.output)
            known = {"step": step, **self.record.losses, "best_val_loss": self.record.best}
            results.write_json(run.output / "final.json", {**known, "weights_sha256": results.sha256(tensors)})
            if s.final_samples:
                model = GPT(self.model.config)
                model.load_state_dict(tensors)
                with run.alive():
                    show(dataclasses.replace(s, num_samples=s.final_samples), model.to(run.device), self.corpus.tokenizer)


def rate(s: Settings, step: int) -> float:
    """The learning rate of a step: a line upwards, then a cosine down to `min_lr`."""
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / (s.warmup_iters + 1)
    if not s.decay_lr:
        return s.learning_rate
    last = s.lr_decay_iters or s.max_iters
    done = min(1.0, (step - s.warmup_iters) / max(1, last - s.warmup_iters))
    return s.min_lr + (s.learning_rate - s.min_lr) * (1 + math.cos(math.pi * done)) / 2


def summed(run: Session, values: Mapping[str, float]) -> dict[str, float]:
    """Values averaged over the ranks, in rank order."""
    if run.world_size == 1:
        return dict(values)
    found = run.gather(list(values.values()))
    return {name: sum(each) / run.world_size for name, each in zip(values, zip(*found, strict=True), strict=True)}


def place(s: Settings) -> str:
    """Where the data are."""
    named = s.data or os.environ.get(contract.Env.DATA) or (f"data/{s.dataset}" if s.dataset else "")
    if not named:
        raise OutlastError(
            f"no data: give --data DIR, --dataset NAME or set {contract.Env.DATA}; outlast data prepare text makes some"
        )
    return named


def shape(s: Settings, vocab_size: int) -> Config:
    """The model that the settings describe."""
    layers, heads, width = gpt_model.SIZES[s.size]
    c = Config(s.n_layer or layers, s.n_head or heads, s.n_embd or width, s.block_size, vocab_size, s.bias, s.dropout)
    if not s.use_moe:
        return c
    hidden = s.expert_hidden or 0
    return dataclasses.replace(
        c,
        num_experts=s.num_experts,
        num_experts_per_tok=s.num_experts_per_tok,
        static_experts=s.static_experts,
        expert_hidden=hidden,
        moe_loss_type=s.moe_loss_type,
    )


def first(s: Settings, corpus: Corpus) -> tuple[GPT, Record]:
    """The model before the first step."""
    digest = corpus.tokenizer.digest if corpus.tokenizer else ""
    if s.init_from in ("scratch", "resume"):
        config = shape(s, corpus.vocab_size)
        return GPT(config), Record(config, digest)
    found = gpt_data.pretrained(s.init_from, s.block_size, s.dropout)
    if s.use_moe and not found.config.num_experts:
        raise OutlastError(f"init_from {s.init_from} is a dense model, and use_moe asks for experts; leave out one of the two")
    gpt_data.same_tokenizer(found.digest, digest, s.init_from)
    if corpus.tokenizer and corpus.vocab_size > found.config.vocab_size:
        raise OutlastError(
            f"init_from {s.init_from} knows {found.config.vocab_size} tokens, and the data have {corpus.vocab_size}: they were "
            "made by another tokenizer; prepare the text with the model's own"
        )
    corpus.vocab_size = found.config.vocab_size
    return found.model(), Record(found.config, digest or found.digest)


def parallel(s: Settings, run: Session, model: GPT) -> nn.Module:
    """What trains the model on all ranks; it is compiled in place if asked."""
    if s.parallel == "fsdp":
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        for block in model.h:
            if s.compile:
                block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    net = run.ddp(model) if run.world_size > 1 else model
    if s.compile:
        model.compile()
    return net


def dtype(s: Settings, where: torch.device, run: Session | None = None) -> torch.dtype:
    """The type of matrix products. A collective with `run`."""
    asked = "float32" if s.dtype == "auto" and where.type == "cpu" else s.dtype
    return device.dtype(asked, where, run.gather if run else None)


def ignored(s: Settings, run: Session) -> list[str]:
    """What settings ask for, and a run does otherwise: a sentence for each."""
    found = []
    if s.device and s.device.partition(":")[0] != run.device.type:
        found.append(f"device {s.device} is ignored: this run computes on {run.device.type}, what torch finds here")
    backend = device.of(run.device).backend.rpartition(":")[2]
    if s.backend and s.backend != backend:
        found.append(f"backend {s.backend} is ignored: it is {backend} on {run.device.type}")
    if s.init_from == "resume":
        found.append("init_from resume is ignored: a run goes on from its newest checkpoint, and begins where there is none")
    best = checkpoints.Retention.parse(os.environ).best
    if s.num_checkpoints not in (None, best):
        found.append(f"num_checkpoints {s.num_checkpoints} is ignored: the job's checkpoint.best is {best}")
    if s.use_moe and s.moe_loss and s.gradient_accumulation_steps < run.world_size:
        found.append(
            f"gradient_accumulation_steps {s.gradient_accumulation_steps} is below {run.world_size} ranks, so micro-batches are "
            "smaller than batch_size, and the balance of experts is another one than on fewer ranks"
        )
    if not s.save_current_ckpt:
        found.append("save_current_ckpt false is ignored: a run keeps its newest checkpoints, or it could not go on")
    return found


def numbered(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the optimizer as nanoGPT's AdamW loads it: parameters by number, those that decay first. A collective."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=whole)
    if not found:
        return {}  # on ranks that do not write
    named = list(model.named_parameters())
    order = [name for decays in (True, False) for name, p in named if (p.dim() > 1) == decays]
    numbers = {name: i for i, name in enumerate(order)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in found["param_groups"]]
    return {"state": {numbers[name]: entry for name, entry in found["state"].items()}, "param_groups": groups}


class Log:
    """Lines for people: on the screen and in log.txt, from rank 0."""

    def __init__(self, run: Session) -> None:
        self._run = run
        self._since, self._step = time.monotonic(), 0
        self._tokens = self._flops = 0.0
        self._unwritten = False

    def line(self, text: str) -> None:
        if self._run.rank == 0:
            print(text, flush=True)
            try:
                with (self._run.output / "log.txt").open("a") as file:
                    file.write(text + "\n")
            except OSError as error:  # a full disk is no reason to stop
                if not self._unwritten:
                    print(f"log.txt cannot be written: {error.strerror}; training goes on", flush=True)
                self._unwritten = True

    def begin(self, s: Settings, model: GPT, batch: int, corpus: Corpus) -> None:
        """What is trained, on how much."""
        self._tokens = batch * s.block_size
        self._flops = self._tokens * model.flops_per_token(s.block_size)
        count = sum(p.numel() for p in model.parameters())
        self.line(
            f"{count / 1e6:.2f}M parameters, a vocabulary of {corpus.vocab_size}, {len(corpus.train):,} blocks of {s.block_size} "
            f"tokens; tokens per iteration will be: {self._tokens:,}"
        )

    def clock(self, step: int) -> None:
        """Leave out the time up to here: it was no training."""
        self._since, self._step = time.monotonic(), step

    def speed(self, step: int) -> dict[str, float]:
        """Milliseconds of a step, tokens a second over all ranks, and on a known GPU the share of its peak (MFU)."""
        now = time.monotonic()
        each = (now - self._since) / max(1, step - self._step)
        self._since, self._step = now, step
        found = {"ms": each * 1000, "tokens_per_s": self._tokens / each}
        peak = device.of(self._run.device).peak_flops()
        return found | ({"mfu": self._flops / each / (peak * self._run.world_size)} if peak else {})

    def iteration(self, step: int, values: Mapping[str, float], speed: Mapping[str, float]) -> None:
        mfu = f"{speed['mfu']:.2%}" if "mfu" in speed else "-"
        loss, main, aux = (values[name] for name in ("loss", "main_loss", "aux_loss"))
        self.line(f"Iter {step}: Loss {loss:.4f}, Main Loss {main:.4f}, Aux Loss {aux:.4f}, Time {speed['ms']:.2f}ms, MFU {mfu}")


# Afterwards


def newest(s: Settings) -> Pretrained:
    """The weights to measure or sample: those --init_from names, or else the newest valid checkpoint, or else ckpt.pt alone."""
    output = Path(os.environ.get(contract.Env.OUTPUT, "out"))
    if s.init_from not in ("scratch", "resume"):
        return gpt_data.pretrained(s.init_from)
    try:
        return gpt_data.trained(results.checkpoint(output, s.checkpoint))
    except NotFound:
        if s.checkpoint or not (path := output / gpt_data.CHECKPOINT).exists():
            raise
        return gpt_data.pretrained(str(path))


@torch.inference_mode()
def evaluate(s: Settings) -> None:
    """Loss and perplexity on all blocks of the validation text."""
    output, where = Path(os.environ.get(contract.Env.OUTPUT, "out")), device.computing()
    found = newest(s)
    corpus = Corpus(place(s), found.config.block_size)
    gpt_data.same_tokenizer(found.digest, corpus.tokenizer.digest if corpus.tokenizer else "", found.name)
    corpus.vocab_size = found.config.vocab_size
    model = found.model().to(where).eval()
    total, blocks = 0.0, len(corpus.val)
    for batch in Stream(corpus.val, batch=s.batch_size, shuffle=False):
        for x, _ in batch.split(model):
            corpus.check(x.cpu())
            with device.of(where).autocast(dtype(s, where)):
                total += model(x[:, :-1], x[:, 1:]).main.item() * len(x)
    loss = total / blocks
    document = {
        "weights": Path(found.name).name,
        "weights_sha256": results.sha256(model),
        "tokens": blocks * found.config.block_size,
    }
    results.write_json(output / "evaluation.json", {**document, "loss": loss, "perplexity": math.exp(loss)})
    print(f"{document['weights']}: val loss {loss:.4f}, perplexity {math.exp(loss):.2f} on {document['tokens']:,} tokens")


def sample(s: Settings) -> None:
    """Print texts."""
    found = newest(s)
    kept = gpt_data.kept_tokenizer(Path(os.environ.get(contract.Env.OUTPUT, "out")))
    if kept is None and (s.data or s.dataset or contract.Env.DATA in os.environ):
        kept = Corpus(place(s), found.config.block_size).tokenizer
    show(s, found.model().to(device.computing()), kept)


def show(s: Settings, model: GPT, tokenizer: gpt_data.Tokenizer | None) -> None:
    """Print texts of a model, in tokens where there is no tokenizer."""
    start = tokenizer.encode(s.prompt) if tokenizer else [0]
    if not start:
        raise OutlastError(f"the prompt {s.prompt!r} is no token; give a longer one")
    device_ = next(model.parameters()).device
    tokens = torch.tensor([start] * s.num_samples, device=device_)  # (n, t)
    for row in gpt_model.generate(model, tokens, s.max_new_tokens, s.temperature, s.top_k, s.seed).tolist():
        print(tokenizer.decode(row) if tokenizer else " ".join(map(str, row)))
        print("---------------", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate or sample."""
    s = settings.parse(Settings, argv, __doc__)
    results.into(s.output_dir, f"{2 if s.num_checkpoints is None else s.num_checkpoints} min val_loss")
    (evaluate if s.evaluate else sample if s.sample else train)(s)


if __name__ == "__main__":
    settings.run(main)
