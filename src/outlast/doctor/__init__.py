"""Checks before training: on this machine, in a cluster, and in pods of it.

    machine.checks()                  Python, torch, extras
    cluster.checks(cluster)           rights, versions, installed controllers; changes nothing
    inside.checks(cluster, ...)       an image, names, the network and a store, seen from pods that are deleted again

Each yields `Check`s as soon as their outcome is known. Only the command line calls them.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "warn", "fail"]
_WIDTH = 112


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    outcome: Outcome
    said: str
    """A sentence: what was found."""
    remedy: str = ""
    """What to do about it; empty for a check that has passed."""

    def __str__(self) -> str:
        head = f"{self.outcome}  {self.name:<18}  "
        lines = textwrap.wrap(self.said, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
        if self.remedy:
            deep = " " * len(head)
            lines += textwrap.wrap(
                self.remedy, _WIDTH, initial_indent=f"{deep}→ ", subsequent_indent=f"{deep}  ", break_on_hyphens=False
            )
        return "\n".join(lines)


def passed(name: str, said: str) -> Check:
    """A check without a problem."""
    return Check(name, "pass", said)


def warned(name: str, said: str, remedy: str) -> Check:
    """A problem that does not keep jobs from training."""
    return Check(name, "warn", said, remedy)


def failed(name: str, said: str, remedy: str) -> Check:
    """A problem that keeps jobs from training."""
    return Check(name, "fail", said, remedy)
