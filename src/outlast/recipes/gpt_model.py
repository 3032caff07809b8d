"""Defines the model of `outlast.recipes.gpt`, GPT-2 with or without a mixture of experts, and converts published weights.

Module names are GPT-2's (`wte`, `h.0.attn.c_attn`, ...), so nanoGPT's names differ only by a prefix. The mixture needs no loop
over tokens or experts, because assignments are sorted by expert, and one call computes the products of all experts. No token is
dropped. The gradient of an expert without tokens is zero instead of None, because DDP would wait for a missing gradient.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.base.errors import OutlastError
from outlast.recipes.shared import results
from outlast.recipes.shared.loop import Record
from outlast.training.state import checkpoint, weights

CHECKPOINT, CURRENT = "ckpt.pt", "current_ckpt.pt"  # nanoGPT's files in the output directory
BALANCES = ("entropy_regularization", "variance_penalty", "diversity_regularization")
SIZES = {  # layers, heads and width; all but tiny are GPT-2's
    "tiny": (4, 4, 128),
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}


@dataclass(frozen=True)
class Config:
    """A model's sizes. Raises OutlastError for invalid sizes."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50304
    bias: bool = False  # in linear layers and norms; experts have no biases
    dropout: float = 0.0
    num_experts: int = 0  # experts per block, including static experts; 0 for a dense model
    num_experts_per_tok: int = 2
    static_experts: int = 0  # experts that every token passes through
    expert_hidden: int = 0  # hidden units of an expert; 0 for 4 n_embd, as in a dense block
    moe_loss_type: str = BALANCES[0]

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise OutlastError(
                f"n_embd ({self.n_embd}) is not divisible by n_head ({self.n_head}); every head has the same width"
            )
        if self.num_experts and self.static_experts >= self.num_experts:
            raise OutlastError(
                f"static_experts ({self.static_experts}) leaves none of num_experts ({self.num_experts}) to choose from; "
                "num_experts counts the static ones too"
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.routed:
            raise OutlastError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be 1 to {self.routed}: num_experts ({self.num_experts}) "
                f"without static_experts ({self.static_experts})"
            )
        if self.moe_loss_type not in BALANCES:
            raise OutlastError(f"moe_loss_type ({self.moe_loss_type}) must be one of {', '.join(BALANCES)}")

    @property
    def routed(self) -> int:
        """Number of experts that the router chooses from."""
        return self.num_experts - self.static_experts

    @property
    def hidden(self) -> int:
        """Number of hidden units in an expert, or in a dense block's MLP."""
        return (self.expert_hidden if self.num_experts else 0) or 4 * self.n_embd


class Losses(NamedTuple):
    """The model's losses on a batch, and how often each expert was used."""

    main: Tensor  # mean cross-entropy in nats, a scalar
    aux: Tensor  # imbalance of the experts (`balance`), averaged over blocks; 0 for a dense model
    usage: Tensor  # each routed expert's fraction of the assignments, (layers, experts), without gradient


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.n_head, self.p = c.n_head, c.dropout
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, c)
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, c // self.n_head).permute(2, 0, 3, 1, 4)  # (b, heads, t, c/heads)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)), p)


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, c: Config, hidden: int) -> None:
        super().__init__()
        self.p = c.dropout
        self.c_fc = nn.Linear(c.n_embd, hidden, bias=c.bias)
        self.c_proj = nn.Linear(hidden, c.n_embd, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.p if self.training else 0.0)


class Experts(nn.Module):
    """The routed experts, MLPs of equal shape, each of which is applied to its own rows."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c_fc = nn.Parameter(torch.empty(c.routed, c.n_embd, c.hidden))
        self.c_proj = nn.Parameter(torch.empty(c.routed, c.hidden, c.n_embd))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows of `x`, (m, c): first expert 0's `counts[0]` rows, then expert 1's, and so on."""
        dtype = _kind(x)
        x, fc, proj = x.to(dtype), self.c_fc.to(dtype), self.c_proj.to(dtype)
        if _grouped(x, fc):
            if x.is_cuda:  # CUDA's kernel leaves the gradient of an expert without rows unwritten
                some = (counts > 0)[:, None, None]
                fc, proj = torch.where(some, fc, 0), torch.where(some, proj, 0)
            ends = counts.cumsum(0).to(torch.int32)
            return F.grouped_mm(F.gelu(F.grouped_mm(x, fc, offs=ends)), proj, offs=ends)
        most = int(counts.max())  # pad every expert to the largest
        expert = torch.repeat_interleave(counts, output_size=len(x))  # (m,)
        slot = expert * most + torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[expert]
        padded = x.new_zeros(len(counts) * most, x.shape[1]).index_copy(0, slot, x).view(len(counts), most, -1)
        return torch.bmm(F.gelu(torch.bmm(padded, fc)), proj).flatten(0, 1).index_select(0, slot)


def _kind(x: Tensor) -> torch.dtype:
    """Return the data type for matrix products, with or without autocast."""
    on = x.device.type
    return torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else x.dtype


def _grouped(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch can multiply groups of these matrices in one call. Rows must be multiples of 16 bytes."""
    kinds = (torch.bfloat16,) if x.is_cuda or torch.compiler.is_compiling() else (torch.bfloat16, torch.float32)
    whole = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])
    return hasattr(F, "grouped_mm") and x.device.type in ("cpu", "cuda") and x.dtype in kinds and whole


class _Permuted(torch.autograd.Function):
    """Permutes rows. The backward pass is another permutation, not a scatter-add, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


class MoE(nn.Module):
    """A mixture of experts: each token passes through the static experts and its `num_experts_per_tok` best routed experts."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.k, self.kind, self.p = c.num_experts_per_tok, c.moe_loss_type, c.dropout
        self.gate = nn.Linear(c.n_embd, c.routed, bias=False)
        self.experts = Experts(c)
        self.static = MLP(c, c.static_experts * c.hidden) if c.static_experts else None  # their sum is one wide MLP

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (b, t, c), the loss of `balance`, and each expert's fraction of the assignments (e,)."""
        tokens = x.flatten(0, 1)  # (n, c)
        with torch.autocast(x.device.type, enabled=False):  # choices are made in full precision
            exact = torch.promote_types(x.dtype, torch.float32)
            scores = F.linear(tokens.to(exact), self.gate.weight.to(exact))  # (n, e)
            best, chosen = scores.topk(self.k)  # (n, k)
            share = best.softmax(-1)  # (n, k)
            one = torch.arange(scores.shape[1], device=x.device)
            counts = (chosen.flatten()[:, None] == one).sum(0)  # (e,)
            aux = balance(scores.softmax(-1), counts, self.kind)
        order = chosen.flatten().argsort(stable=True)  # the assignments, token * k + choice, sorted by expert
        inverse = order.argsort()
        rows = tokens[:, None].expand(-1, self.k, -1).flatten(0, 1)  # (n k, c)
        made = self.experts(_Permuted.apply(rows, order, inverse), counts)
        mixed = (_Permuted.apply(made, inverse, order).view(len(tokens), self.k, -1) * share[..., None]).sum(1)  # (n, c)
        y = F.dropout(mixed.view_as(x), self.p if self.training else 0.0)
        return (y if self.static is None else y + self.static(x)), aux, counts / counts.sum()


def balance(probabilities: Tensor, counts: Tensor, kind: str) -> Tensor:
    """Return the experts' imbalance, a scalar that is 0 if all are used equally.

    `probabilities`, (n, e), are the router's, and `counts`, (e,), are the numbers of assignments to the experts. The imbalance is
    a function of u, the experts' fractions of the assignments, where each expert gets one extra assignment so that no fraction is
    0. Gradients flow through the mean probabilities, so even an expert without tokens gets a gradient. The kind
    entropy_regularization is 1 - H(u) / log e, variance_penalty is the mean of (e u - 1)^2 (the squared coefficient of variation,
    Shazeer et al., 2017), and diversity_regularization is KL(uniform || u).
    """
    e = len(counts)
    mean = probabilities.mean(0)  # (e,)
    u = (counts + 1).to(mean.dtype) / (counts.sum() + e) + (mean - mean.detach())
    if e == 1:
        return u.sum() * 0
    if kind == "entropy_regularization":
        return 1 + (u * u.log()).sum() / math.log(e)
    return (e * u - 1).square().mean() if kind == "variance_penalty" else -(e * u).log().mean()


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts, each with a residual connection."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.mlp = MoE(c) if c.num_experts else MLP(c, c.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = x + self.attn(self.ln_1(x))
        y = self.mlp(self.ln_2(x))
        return (x + y[0], y[1], y[2]) if isinstance(y, tuple) else (x + y, None, None)


class GPT(nn.Module):
    """A language model, which returns losses or the next token's logits. The embedding and the output layer share weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd, bias=c.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:  # GPT-2: smaller for layers that add to the residual stream, by depth
                residual = name.removesuffix(".weight").endswith("c_proj")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.n_layer) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Losses | Tensor:
        """Return the losses for targets (b, t), or without targets the logits (b, v) after the last token. `tokens`: (b, t)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]  # (b, t, c)
        x = F.dropout(x, self.config.dropout if self.training else 0.0)
        aux, usage = [], []
        for block in self.h:
            x, loss, used = block(x)
            if loss is not None:
                aux.append(loss)
                usage.append(used)
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x[:, -1], self.wte.weight)  # (b, v)
        main = cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten())
        if not aux:
            return Losses(main, main.new_zeros(()), main.new_zeros(0, 0))
        return Losses(main, torch.stack(aux).mean(), torch.stack(usage))

    def flops_per_token(self, length: int) -> float:
        """Return a training step's FLOPs per token: 6 per weight in use, plus attention to `length` tokens (PaLM, appendix B)."""
        c = self.config
        used = sum(p.numel() for p in self.parameters()) - self.wpe.weight.numel()
        if c.num_experts:
            used -= c.n_layer * (c.routed - c.num_experts_per_tok) * 2 * c.n_embd * c.hidden
        return 6 * used + 12 * c.n_layer * c.n_embd * length


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the logits `x @ weight.T`, a scalar. `x`: (n, c), `weight`: (v, c), `targets`: (n,) int64.

    The forward pass also computes the gradients, and only a few rows of logits at a time. All logits (n, v) would be by far the
    largest tensor of a step, and would be written to memory and read again several times.
    """
    if not torch.is_grad_enabled():
        return F.cross_entropy(F.linear(x, weight), targets)
    kind = _kind(x)
    with torch.autocast(x.device.type, enabled=False):
        return cast(Tensor, _CrossEntropy.apply(x.to(kind), weight.to(kind), targets))


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy whose forward pass also computes the gradients for x and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        total, by_x = x.new_zeros((), dtype=exact), torch.empty_like(x)
        learns = ctx.needs_input_grad[1]  # False for frozen weights, as under LoRA
        by_weight = torch.zeros_like(weight, dtype=exact) if learns else None
        most = _LOGITS if x.is_cuda else _LOGITS_OF_A_CACHE
        rows = max(1, most // len(weight))
        for start in range(0, len(x), rows):
            some, labels = x[start : start + rows], targets[start : start + rows]
            each = torch.arange(len(some), device=x.device)
            p = F.linear(some, weight).to(exact)  # (rows, v), first the logits
            total += (p.amax(-1) - p[each, labels]).sum()
            p = torch.softmax(p, -1, out=p)
            total -= p.amax(-1).log().sum()  # the log of the sum, minus the target's logit
            p[each, labels] -= 1  # the gradient of the logits
            p = p.to(x.dtype)
            by_x[start : start + rows] = p @ weight
            if by_weight is None:
                continue
            if x.dtype == exact:
                by_weight.addmm_(p.t(), some)
            else:
                by_weight += p.t() @ some
        ctx.save_for_backward(by_x, by_weight)
        return total / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        by_x, by_weight = ctx.saved_tensors
        scale = gradient / len(by_x)
        return by_x * scale.to(by_x.dtype), None if by_weight is None else (by_weight * scale).to(by_x.dtype), None


_LOGITS, _LOGITS_OF_A_CACHE = 1 << 28, 1 << 19
"""Number of logits per chunk: 1 GiB on a GPU, to limit memory, and 2 MiB on a CPU, to stay in the cache."""


@torch.inference_mode()
def generate(model: GPT, tokens: Tensor, new: int, temperature: float, top_k: int, seed: int) -> Tensor:
    """Append `new` tokens to `tokens`, (b, t). `seed` determines the new tokens; temperature 0 selects the likeliest."""
    model.eval()
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(new):
        logits = model(tokens[:, -model.config.block_size :]).float()  # (b, v)
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            if 0 < top_k < logits.shape[-1]:
                least = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, following), 1)
    return tokens


# Weights under the names of nanoGPT and of Hugging Face's GPT-2


def exported(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under nanoGPT's names."""
    return {f"transformer.{name}": tensor for name, tensor in weights.items()} | {"lm_head.weight": weights["wte.weight"]}


def imported(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Convert weights of nanoGPT or Hugging Face's GPT-2 for a model of `config`. Raises OutlastError if they do not fit."""
    renamed = {name.removeprefix("_orig_mod.").removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = (".attn.bias", ".attn.masked_bias")
    renamed = {name: tensor for name, tensor in renamed.items() if name != "lm_head.weight" and not name.endswith(masks)}
    first = renamed.get("h.0.attn.c_attn.weight")
    if first is not None and first.shape == (config.n_embd, 3 * config.n_embd):  # GPT-2's own layers are transposed
        turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        renamed = {name: tensor.t() if name.endswith(turned) else tensor for name, tensor in renamed.items()}
    if "wpe.weight" in renamed:
        renamed["wpe.weight"] = renamed["wpe.weight"][: config.block_size]
    with torch.device("meta"):
        return results.fitted(renamed, GPT(config), "the weights")


@dataclass(frozen=True)
class Pretrained:
    """A trained model's weights and configuration."""

    name: str
    config: Config
    weights: Mapping[str, Tensor]
    digest: str  # of the model's tokenizer; empty if unknown

    def model(self) -> GPT:
        """Return the model, on the CPU."""
        made = GPT(self.config)
        made.load_state_dict(self.weights)
        return made


def pretrained(named: str, block: int | None = None, dropout: float = 0.0) -> Pretrained:
    """Read the model in a `ckpt.pt` of nanoGPT or this recipe, or in a directory of Hugging Face's GPT-2. Raises OutlastError.

    A path that does not exist is looked up below $OUTLAST_MODELS; nothing is downloaded. `block` shortens the context to that
    many tokens.
    """
    path = results.place(named)
    if path.is_dir() and (path / CHECKPOINT).exists():
        path = path / CHECKPOINT
    if not path.exists():
        raise OutlastError(
            f"init_from {named}: there is no such file or directory; give scratch, nanoGPT's {CHECKPOINT}, or a directory with "
            "GPT-2's config.json and weights (nothing is downloaded)"
        )
    shape, tensors, digest = _hugging_face(path) if path.is_dir() else _nanogpt(path)
    if block is not None:
        if block > shape["block_size"]:
            raise OutlastError(
                f"block_size ({block}) is above the {shape['block_size']} that {named} was trained with; give at most that"
            )
        shape["block_size"] = block
    config = Config(**{**shape, "dropout": dropout})
    try:
        return Pretrained(str(path), config, imported(tensors, config), digest)
    except OutlastError as error:
        raise OutlastError(f"{path}: {error}") from None


def _nanogpt(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor], str]:
    content = results.read(path)
    if not (isinstance(content, dict) and {"model", "model_args"} <= content.keys()):
        raise OutlastError(f"{path} is no checkpoint of nanoGPT: it lacks model and model_args")
    fields = {field.name for field in dataclasses.fields(Config)}
    if strange := sorted(content["model_args"].keys() - fields):
        raise OutlastError(f"{path} is a model of another kind: its model_args have {strange[0]}")
    return dict(content["model_args"]), content["model"], str(content.get("tokenizer", ""))


def _hugging_face(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor], str]:
    try:
        config = json.loads((path / "config.json").read_text())
        shape = {name: config[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
        shape |= {"block_size": config["n_positions"], "bias": True}
    except (OSError, ValueError, KeyError) as error:
        raise OutlastError(f"{path} is no directory of GPT-2: its config.json cannot be read ({error!r})") from error
    return shape, results.read(path), ""


def write_nanogpt(path: Path, tensors: Mapping[str, Tensor], record: Record, more: Mapping[str, Any]) -> None:
    """Write a checkpoint for nanoGPT's `sample.py`, with `more` entries (iter_num, config, optimizer). Raises OutlastError."""
    shape = dict(record.config)
    if not shape["num_experts"]:
        of_experts = ("num_experts", "num_experts_per_tok", "static_experts", "expert_hidden", "moe_loss_type")
        shape = {name: value for name, value in shape.items() if name not in of_experts}
    document = {
        "model": exported(tensors),
        "model_args": shape,
        "best_val_loss": record.best,
        "tokenizer": record.tokenizer,
    }
    weights.write(path, cast(Any, {**document, **more}))


def trained(path: Path) -> Pretrained:
    """Read the trained model in a run's checkpoint, with the model's sizes and the tokenizer's digest."""
    record = Record.read(path)
    return Pretrained(path.name, Config(**record.config), checkpoint.read(path, "model"), record.tokenizer)
