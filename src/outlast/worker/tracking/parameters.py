"""`parameters.json`: the settings of a run, which `run.parameters` writes (`training.parameters`) and trackers show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The parameters in a file; none if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
