"""A training failure, as processes exchange it. It is a plain dataclass because training processes have no pydantic."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlast.job import contract
from outlast.job.contract import FailureCause

CATEGORIES = ("oom", "disk", "hang", "bits", "killed", "error")
_INTERNAL = {"exclude": True}
"""Metadata that tells pydantic to leave a field out of statuses, because only decisions use it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first process that failed in the latest failed generation."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"populate_by_name": True}

    worker: int
    rank: int | None = None
    code: int
    reason: str
    """One sentence, such as `rank 1 on worker 1 was killed by SIGKILL`."""
    cause: FailureCause = FailureCause.UNKNOWN
    traceback: str = ""
    step: int | None = None
    generation: int = 0
    attempt: int = 0
    """The attempt of the generation that failed: 0 before any restart by the members themselves, n after their nth restart."""
    time: float = 0.0
    counted: bool = True
    node: str = ""
    hung: bool = field(default=False, metadata=_INTERNAL)
    """True if the process was killed because it hung by itself, not because something had stopped it from outside."""
    left: bool = field(default=False, metadata=_INTERNAL)
    """True if the worker exited with 0 before other workers failed. Its exit is the cause if their failures are mere
    consequences."""
    early: str = field(default="", metadata=_INTERNAL)
    """Type of an error that the worker's processes raised before their first step, and would raise again after a restart."""
    log_tail: str = field(default="", metadata={"validation_alias": "logTail"})
    """The last lines of the worker's log; with several processes, only the lines of the process that failed."""

    @property
    def start(self) -> tuple[int, int]:
        """Generation and attempt in which the processes failed. Failures are counted in ascending order of these pairs, at most
        one per pair."""
        return self.generation, self.attempt

    def document(self, *, but: Collection[str] = ()) -> dict[str, Any]:
        """Return the failure as a document for a status: all fields with a value, except internal fields and those in `but`."""
        names = (each.name for each in dataclasses.fields(self) if each.metadata is not _INTERNAL and each.name not in but)
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def category(failure: Mapping[str, Any]) -> str:
    """Return the entry of `CATEGORIES` for a failure's fields. There are few categories because each becomes a time series."""
    if reported := FailureCause(failure.get("cause") or ""):
        return str(reported)
    code = failure.get("code")
    return "killed" if isinstance(code, int) and contract.killed(contract.exit_code(code)) else "error"
