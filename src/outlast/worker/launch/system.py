"""Requests of ours to the operating system: daemons, the end of a child with its parent, titles of processes, glibc's settings.

A daemon outlives the process that starts it: the launcher, for the command line or a worker that misses it. Titles are what `ps`
and `top` show (`outlast: rank 3 train.py`), as forks of one process would all have its title; the environment, which shows to
which worker a process belongs, stays readable in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outlast.job import contract


def daemon(argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Start a command in a session of its own, its output appended to `log`. It is no child of ours, so it is not waited for."""
    with open(log, "ab") as file:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            check=True,
        )


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


_KEPT = "SPT_NOENV"
"""Keeps setproctitle from overwriting the environment: titles end where the arguments did."""


def entitle(title: str) -> None:
    """Set the title of this process. Without setproctitle (extra `train`) only `top` shows it, cut to 15 characters."""
    os.environ[_KEPT] = "1"
    try:
        import setproctitle

        setproctitle.setproctitle(f"outlast: {title}")
    except ImportError:
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(f"outlast: {title}")
    finally:
        del os.environ[_KEPT]


VARIABLE = "GLIBC_TUNABLES"
"""https://sourceware.org/glibc/manual/latest/html_node/Tunables.html; read when a program starts, unknown names are ignored."""
_NAME = "glibc.cpu.x86_non_temporal_threshold"
LARGE = 1 << 20
"""Bytes from which on a copy bypasses the caches. What glibc takes where cores share 1.5 MB each; half of a large core's L2."""


def streaming(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make copies of `LARGE` bytes bypass the caches, unless `environ` sets another limit.

    To write memory in the usual way, a core reads it first. `memcpy` avoids that for copies that are too large for the caches,
    and derives what is too large from the cache that the processor reports. A virtual machine often reports that of its whole
    host, 480 MB for 2 cores for instance, and then no copy is large enough. With this the state of a training is copied in 0.6 of
    the time (decision 0043).
    """
    given = [each for each in environ.get(VARIABLE, "").split(":") if each]
    if any(each.partition("=")[0] == _NAME for each in given):
        return {}
    return {VARIABLE: ":".join([*given, f"{_NAME}={LARGE:#x}"])}
