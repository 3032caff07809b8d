"""What processes are called in `ps` and `top`: `outlast: rank 3 train.py`. Forks of one process would all have its name.

The environment, by which a process is known to belong to a worker, stays readable in /proc.
"""

from __future__ import annotations

import contextlib
import os

_KEPT = "SPT_NOENV"
"""Tells setproctitle not to write over the environment: titles end where the arguments did."""


def entitle(title: str) -> None:
    """Call this process so. Without setproctitle, which comes with the extra `train`, only `top` knows, and 15 characters."""
    os.environ[_KEPT] = "1"
    try:
        import setproctitle

        setproctitle.setproctitle(f"outlast: {title}")
    except ImportError:
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(f"outlast: {title}")
    finally:
        del os.environ[_KEPT]
