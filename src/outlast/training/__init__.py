"""What a training script imports: exact resume, asynchronous checkpoints and a fixed global batch, with torch.

    from outlast.training import Stream, session

`docs/guide/exact-resume.md` shows a whole script.
"""

from outlast.training import checkpoint, session
from outlast.training.session import Session
from outlast.training.stream import Batch, Stream

__all__ = ["Batch", "Session", "Stream", "checkpoint", "session"]
