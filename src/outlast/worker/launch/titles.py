"""Titles of processes in `ps` and `top`: `outlast: rank 3 train.py`. Forks of one process would all have its title.

The environment, which shows to which worker a process belongs, stays readable in /proc.
"""

from __future__ import annotations

import contextlib
import os

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
