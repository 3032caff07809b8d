"""A prepared text of the tokens 0, 1, 2 ..."""

from __future__ import annotations

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
