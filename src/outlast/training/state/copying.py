"""Copies tensors within the memory of this machine, by several threads.

One core moves less than the memory could. Training waits meanwhile, so the cores that a rank has are free to help.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterable, Iterator

import torch

_PIECE = 16 << 20
"""Least bytes that a thread moves at a time, of what is larger. From 16 times the size at which copies bypass the caches
(`launch.system`), `memcpy` copies four pages at once, which is faster still."""
_LINE = 64
"""Bytes of a cache line: pieces begin with one."""
_LARGE = 256 << 10
"""Bytes of a tensor from which on we move it; torch copies many small ones faster."""
_WORTH = 16 << 20
"""Bytes from which on threads are started; arbitrary: they take 0.1 ms each, this much takes one core 2 ms."""
_MOST = 4
"""Threads: more do not make memory faster."""

Pair = tuple[torch.Tensor, torch.Tensor]


def copy(pairs: Iterable[Pair], *, background: bool = True) -> None:
    """Copy the second tensor of each pair into the first, of the same shape.

    Those on an accelerator go on in the `background`, if the memory is pinned: its `synchronize` waits for them.
    """
    moves: list[tuple[int, int, int]] = []
    small: list[Pair] = []
    for to, of in pairs:
        if not (to.is_cpu and of.is_cpu):
            to.copy_(of, non_blocking=background)
        elif of.nbytes >= _LARGE and _plain(to) and _plain(of) and to.dtype == of.dtype and to.shape == of.shape:
            moves.append((to.data_ptr(), of.data_ptr(), of.nbytes))
        else:
            small.append((to, of))
    if small:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in small], [of for _, of in small])
    total = sum(size for _, _, size in moves)
    pieces = iter(sorted(_pieces(moves), key=lambda piece: -piece[2]))  # a list's iterator may be shared by threads
    helpers = [threading.Thread(target=_move, args=(pieces,), name="outlast-copy") for _ in range(_helpers(total))]
    for helper in helpers:
        helper.start()
    _move(pieces)
    for helper in helpers:
        helper.join()


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its values are the bytes from its address on."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pieces(moves: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for to, of, size in moves:
        count = max(1, size // _PIECE)
        ends = [size * number // count // _LINE * _LINE for number in range(count)] + [size]
        for start, end in itertools.pairwise(ends):
            yield to + start, of + start, end - start


def _move(pieces: Iterator[tuple[int, int, int]]) -> None:
    for to, of, size in pieces:
        ctypes.memmove(to, of, size)  # releases the GIL


def _helpers(size: int) -> int:
    """How many threads to start: one for each other core that this rank has."""
    if size < _WORTH:
        return 0
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(0, min(_MOST, len(os.sched_getaffinity(0)) // ranks) - 1)
