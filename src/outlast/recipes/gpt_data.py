"""Reads the corpus and the tokenizer of `outlast.recipes.gpt`, which `outlast data prepare text` or nanoGPT has prepared."""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor

from outlast.base.errors import OutlastError
from outlast.data import shard_format
from outlast.data.prepare import tokenizer
from outlast.recipes.gpt_model import Config
from outlast.recipes.shared.loop import Record
from outlast.training import Shards

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
        made = tokenizer.library().Tokenizer.from_file(str(file))
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
