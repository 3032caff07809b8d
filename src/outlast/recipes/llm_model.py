"""Loads causal language models of Hugging Face for `llm`, adds LoRA to them, computes their loss, and writes them.

This is the only recipe module that imports peft. `load` reads a model from a directory, `Tuned` computes the loss of a row of
samples, and `write` saves a directory for `AutoModelForCausalLM` or `PeftModel`.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outlast.base.errors import OutlastError, importing
from outlast.job import contract
from outlast.recipes import gpt_model
from outlast.recipes.llm_data import Row, packed, padded
from outlast.training import device
from outlast.training.samples.stream import map_tensors

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library warns in forked processes
with importing("fine-tuning", "llm"):
    import huggingface_hub
    import peft
    import transformers
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.utils.import_utils import is_flash_attn_2_available

PACKED = "outlast"  # the name of this module's attention in transformers
_SAMPLED = 64  # values of each weight in a base model's fingerprint; arbitrary


# Loading


def place(name: str, local: str, *, offline: bool, what: str = "model") -> tuple[Path, str]:
    """Return a model's directory, and the path or the name at Hugging Face by which an adapter's config refers to the model.

    The directory is `local`, if given. Otherwise, `name` is a directory, a model below $OUTLAST_MODELS (under the whole name or
    its last part), or a model in Hugging Face's cache, to which it is downloaded unless `offline`. Raises OutlastError if there
    is no such model.
    """
    places = [Path(local or name).expanduser()]
    if not local and (shelf := os.environ.get(contract.Env.MODELS)):
        places += [Path(shelf) / name, Path(shelf) / name.rpartition("/")[2]]
    if directory := next((each for each in places if each.is_dir()), None):
        return directory, str(directory.resolve())
    if local:
        raise OutlastError(f"--{what}-local-dir {local} is no directory; name the one with config.json and the weights")
    offline = offline or huggingface_hub.constants.HF_HUB_OFFLINE
    needed = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=offline, allow_patterns=needed)), name
    except Exception as error:
        if offline:
            raise OutlastError(
                f"{what} {name} is not here, and nothing may be downloaded: it is no directory, not below "
                f"${contract.Env.MODELS}, and not in Hugging Face's cache; name its directory with --{what}-local-dir, or as "
                "`models` of the job file"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise OutlastError(
            f"{what} {name} cannot be downloaded: {reason}; name a directory with --{what}-local-dir, or set HF_TOKEN"
        ) from error


def load(directory: Path, dtype: torch.dtype, seq_len: int, where: torch.device) -> Any:
    """Load the model in a directory to the CPU, with an attention for the device `where`. Raises OutlastError."""
    if not (directory / "config.json").is_file():
        raise OutlastError(f"{directory} has no config.json; name a directory of Hugging Face with --model-local-dir")
    _register()
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
            limit = getattr(config.get_text_config(), "max_position_embeddings", None)
            if limit and seq_len > limit:
                raise OutlastError(f"--seq-len {seq_len} is above the {limit} positions of {directory.name}; give at most that")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(directory), local_files_only=True, dtype=dtype, attn_implementation=_attention(config, dtype, where)
            )
        except OutlastError:
            raise
        except Exception as error:  # transformers raises various errors
            reason = " ".join(str(error).split())[:300]
            raise OutlastError(f"{directory} is no causal language model that transformers can load: {reason}") from error
    model.config.use_cache = False
    return model


def _attention(config: Any, dtype: torch.dtype, where: torch.device) -> str | None:
    """Return the attention to use: flash attention if available, else PACKED if possible, else None for transformers' default."""
    if where.type == "cuda" and dtype is torch.bfloat16 and is_flash_attn_2_available():
        return "flash_attention_2"
    kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    special = any(getattr(config.get_text_config(), name, None) for name in ("attn_logit_softcapping", "attention_chunk_size"))
    # Other models build their own masks.
    return PACKED if getattr(kind, "_supports_attention_backend", False) and not special else None


def needs_gpu(model: Any) -> bool:
    """Return whether the model cannot run on a CPU."""
    return str(model.config._attn_implementation).startswith("flash")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
            yield
    finally:
        logger.setLevel(level)


def recompute(model: Any) -> None:
    """Switch on gradient checkpointing. Raises OutlastError if the model does not support it."""
    try:
        with _quiet():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise OutlastError(f"{type(model).__name__} has no gradient checkpointing; leave out --gradient-checkpointing") from error


def fingerprint(model: nn.Module) -> str:
    """Return a digest of a base model's names, shapes and some values, which is the same for float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        some = flat[torch.arange(_SAMPLED) * (len(flat) - 1) // (_SAMPLED - 1)] if len(flat) else flat
        digest.update(f"{name} {tuple(weight.shape)}\n".encode() + some.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def adapted(model: Any, targets: Sequence[str], **options: Any) -> Any:
    """Add LoRA (https://arxiv.org/abs/2106.09685) to the modules `targets`, and freeze the other weights. Raises OutlastError."""
    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    names = {name for name, _ in model.named_modules()}
    missing = [each for each in targets if not any(name == each or name.endswith(f".{each}") for name in names)]
    if missing or not targets:
        raise OutlastError(
            f"--target-modules {' '.join(missing or ['(none)'])}: the model has no such module; it has {', '.join(linear)}"
        )
    config = peft.LoraConfig(target_modules=list(targets), task_type="CAUSAL_LM", **options)
    try:
        with _quiet():
            wrapped = peft.get_peft_model(model, config)  # LoRA's matrices are float32, even if the frozen weights are not
    except ValueError as error:
        raise OutlastError(
            f"LoRA does not fit {' '.join(targets)} of this model: {' '.join(str(error).split())[:300]}"
        ) from error
    for module in wrapped.modules():
        if isinstance(module, BaseTunerLayer):
            cast(Any, module).cast_input_dtype_enabled = False  # autocast already casts; float32 copies would be wasted
    return wrapped


# Attention


def _register() -> None:
    AttentionInterface.register(PACKED, _attended)
    AttentionMaskInterface.register(PACKED, lambda *args, **options: None)


def _attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute causal attention within each sample of a row, from (b, heads, t, d) to (b, t, heads, d).

    Keys and values may have fewer heads than queries. Samples of similar length are computed together, with little padding, so
    the cost grows with the sum of the squared lengths, not with the square of their sum.
    """
    groups, order = options.pop("packing", None) or ((), None)
    window = options.pop("sliding_window", None)
    options = {name: options[name] for name in ("dropout", "scaling") if name in options}

    def within(*qkv: Tensor) -> Tensor:
        t = qkv[0].shape[2]
        mask = None
        if window is not None and t > window:
            at = torch.arange(t, device=query.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        attend: Any = sdpa_attention_forward
        out: Tensor = attend(module, *qkv, mask, is_causal=mask is None, **options)[0]
        return out  # (n, t, heads, d)

    if order is None:
        return within(query, key, value), None
    outputs = []
    for where, real in groups:  # (n, t) of the row, (m,) of n * t
        taken = [
            each[0].index_select(1, where.flatten()).unflatten(1, where.shape).transpose(0, 1) for each in (query, key, value)
        ]
        outputs.append(within(*taken).flatten(0, 1).index_select(0, real))  # (m, heads, d)
    return torch.cat(outputs).index_select(0, order)[None], None


# The loss


class Tuned(nn.Module):
    """A causal language model that returns a row's loss, summed over its learned tokens.

    Logits are computed only for these tokens, a few at a time, unless `check` has found that the model's logits are not simply
    the output of its head, and has set `whole`.
    """

    def __init__(self, model: Any, *, low: bool) -> None:
        super().__init__()
        self.model = model
        self.whole = False
        self.low = low  # compute matrix products in bfloat16; trained weights are float32

    @property
    def base(self) -> Any:
        """The model without LoRA's wrapper."""
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model

    def forward(self, row: Row) -> Tensor:
        row = self._here(row)
        with device.of(row.tokens.device).autocast(torch.bfloat16 if self.low else None):
            return self._loss(row)

    def _here(self, row: Row) -> Row:
        where = next(self.parameters()).device
        moved: Row = map_tensors(row, lambda tensor: tensor.to(where))
        return moved

    def _loss(self, row: Row) -> Tensor:
        if self.whole:
            return F.cross_entropy(self._logits(row)[row.places].float(), row.targets, reduction="sum")
        learned = self._hidden(row)[row.places]  # (n, c)
        head = self.base.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None:
            mean: Tensor = gpt_model.cross_entropy(learned, head.weight, row.targets)
            return mean * len(row.places)
        return F.cross_entropy(head(learned).float(), row.targets, reduction="sum")

    def _hidden(self, row: Row) -> Tensor:
        """Return the head's input, (b * t, c)."""
        hidden: Tensor = self.base.get_decoder()(row.tokens, position_ids=row.positions, use_cache=False, **_packing(row))[0]
        return hidden.flatten(0, 1)

    def _logits(self, row: Row) -> Tensor:
        """Return all logits, (b * t, v), computed by the model itself."""
        logits: Tensor = self.base(row.tokens, position_ids=row.positions, use_cache=False, **_packing(row)).logits
        return logits.flatten(0, 1)

    @torch.no_grad()
    def check(self) -> str:
        """Test the model on two short samples. Sets `whole`, and returns a message if the model cannot pack samples.

        If this module's attention and the model's own give different results, the model's own is used.
        """
        training = self.training
        self.eval()
        where = next(self.parameters()).device
        vocabulary = self.base.get_input_embeddings().num_embeddings
        draw = torch.Generator().manual_seed(0)
        samples = [(some := torch.randint(vocabulary, (n,), generator=draw), some) for n in (9, 14)]
        *rows, pair = [self._here(row) for row in (*(padded([sample]) for sample in samples), *packed(samples, 99))]
        error = 0.1 if self.low else 0.01  # tolerance for bfloat16 or TF32 in many layers; wrong attention or positions exceed it
        with device.of(where).autocast(torch.bfloat16 if self.low else None):
            alone = torch.cat([self._logits(row) for row in rows])
            hidden, head = self._hidden(rows[1]), self.base.get_output_embeddings()
            fits = hidden.shape[-1] == head.weight.shape[-1]
            self.whole = not (fits and _alike(head(hidden), alone[len(samples[0][0]) :], 0.005))
            if self.base.config._attn_implementation == PACKED:
                self.base.set_attn_implementation("sdpa" if self.base._supports_sdpa else "eager")
                own = torch.cat([self._logits(row) for row in rows])
                if _alike(alone, own, error):
                    self.base.set_attn_implementation(PACKED)
                alone = own
            able = _alike(self._logits(pair), alone, error)
        self.train(training)
        return "" if able else f"samples are not packed: {type(self.base).__name__} computes something else then"


def _packing(row: Row) -> dict[str, Any]:
    return {"packing": (row.groups, row.order)} if row.groups else {}


def _alike(one: Tensor, other: Tensor, error: float) -> bool:
    """Return whether two tensors of logits (n, v) agree within a relative error in each row, apart from an added constant."""
    a, b = (each.float() - each.float().mean(-1, keepdim=True) for each in (one, other))
    return bool(((a - b).norm(dim=-1) <= error * b.norm(dim=-1)).all())


# Results


def whole(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather the trainable parameters from all shards to the CPU. Without `keep`, returns an empty dictionary. All ranks must
    call this."""
    gathered = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                gathered[name] = tensor.cpu()
    return gathered


def write(model: Any, tokenizer: Any, directory: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write an adapter, or weights of type `dtype`, and the tokenizer to a directory in Hugging Face's format.

    The files are written to a temporary directory, which replaces `directory` once it is complete. Raises OutlastError.
    """
    partial = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks the hub whether the base model's vocabulary has changed
            if isinstance(model, peft.PeftModel):
                model.save_pretrained(str(partial), state_dict=dict(tensors), save_embedding_layers=False)
            else:
                model.save_pretrained(str(partial), state_dict={name: each.to(dtype) for name, each in tensors.items()})
                about = json.loads((partial / "config.json").read_text())  # contains the type in memory, not the file's
                about["dtype"] = str(dtype).removeprefix("torch.")
                (partial / "config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(str(partial))
        mode = (partial / "tokenizer_config.json").stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)  # transformers makes weights readable only by their owner
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OutlastError(
            f"{directory} cannot be written: {error.strerror or error}; make room, then run the same again"
        ) from error


def merge(base: Path, adapter: Path, directory: Path, tokenizer: Any) -> None:
    """Merge an adapter into its base model, in float32, and write the weights in the base model's data type."""
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(str(base), local_files_only=True, dtype=torch.float32)
        merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    write(merged, tokenizer, directory, {name: p.detach() for name, p in merged.named_parameters()}, stored(base))


def stored(directory: Path) -> torch.dtype:
    """Return the data type of a directory's weights according to its config.json, by default float32."""
    return transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True).dtype or torch.float32


def layers(model: Any) -> Sequence[nn.Module]:
    """Return the decoder layers, which FSDP gathers one at a time. Raises OutlastError if the model has no list of them."""
    layers: Any = getattr(model.get_decoder(), "layers", None) or getattr(model.get_decoder(), "h", None)
    if layers is None:
        raise OutlastError(f"{type(model).__name__} has no list of decoder layers; use --parallel ddp")
    return cast(Sequence[nn.Module], layers)
