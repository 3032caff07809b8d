"""Dumps the Python stacks of hung processes with py-spy, before the agent kills them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DUMP_TIMEOUT_S = 10.0
"""Timeout for py-spy in seconds. The agent writes no heartbeat meanwhile, and counts as stuck after 20 s."""


def dump(pids: list[int], path: Path) -> None:
    """Write the processes' Python stacks to `path`, or py-spy's error if it fails."""
    py_spy = Path(sys.executable).with_name("py-spy")
    end = time.monotonic() + DUMP_TIMEOUT_S
    with ThreadPoolExecutor(max(1, len(pids))) as pool:
        texts = list(pool.map(lambda pid: _stack(py_spy, pid, end - time.monotonic()), pids))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts))


def _stack(py_spy: Path, pid: int, seconds: float) -> str:
    argv = [str(py_spy), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
        return done.stdout or f"process {pid}: py-spy failed: {done.stderr}"
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"process {pid}: no stack: {problem}\n"
