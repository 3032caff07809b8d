"""Prepared data, and texts of the tokens 0, 1, 2 ..., and of characters, as nanoGPT prepares them."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np

from outlast.data import shard_format


def a_text(directory: Path, tokens: int = 1000, shard: int | None = None, dtype: str = "uint16") -> Path:
    """Write a prepared text of the tokens 0, 1, 2 ... in shards of `shard` tokens, for train and val."""
    directory.mkdir(exist_ok=True)
    width = np.dtype(dtype).itemsize
    parts = {}
    for part, count in (("train", tokens), ("val", 50)):
        writer = shard_format.Writer(directory, part, width, shard and shard * width)
        writer.write(np.arange(count, dtype=dtype).tobytes(), 1)
        parts[part] = writer.close()
    shard_format.write(directory, shard_format.Manifest("text", parts, dtype=dtype, vocab_size=60000))
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def characters(directory: Path, text: str, val: str) -> Path:
    """Write nanoGPT's directory, with a token for each character: train.bin, val.bin, meta.pkl."""
    directory.mkdir(parents=True, exist_ok=True)
    known = sorted(set(text + val))
    ids = {character: number for number, character in enumerate(known)}
    for name, part in (("train", text), ("val", val)):
        np.array([ids[character] for character in part], dtype="<u2").tofile(directory / f"{name}.bin")
    meta = {"vocab_size": len(known), "stoi": ids, "itos": dict(enumerate(known))}
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))
    return directory
