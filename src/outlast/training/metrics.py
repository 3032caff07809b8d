"""`metrics.jsonl`: the numbers a run reports, one JSON object a line, each step once.

Rank 0 appends. When a run goes on from an earlier step, the lines after it are cut off, because those steps come again.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any


def append(path: Path, line: dict[str, Any]) -> None:
    """Add one line. Raises OSError when it cannot be written."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def forget_after(path: Path, step: int) -> None:
    """Cut off the lines of steps later than `step`, and a torn one that a killed process left."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = len(text)
            while end and not _kept(text[(start := text.rfind(b"\n", 0, end - 1) + 1) : end], step):
                end = start
        file.truncate(end)


def _kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
