"""Names of what is made on Kubernetes: short enough, and new when what they name has changed.

Jobs and ConfigMaps cannot be changed once they are made. Theirs end with a digest of what they hold, so that applying a changed
file makes new ones, and applying the same file changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from outlast import contract

LONGEST = contract.LONGEST_HOST
_DIGITS = 8


def digest(value: Any) -> str:
    """Eight characters that say whether two values (of JSON) are the same; the order of keys has no meaning."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def fit(name: str, longest: int = LONGEST) -> str:
    """The name, or when it is too long its begin and a digest of all of it."""
    if len(name) <= longest:
        return name
    return f"{name[: longest - _DIGITS - 1].rstrip('-.')}-{digest(name)}"


@dataclass(frozen=True)
class Names:
    """The names of one job's documents."""

    job: str
    digest: str = ""
    """Of the documents; empty while they are made for the first time, to be digested."""

    @property
    def config(self) -> str:
        """The ConfigMap with the job file."""
        return fit(f"{self.job}-{self.digest}")

    def code(self, checksum: str) -> str:
        """The ConfigMap with the archive of code that has this SHA-256."""
        return fit(f"{self.job}-code-{checksum[:_DIGITS]}")

    @property
    def service(self) -> str:
        """The headless Service that gives workers their host names. The same for all runs: it selects by the job."""
        return fit(f"{self.job}-rdzv")

    def workload(self, suffix: str = "") -> str:
        """What owns the pods, when the longest host name of a pod adds `suffix` to it."""
        return fit(f"{self.job}-{self.digest}", LONGEST - len(suffix))
