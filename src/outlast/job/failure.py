"""A failure of training, as all processes exchange it. A plain dataclass: an elastic agent has no pydantic."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlast.job.contract import FailureCause

_INTERNAL = {"exclude": True}
"""Read by pydantic: fields for decisions only, which are in no status."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failing process of the generation that failed last."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"populate_by_name": True}

    worker: int
    rank: int | None = None
    code: int
    reason: str
    """One sentence: `rank 1 on worker 1 was killed by SIGKILL`."""
    cause: FailureCause = FailureCause.UNKNOWN
    traceback: str = ""
    """The tail of the traceback, if there was one."""
    step: int | None = None
    generation: int = 0
    attempt: int = 0
    """The failed start of that generation's processes: 0 for the first, n for the nth that its members made by themselves."""
    time: float = 0.0
    counted: bool = True
    node: str = ""
    """The node of its pod, on Kubernetes."""
    hung: bool = field(default=False, metadata=_INTERNAL)
    """It was killed because it hung by itself, and was not stopped from outside."""
    left: bool = field(default=False, metadata=_INTERNAL)
    """Its worker's processes exited with 0, as if done, before others failed: the cause if all others are echoes."""
    early: str = field(default="", metadata=_INTERNAL)
    """Type of an error that its worker's processes raised before their first step, and that a restart would raise again."""
    log_tail: str = field(default="", metadata={"validation_alias": "logTail"})
    """The last lines of its worker's log; with several processes, only those of the failed one."""

    @property
    def start(self) -> tuple[int, int]:
        """The failed start of processes; failures are counted in this order, one for each start."""
        return self.generation, self.attempt

    def document(self, *, but: Collection[str] = ()) -> dict[str, Any]:
        """As a document for a status: fields that have a value, without internal ones and those named in `but`."""
        names = (each.name for each in dataclasses.fields(self) if each.metadata is not _INTERNAL and each.name not in but)
        return {name: value for name in names if (value := getattr(self, name)) is not None}
