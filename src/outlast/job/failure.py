"""How training failed, as every process that decides about it tells it. A plain value: an elastic agent has no pydantic."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlast.job.contract import FailureCause

_UNTOLD = {"exclude": True}
"""Read by pydantic: such a field decides what follows a failure, and is in no status."""


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
    """The tail of the traceback, where there was one."""
    step: int | None = None
    generation: int = 0
    attempt: int = 0
    """Which start of that generation's processes failed: 0 for the first, n for the nth that its members made by themselves."""
    time: float = 0.0
    counted: bool = True
    node: str = ""
    """The node of its pod, on Kubernetes."""
    hung: bool = field(default=False, metadata=_UNTOLD)
    """Whether it was killed because it hung by itself, and was not stopped from outside."""
    left: bool = field(default=False, metadata=_UNTOLD)
    """Whether its worker's processes exited with 0, as if done, before others failed: the cause if all others are echoes."""
    early: str = field(default="", metadata=_UNTOLD)
    """The type of error that its worker's processes raised before their first step, if another try would raise it again."""
    log_tail: str = field(default="", metadata={"validation_alias": "logTail"})
    """The last lines of its worker's log; if that has several processes, of what the one that failed wrote."""

    @property
    def start(self) -> tuple[int, int]:
        """Which start of processes failed: failures are counted in this order, one for each."""
        return self.generation, self.attempt

    def told(self, *, but: Collection[str] = ()) -> dict[str, Any]:
        """As a document: what is known, without the fields named in `but` and those that are in no status."""
        kept = (each.name for each in dataclasses.fields(self) if each.metadata is not _UNTOLD and each.name not in but)
        return {name: value for name in kept if (value := getattr(self, name)) is not None}
