"""The notice: a file that asks the training of this worker to save at the next step boundary and leave (`contract.NOTICE`).

The agent writes it when the worker is to go (`leave`), the rendezvous handler when the world is called together again (`call`,
with the generation to come). Training only looks whether it is there. A file needs no signal handler in the training process,
and it outlives whoever wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outlast import files


def write(path: Path, kind: str, reason: str, deadline: float, *, generation: int = 0) -> None:
    """Ask. `deadline` is in seconds since the epoch; after it the training is ended without asking."""
    files.replace(path, json.dumps({"kind": kind, "reason": reason, "generation": generation, "deadline": deadline}))


def read(path: Path) -> dict[str, Any]:
    """The notice; empty when there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
