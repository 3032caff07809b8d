"""The API for training scripts with torch: exact resume, asynchronous checkpoints and a fixed global batch.

    from outlast.training import Stream, session

`docs/guide/exact-resume.md` shows a whole script.
"""

import importlib
from typing import TYPE_CHECKING, Any

from outlast.training.reported import progress

if TYPE_CHECKING:
    from outlast.training import session
    from outlast.training.samples.shards import Shards
    from outlast.training.samples.stream import Batch, Stream
    from outlast.training.session import Session
    from outlast.training.state import checkpoint
    from outlast.training.state.stateful import Stateful

__all__ = ["Batch", "Session", "Shards", "Stateful", "Stream", "checkpoint", "progress", "session"]

_MODULES = {
    "Batch": "samples.stream",
    "Session": "session",
    "Shards": "samples.shards",
    "Stateful": "state.stateful",
    "Stream": "samples.stream",
}
"""The module of each name, imported when the name is first used: `progress` needs no torch."""
_MODULES_THEMSELVES = {"checkpoint": "state.checkpoint", "session": "session"}


def __getattr__(name: str) -> Any:
    if place := _MODULES_THEMSELVES.get(name):
        return importlib.import_module(f"{__name__}.{place}")
    if place := _MODULES.get(name):
        return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
