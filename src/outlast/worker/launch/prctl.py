"""Two requests to Linux about this process, of prctl(2); elsewhere they do nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from outlast.job import contract

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = 0xFFFFFFFFFFFFFFFF


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel end this process, with the signal of this `number`, when its `parent` dies."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before we asked
        os._exit(contract.exit_code(-number))


def be_traced() -> None:
    """Let any process of this user read our stacks, also one that is no parent: py-spy."""
    _prctl(_PR_SET_PTRACER, _ANYBODY)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
