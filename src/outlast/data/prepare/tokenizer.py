"""Tokenizers (by character, a byte-level BPE trained here, or a given tokenizer), and fast encoders for text.

All three kinds are saved as `tokenizer.json`, so one `encoder` reads them. A byte-level BPE like GPT-2's never joins two words,
so the encoder caches each word's tokens. Special tokens that occur in text are encoded as text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outlast.base import files
from outlast.base.errors import OutlastError, importing
from outlast.data import shard_format
from outlast.data.prepare import source_files

SEPARATOR = "<|endoftext|>"
SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
"""Tokens between documents in various tokenizers."""
GPT2_VOCABULARY = 50_257
PIECE = 1 << 18
"""Number of characters encoded at a time, which limits the encoder's memory."""
_CHARACTER = r"[\s\S]"
_CUT = re.compile(r"(?<=\S)(?=[ \n])")
"""Places to cut text without splitting a word: GPT-2's words have no space inside."""


Encoder = Callable[[str], bytes]
"""Returns the tokens of a text as little-endian bytes. Raises BadSource for a character outside the vocabulary."""


def library() -> Any:
    """Import and return the `tokenizers` library. Raises OutlastError if it is not installed."""
    with importing("tokenizing", "data"):
        import tokenizers
    return tokenizers


def load(path: Path) -> Any:
    """Load the tokenizer from a `tokenizer.json`. Raises OutlastError."""
    try:
        tokenizer = library().Tokenizer.from_str(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise OutlastError(f"there is no tokenizer {path}; name a tokenizer.json, char, bpe or gpt2-like") from error
    except OutlastError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise OutlastError(f"{path} is not a tokenizer.json: {error}; name one, or char, bpe or gpt2-like") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocab_size(tokenizer: Any) -> int:
    """Return the vocabulary's size: the largest token id plus one, because ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def separator(tokenizer: Any, name: str | None) -> int | None:
    """Return the token that follows each document: `name`, or if `name` is None, the first of SEPARATORS in the vocabulary.
    Returns None if documents have no separator. Raises OutlastError if the vocabulary lacks `name`."""
    if name is None:
        tokens = (tokenizer.token_to_id(each) for each in SEPARATORS)
        return next((int(token) for token in tokens if token is not None), None)
    token: int | None = tokenizer.token_to_id(name) if name else None
    if name and token is None:
        raise OutlastError(f"the tokenizer has no token {name} to separate documents; name one that it has, or --separator ''")
    return token


def of_characters(characters: Iterable[str]) -> str:
    """Return a `tokenizer.json` with a token for each character, in code point order, as in nanoGPT."""
    lib = library()
    table = {character: token for token, character in enumerate(sorted(characters))}
    tokenizer = lib.Tokenizer(lib.models.WordLevel(table))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(_CHARACTER), "isolated")
    tokenizer.decoder = lib.decoders.Fuse()
    return str(tokenizer.to_str())


def train(texts: Iterable[str], size: int, special: Sequence[str] = ()) -> str:
    """Train a byte-level BPE of at most `size` tokens, the last of which are `special` and SEPARATOR. Returns `tokenizer.json`.

    The same texts in the same order give the same tokens.
    """
    lib = library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    alphabet = sorted(lib.pre_tokenizers.ByteLevel.alphabet())
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size - 1 - len(special), min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([*special, SEPARATOR])
    return str(tokenizer.to_str())


def write_vocabulary(path: Path, tokenizer: Any) -> None:
    """Write the `meta.pkl` that gives nanoGPT's `train.py` the vocabulary size and lets its `sample.py` decode tokens."""
    size = vocab_size(tokenizer)
    shard_format.write_vocabulary(path, size, {i: tokenizer.decode([i], skip_special_tokens=False) for i in range(size)})


def save(path: Path, text: str) -> None:
    files.replace(path, text, durable=True)


@functools.lru_cache(maxsize=1)
def encoder(path: Path, digest: str) -> Encoder:
    """Return the fastest encoder for a `tokenizer.json` with this `digest`. Each process caches the last encoder."""
    tokenizer = load(path)
    about = json.loads(path.read_text("utf-8"))
    dtype = np.dtype(shard_format.dtype(vocab_size(tokenizer))).newbyteorder("<")
    model, splitter = about["model"], about.get("pre_tokenizer") or {}
    special = all(token["special"] for token in about.get("added_tokens", ()))
    if model["type"] == "WordLevel" and splitter.get("pattern") == {"Regex": _CHARACTER}:
        return _Characters(model["vocab"], dtype)
    byte_level = splitter.get("type") == "ByteLevel" and not splitter["add_prefix_space"] and splitter.get("use_regex", True)
    if model["type"] == "BPE" and byte_level and special and not about.get("normalizer") and not model.get("dropout"):
        return _Words(tokenizer, dtype)
    return _Plain(tokenizer, dtype)


class _Plain:
    """An encoder for any tokenizer. It cuts long texts between words."""

    def __init__(self, tokenizer: Any, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype

    def __call__(self, text: str) -> bytes:
        return b"".join(self._encoded(piece) for piece in pieces(text))

    def _encoded(self, text: str) -> bytes:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self._dtype).tobytes()


class _Words(_Plain):
    """An encoder for a byte-level BPE that splits text into GPT-2's words. It leaves lines with non-ASCII characters to the
    library, because Python's character classes are of another Unicode version."""

    def __init__(self, tokenizer: Any, dtype: np.dtype[Any]) -> None:
        super().__init__(tokenizer, dtype)
        self._known: dict[str, bytes] = {}
        self._room = _CACHED

    def _encoded(self, text: str) -> bytes:
        groups = itertools.groupby(_LINES.split(text), str.isascii)
        return b"".join(
            self._cached("".join(lines)) if ascii_only else super(_Words, self)._encoded("".join(lines))
            for ascii_only, lines in groups
        )

    def _cached(self, text: str) -> bytes:
        words = _WORD.findall(text)
        if self._room < 0:
            self._known, self._room = {}, _CACHED
        for word in set(words) - self._known.keys():
            self._known[word] = super()._encoded(word)
            self._room -= 100 + len(word)
        return b"".join([self._known[word] for word in words])


_LINES = re.compile(r"(?<=\S)(?=\n)")
_WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""GPT-2's pattern for ASCII text: https://github.com/openai/gpt-2/blob/master/src/encoder.py."""
_CACHED = 48 << 20
"""Memory of the cached words in bytes. Arbitrary: Python's sources have 95,000 words, which need 10 MB."""


class _Characters:
    """An encoder that maps each character to one token. It converts a whole text with a single array lookup."""

    def __init__(self, table: dict[str, int], dtype: np.dtype[Any]) -> None:
        self._in_vocabulary = np.zeros(0x110000, bool)
        self._token = np.zeros(0x110000, dtype)
        points = [ord(character) for character in table]
        self._in_vocabulary[points] = True
        self._token[points] = list(table.values())

    def __call__(self, text: str) -> bytes:
        points = code_points(text)
        if not self._in_vocabulary[points].all():
            unknown = chr(int(points[np.argmin(self._in_vocabulary[points])]))
            raise source_files.BadSource(
                f"the tokenizer does not know the character {unknown!r}; train one with --tokenizer char"
            )
        return bytes(self._token[points].tobytes())


def code_points(text: str) -> Any:
    """Return the code points of `text`, uint32 (n,)."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Split text into pieces of about `size` characters, cut between words."""
    start = 0
    while len(text) - start > size:
        cut = _CUT.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
