"""The notice: a file that asks this worker's training to save its state at the next step and leave (`contract.NOTICE`).

The agent writes a notice when the worker is interrupted (`leave`); its membership writes one when a new rendezvous is requested
(`call`). Unlike a signal, a file needs no handler in the training process, and it outlives its writer.
"""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

from outlast.base import files

_WRITING = threading.Lock()
"""Held by the agent's threads while they replace or remove a notice, so that a `leave` is never lost."""


def write(path: Path, kind: str, reason: str, deadline: float, *, generation: int = 0) -> None:
    """Write a notice, unless it is a `call` and would replace a `leave`. The agent kills the training at `deadline`, in seconds
    since the epoch. Raises OSError."""
    until = time.monotonic() + deadline - time.time()
    notice = {"kind": kind, "reason": reason, "generation": generation, "deadline": deadline, "until": until}
    with _WRITING:
        if kind == "leave" or read(path).get("kind") != "leave":
            files.replace(path, json.dumps(notice))


def end_call(path: Path) -> None:
    """Remove a `call`, because the next world has formed. A `leave` stays."""
    with _WRITING:
        if read(path).get("kind") == "call":
            path.unlink(missing_ok=True)


def left_s(path: Path | None) -> float:
    """Return the seconds until the deadline, by the monotonic clock that all local processes share; infinity without a notice."""
    notice = read(path) if path else {}
    if "until" in notice:
        return max(0.0, float(notice["until"]) - time.monotonic())
    return max(0.0, float(notice["deadline"]) - time.time()) if "deadline" in notice else math.inf  # older versions


def read(path: Path) -> dict[str, Any]:
    """Return the notice; empty if there is none."""
    return files.mapping(path)
