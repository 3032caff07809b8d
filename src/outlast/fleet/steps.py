"""What a plan consists of: steps, each with the way to ask whether it is done. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from outlast.fleet.capacity import Supply
from outlast.fleet.model import Document

Kind = Literal["eksctl", "kubectl", "helm", "outlast"]
"""The tool that carries a step out."""
Command = tuple[str, ...]

KUBECONFIG = "kubeconfig"
"""The file, beside the plan's other files, that says where the cluster is. Every command of a plan runs with it as `KUBECONFIG`,
so that none reaches another cluster."""


@dataclass(frozen=True)
class Check:
    """A question that changes nothing. The step is done if the command exits with 0 and its output matches all of `expects`."""

    command: Command
    expects: tuple[str, ...] = ()
    """Regular expressions (`re.search`, with `re.DOTALL`)."""


@dataclass(frozen=True)
class Cost:
    """US dollars an hour; None where the file of prices does not say."""

    first: float | None
    """With the nodes to begin with."""
    most: float | None
    """With the most nodes."""


@dataclass(frozen=True)
class Step:
    """One step of a plan. Steps are carried out in order."""

    key: str
    """What the step makes, unique in the plan and the same in every plan of the cluster: `cluster`, `group/p3spot`."""
    kind: Kind
    sentence: str
    command: Command
    """Run in the directory of the plan's files."""
    files: tuple[str, ...] = ()
    """The files that the command reads."""
    check: Check | None = None
    """Whether it is done. None: run it again."""
    repeatable: bool = True
    """Whether running the command again changes nothing if it is done, and finishes what was begun if not."""
    paid: bool = False
    """Whether it makes something that costs money while it exists."""
    cost: Cost | None = None
    """Of what is `paid`, if prices were given."""


@dataclass(frozen=True)
class Plan:
    """How a cluster comes to be."""

    cluster: str
    region: str
    order: tuple[Supply, ...]
    """Where new nodes come from, first to last."""
    grows: bool
    """Whether anything adds nodes for pending pods."""
    steps: tuple[Step, ...]
    files: Mapping[str, tuple[Document, ...]] = field(default_factory=dict)
    """The documents of each file, by its path in the plan's directory."""

    @property
    def cost(self) -> Cost | None:
        """Of all steps; None without prices."""
        costs = [step.cost for step in self.steps if step.cost]
        return Cost(_sum([each.first for each in costs]), _sum([each.most for each in costs])) if costs else None


def _sum(values: list[float | None]) -> float | None:
    """The sum; None if a part is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
