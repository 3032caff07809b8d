"""The API for training scripts with torch: exact resume, asynchronous checkpoints and a fixed global batch.

    from outlast.training import Stream, session

`docs/guide/exact-resume.md` shows a whole script.
"""

import importlib
from typing import TYPE_CHECKING, Any

from outlast.training.progress_report import progress

if TYPE_CHECKING:
    from outlast.training import session
    from outlast.training.samples.shards import Shards
    from outlast.training.samples.stream import Batch, Stream
    from outlast.training.session import Session
    from outlast.training.state import checkpoint
    from outlast.training.state.stateful_loader import Stateful

__all__ = ["Batch", "Session", "Shards", "Stateful", "Stream", "checkpoint", "progress", "session"]

_MODULES = {
    "Batch": "samples.stream",
    "Session": "session",
    "Shards": "samples.shards",
    "Stateful": "state.stateful_loader",
    "Stream": "samples.stream",
    "checkpoint": "state.checkpoint",
    "session": "session",
}
"""The module of each name, which is imported when the name is first used, so that `progress` works without torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)
