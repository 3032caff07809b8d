"""Names of Kubernetes objects, within the length limits.

The names of immutable objects end with a digest of the content, so that applying a changed file creates new objects, and applying
the same file changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from outlast.job import contract

MAX_LENGTH = contract.LONGEST_HOST
_DIGITS = 8


def digest(value: Any, digits: int = _DIGITS) -> str:
    """Return a digest of a JSON value. The order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def fit(name: str, max_length: int = MAX_LENGTH) -> str:
    """Return the name, or its beginning and a digest if it is too long."""
    if len(name) <= max_length:
        return name
    return f"{name[: max_length - _DIGITS - 1].rstrip('-.')}-{digest(name)}"


@dataclass(frozen=True)
class Names:
    job: str
    digest: str = ""
    """Digest of the objects; empty while it is being computed."""

    @property
    def config(self) -> str:
        return fit(f"{self.job}-{self.digest}")

    def code(self, checksum: str) -> str:
        """Return the name of the ConfigMap for the code archive with this SHA-256."""
        return fit(f"{self.job}-code-{checksum[:_DIGITS]}")

    @property
    def service(self) -> str:
        """The headless Service's name. It is the same for all runs, because the Service selects pods by job."""
        return fit(f"{self.job}-rdzv")

    def workload(self, suffix: str = "") -> str:
        """Return the name of the workload, which is short enough for host names that append `suffix` to it."""
        return fit(f"{self.job}-{self.digest}", MAX_LENGTH - len(suffix))
