"""Which committed checkpoints stay, on a disk and in a store: the one rule for both. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST = 2
"""The newest checkpoint may turn out to be damaged, so the one before it always stays."""


@dataclass(frozen=True)
class Retention:
    """How many committed checkpoints to keep."""

    keep: int = 3
    """How many of the newest; at least LEAST stay whatever it says."""

    @classmethod
    def parse(cls, text: str) -> Retention:
        """The retention in a text made by `spec.Checkpoint.retention`."""
        return cls(int(text))

    def expired(self, steps: Iterable[int], counted: Sequence[int] | None = None) -> set[int]:
        """Which of the committed `steps` to remove.

        `counted`: those of them that count as newest ones, lowest first; all of them by default.
        """
        steps = sorted(steps)
        newest = (steps if counted is None else counted)[-max(LEAST, self.keep) :]
        if len(newest) < max(LEAST, self.keep):
            return set()
        return {step for step in steps if step < newest[0]}
