"""Tokenizes ASCII text with byte-level BPE in numpy, without a Python object per word.

`starts` splits text into GPT-2's words by the classes of neighbouring characters. `Table` stores the tokens of words of up to 16
bytes in a direct-mapped table, keyed by the word's bytes as two integers, and all other words in a dict. The results are exact:
`tests/data/test_prepare_text.py` compares them with those of `tokenizers`.

The pattern is `'(?:[sdmt]|ll|ve|re)| ?L+| ?N+| ?P+|\\s+(?!\\S)|\\s+`, where L is a letter, N a digit, and P any other character
except a space: https://github.com/openai/gpt-2/blob/master/src/encoder.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPACE, _LETTER, _DIGIT, _OTHER = range(4)
_CLASS = np.full(256, _OTHER, np.uint8)
_CLASS[[9, 10, 11, 12, 13, 32]] = _SPACE
_CLASS[[*range(65, 91), *range(97, 123)]] = _LETTER
_CLASS[48:58] = _DIGIT
_CONTRACTED = np.zeros(256, bool)
_CONTRACTED[list(b"sdmtlvr")] = True
_MASK = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
"""Masks for little-endian integers: entry n keeps the first n bytes."""
_LONGEST = 16
_SLOTS = 18
"""log2 of the number of slots: 262,144 slots take 6 MiB."""
_WORDS, _BYTES = 300_000, 16 << 20
"""Maximum number and total bytes of words in a table: about 60 MiB of memory. Arbitrary: Python's sources have 95,000 words."""
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
"""Odd multipliers that make the highest bits of a product depend on all bytes of a word."""


def starts(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the offsets of the words in `data`, (words,). `data` must be ASCII and not empty."""
    kind = _CLASS[data]
    begins = np.ones(len(data), bool)
    np.not_equal(kind[1:], kind[:-1], out=begins[1:])
    after = np.flatnonzero(begins[1:] & (kind[:-1] == _SPACE)) + 1  # the first character after spaces
    begins[after - 1] = True  # the last of several spaces begins a word;
    begins[after[data[after - 1] == 32]] = False  # if it is a blank, the next characters belong to that word
    quotes = begins[:-1] & (data[:-1] == 39) & _CONTRACTED[data[1:]]
    for quote in np.flatnonzero(quotes).tolist():
        tail = data[quote + 1 : quote + 3].tobytes()
        length = 2 if tail[:1] in (b"s", b"d", b"m", b"t") else 3 if tail in (b"ll", b"ve", b"re") else 0
        if length:
            begins[quote + 1] = False
            if quote + length < len(data):
                begins[quote + length] |= kind[quote + length] == _LETTER
    return np.flatnonzero(begins)


class Table:
    """A cache of each word's tokens."""

    def __init__(self, encoded: Callable[[str], list[int]], dtype: np.dtype[Any]) -> None:
        self._encode, self._dtype = encoded, dtype
        self.clear()

    @property
    def full(self) -> bool:
        """True if the caller should `clear` the table before the next text."""
        return len(self._words) > _WORDS or self._bytes > _BYTES

    def clear(self) -> None:
        """Remove all words."""
        self._words: dict[bytes, tuple[int, int]] = {}
        self._store = array("H" if self._dtype.itemsize == 2 else "I")
        self._bytes = 0
        self._keys = np.zeros((2, 1 << _SLOTS), np.uint64)
        self._at = np.zeros(1 << _SLOTS, np.int64)
        self._length = np.zeros(1 << _SLOTS, np.int64)

    def __call__(self, text: bytes) -> bytes:
        """Return a text's tokens as little-endian bytes. The text must be ASCII without zero bytes."""
        padded = np.zeros(len(text) + _LONGEST, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        begin = starts(padded[: len(text)])
        size = np.diff(begin, append=len(text))
        eight = np.ndarray(len(text) + 8, "<u8", padded, strides=(1,))  # the eight bytes from each position
        low = eight[begin] & _MASK[np.minimum(size, 8)]
        high = eight[np.minimum(begin + 8, len(text) + 7)] & _MASK[np.clip(size - 8, 0, 8)]
        slot = ((low * _MIX[0]) ^ (high * _MIX[1])) >> np.uint64(64 - _SLOTS)
        slot = slot.astype(np.int64)
        hit = (self._keys[0, slot] == low) & (self._keys[1, slot] == high) & (size <= _LONGEST)
        at, length = self._at[slot], self._length[slot]
        for i in np.flatnonzero(~hit).tolist():
            word = text[begin[i] : begin[i] + size[i]]
            entry = self._words.get(word)
            if entry is None:
                entry = self._add(word)
                if size[i] <= _LONGEST and not self._keys[0, slot[i]]:  # first come, first served: frequent words appear early
                    self._keys[:, slot[i]] = low[i], high[i]
                    self._at[slot[i]], self._length[slot[i]] = entry
            at[i], length[i] = entry
        ends = np.cumsum(length)
        index = np.repeat(at - (ends - length), length)
        index += np.arange(len(index))
        store = np.frombuffer(self._store, self._dtype.newbyteorder("=")) if self._store else np.empty(0, self._dtype)
        return bytes(store[index].astype(self._dtype).tobytes())

    def _add(self, word: bytes) -> tuple[int, int]:
        tokens = self._encode(word.decode("ascii"))
        entry = self._words[word] = len(self._store), len(tokens)
        self._store.extend(tokens)
        self._bytes += len(word)
        return entry
