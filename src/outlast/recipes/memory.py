"""How a training process on the CPU keeps its memory."""

from __future__ import annotations

import ctypes


def keep_freed() -> None:
    """Have glibc keep large blocks that are freed. It would give them back, and the kernel clear them anew in every step.

    That is a tenth of a step of a small model. mallopt(3): M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD -3.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter in (-1, -3):
            mallopt(parameter, 1 << 30)
