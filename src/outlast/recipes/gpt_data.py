"""Data for `outlast.recipes.gpt`: the corpus, its tokenizer, and pretrained models.

A corpus is the output of `outlast data prepare text`, or nanoGPT's directory (`train.bin`, `val.bin`, perhaps `meta.pkl`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import tokenizer
from outlast.recipes import gpt_model
from outlast.recipes.gpt_model import Config
from outlast.recipes.shared import results
from outlast.recipes.shared.loop import Record
from outlast.training import Shards
from outlast.training.state import checkpoint, weights

VOCABULARY = 50304
"""Default vocabulary size: GPT-2's 50,257 tokens, rounded up to a multiple of 64 for faster kernels (nanoGPT)."""
CHECKPOINT, CURRENT = "ckpt.pt", "current_ckpt.pt"
"""Names of nanoGPT's checkpoint files in the output directory."""


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
    """Return at most `count` blocks spread evenly over a part, (n, block + 1) int64. They are the same every time."""
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
        made = tokenizer.library().Tokenizer.from_file(str(file))
        return cls(file, digest, lambda text: list(made.encode(text).ids), lambda ids: str(made.decode(list(ids))))


def _characters(ids: Mapping[str, int], file: Path) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if strange := sorted(set(text) - set(ids)):
            raise OutlastError(f"the text has {strange[0]!r}, which {file.name} has no token for; leave it out")
        return [ids[character] for character in text]

    return encode


def record(config: Config, digest: str = "") -> Record:
    """Return a run's record: sizes, tokenizer and best loss. A new record requires a measurement before the first step."""
    about = {"config": dataclasses.asdict(config), "tokenizer": digest, "best": float("inf")}
    return Record({"tokenizer": "another tokenizer"}, owed=True, **about)


def same_tokenizer(of_model: str, of_data: str, name: str) -> None:
    """Raise OutlastError if both digests are known and differ."""
    if of_model and of_data and of_model != of_data:
        raise OutlastError(
            f"{name} was trained with tokenizer {of_model}, and the data were made by {of_data}: the same numbers mean other "
            "text; give the data it was trained on, or begin a new run"
        )


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A trained model and its sizes."""

    name: str
    config: Config
    weights: Mapping[str, Tensor]
    digest: str
    """Digest of the model's tokenizer; empty if unknown."""

    def model(self) -> gpt_model.GPT:
        """Return the model, on the CPU."""
        made = gpt_model.GPT(self.config)
        made.load_state_dict(self.weights)
        return made


def pretrained(named: str, block: int | None = None, dropout: float = 0.0) -> Pretrained:
    """Read the model in a `ckpt.pt` of nanoGPT or this recipe, or in a directory of Hugging Face's GPT-2. Downloads nothing.

    `block` is the length in tokens to which the context is cut. A path that does not exist is looked up below $OUTLAST_MODELS.
    Raises OutlastError.
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
        return Pretrained(str(path), config, gpt_model.imported(tensors, config), digest)
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
    """Write a checkpoint for nanoGPT's `sample.py`, with `more` entries (iter_num, config, optimizer). Raises OutlastError.

    A dense model has only nanoGPT's arguments; a model with experts has additional arguments, which only this recipe reads.
    """
    shape = dict(record.config)
    if not shape["num_experts"]:
        of_experts = ("num_experts", "num_experts_per_tok", "static_experts", "expert_hidden", "moe_loss_type")
        shape = {name: value for name, value in shape.items() if name not in of_experts}
    document = {
        "model": gpt_model.exported(tensors),
        "model_args": shape,
        "best_val_loss": record.best,
        "tokenizer": record.tokenizer,
    }
    weights.write(path, cast(Any, {**document, **more}))


def trained(path: Path) -> Pretrained:
    """Read the trained model in a run's checkpoint, with the model's sizes and the tokenizer's digest."""
    record = Record.read(path)
    return Pretrained(path.name, Config(**record.config), checkpoint.read(path, "model"), record.tokenizer)


def keep_tokenizer(tokenizer: Tokenizer | None, output: Path) -> None:
    """Copy the tokenizer to the output directory, so that `--sample` needs no data."""
    if tokenizer is not None:
        shutil.copyfile(tokenizer.file, partial := output / f".{tokenizer.file.name}.writing")
        partial.replace(output / tokenizer.file.name)


def kept_tokenizer(output: Path) -> Tokenizer | None:
    """Return the tokenizer in an output directory, or None."""
    files = (output / name for name in (shard_format.TOKENIZER, shard_format.META))
    return next((Tokenizer.read(file) for file in files if file.exists()), None)
