"""The notice: a file that asks this worker's training to save at the next step boundary and leave (`contract.NOTICE`).

The agent writes the notice when the worker is interrupted (`leave`); its membership writes it when a new rendezvous is
requested (`call`, with the next generation). Training only checks whether the file exists. A file needs no signal handler in
the training process, and outlives its writer.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from outlast.base import files


def write(path: Path, kind: str, reason: str, deadline: float, *, generation: int = 0) -> None:
    """Write a notice. `deadline` is in seconds since the epoch; after it, the agent kills the training."""
    until = time.monotonic() + deadline - time.time()
    notice = {"kind": kind, "reason": reason, "generation": generation, "deadline": deadline, "until": until}
    files.replace(path, json.dumps(notice))


def left_s(path: Path | None) -> float:
    """Return the seconds until the deadline, on the monotonic clock that all processes on a machine share; infinity if there is
    no notice or no deadline."""
    notice = read(path) if path else {}
    if "until" in notice:
        return max(0.0, float(notice["until"]) - time.monotonic())
    return max(0.0, float(notice["deadline"]) - time.time()) if "deadline" in notice else math.inf  # older versions


def read(path: Path) -> dict[str, Any]:
    """Return the notice; empty if there is none."""
    return files.mapping(path)
