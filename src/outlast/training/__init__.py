"""What a training script imports: exact resume, asynchronous checkpoints and a fixed global batch, with torch.

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

_OF = {
    "Session": "session",
    "Batch": "stream",
    "Shards": "shards",
    "Stateful": "stateful",
    "Stream": "stream",
    "checkpoint": "",
    "session": "",
}
"""The module of each name, imported when it is first used: `progress` needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_OF[name] or name}")
    return getattr(module, name) if _OF[name] else module
