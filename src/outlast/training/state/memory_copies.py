"""Copies tensors within this machine's memory, with several threads, since one core cannot saturate the memory bandwidth."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterable, Iterator

import torch

_PIECE = 16 << 20
"""Minimum number of bytes that a thread copies at a time. Above 16 times the size at which copies bypass the caches
(`launch.os_calls`), `memcpy` is even faster, since it copies four pages at once."""
_LINE = 64
_LARGE = 256 << 10
"""Tensors of fewer bytes are left to torch, which copies many small tensors faster."""
_WORTH = 16 << 20
"""Minimum number of bytes for which threads are started: a thread starts in 0.1 ms, and a core copies this many bytes in 2 ms."""
_MOST = 4
"""Maximum number of threads, since more threads do not increase the bandwidth."""

Pair = tuple[torch.Tensor, torch.Tensor]


def copy(pairs: Iterable[Pair], *, background: bool = True) -> None:
    """Copy the second tensor of each pair into the first, which must have the same shape. With `background`, copies from an
    accelerator to pinned memory may continue until the accelerator's `synchronize`."""
    moves: list[tuple[int, int, int]] = []
    small: list[Pair] = []
    for to, source in pairs:
        if not (to.is_cpu and source.is_cpu):
            to.copy_(source, non_blocking=background)
        elif source.nbytes >= _LARGE and _plain(to) and _plain(source) and to.dtype == source.dtype and to.shape == source.shape:
            moves.append((to.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            small.append((to, source))
    if small:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in small], [source for _, source in small])
    total = sum(size for _, _, size in moves)
    pieces = iter(sorted(_pieces(moves), key=lambda piece: -piece[2]))  # a list's iterator may be shared by threads
    helpers = [threading.Thread(target=_move, args=(pieces,), name="outlast-copy") for _ in range(_helpers(total))]
    for helper in helpers:
        helper.start()
    _move(pieces)
    for helper in helpers:
        helper.join()


def _plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are the bytes at its address, in order."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pieces(moves: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for to, source, size in moves:
        count = max(1, size // _PIECE)
        ends = [size * number // count // _LINE * _LINE for number in range(count)] + [size]
        for start, end in itertools.pairwise(ends):
            yield to + start, source + start, end - start


def _move(pieces: Iterator[tuple[int, int, int]]) -> None:
    for to, source, size in pieces:
        ctypes.memmove(to, source, size)  # releases the GIL


def _helpers(size: int) -> int:
    """Return the number of threads to start: one for each of this rank's cores but the caller's."""
    if size < _WORTH:
        return 0
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(0, min(_MOST, len(os.sched_getaffinity(0)) // ranks) - 1)
