"""Calls to the operating system for daemons, process titles, glibc's settings, and children that die with their parent."""

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
    """Start a daemon, which outlives this process and need not be reaped. Its output is appended to `log`."""
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
    """Make the kernel send the signal `number` to this process when its `parent` dies."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(contract.exit_code(-number))


def be_traced() -> None:
    """Allow any process of this user to read our stacks, since py-spy runs in a sibling of this process."""
    _prctl(_PR_SET_PTRACER, _ANYBODY)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


_NO_ENV = "SPT_NOENV"
"""Variable that keeps setproctitle from overwriting the environment. Titles are then at most as long as the arguments."""


def entitle(title: str) -> None:
    """Set this process's title, such as `outlast: rank 3 train.py`. Only `top` shows it without setproctitle (extra `train`)."""
    os.environ[_NO_ENV] = "1"
    try:
        import setproctitle

        setproctitle.setproctitle(f"outlast: {title}")
    except ImportError:
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(f"outlast: {title}")
    finally:
        del os.environ[_NO_ENV]


VARIABLE = "GLIBC_TUNABLES"
"""Variable that glibc reads when a program starts, ignoring unknown names.
https://sourceware.org/glibc/manual/latest/html_node/Tunables.html"""
_NAME = "glibc.cpu.x86_non_temporal_threshold"
LARGE = 1 << 20
"""Minimum size in bytes of a copy that bypasses the caches: glibc's value for 1.5 MB of shared cache per core."""


def streaming(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make copies of `LARGE` bytes bypass the caches, unless `environ` sets another limit.

    A normal write first reads the memory into the cache. `memcpy` avoids this for copies above a limit, which it derives from the
    reported cache size. A virtual machine often reports its whole host's cache, e.g. 480 MB for 2 cores, so no copy is large
    enough. With this setting, copying the training state takes 0.6 of the time (decision 0043).
    """
    tunables = [each for each in environ.get(VARIABLE, "").split(":") if each]
    if any(each.partition("=")[0] == _NAME for each in tunables):
        return {}
    return {VARIABLE: ":".join([*tunables, f"{_NAME}={LARGE:#x}"])}
