"""Findings from `outlast why` and `outlast doctor`, and functions that format lists and quantities as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from outlast.base import units
from outlast.job.contract import FailureCause
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.manifests.render_request import Document

Outcome = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One fact about a job, a cluster or a machine."""

    name: str
    """A machine-readable name, such as `out-of-memory`."""
    what: str
    remedy: str = ""
    """Instruction for the user; empty if nothing needs to be done."""
    evidence: tuple[str, ...] = ()
    """Verbatim messages or log lines."""
    outcome: Outcome = "fail"
    """`fail` if the fact keeps jobs from training, `warn` if it may do so or has a cost, and `pass` if all is well."""

    @property
    def failed(self) -> bool:
        return self.outcome == "fail"


def passed(name: str, what: str, remedy: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    """Return a finding with the outcome `pass`."""
    return Finding(name, what, remedy, evidence, "pass")


def warned(name: str, what: str, remedy: str) -> Finding:
    """Return a finding with the outcome `warn`."""
    return Finding(name, what, remedy, outcome="warn")


# Formatting


def repeated_failures(steps: Sequence[int | None], failures: int, cause: str) -> str:
    """Return a sentence about failures without progress. `steps` contains the steps at which the last failures happened, which
    are all equal."""
    verb = "hung" if cause == FailureCause.HANG else "failed"
    if len(steps) < 2:
        return f"it has failed {failures} times without a new checkpoint"
    suffix = f" ({failures} failures without a new checkpoint)" if failures > len(steps) else ""
    return f"it has {verb} {len(steps)} times in a row{f' at step {steps[0]}' if steps[0] else ' before its first step'}{suffix}"


_PLURAL = {"is": "are", "was": "were"}


def workers(pods: Iterable[Document], verb: str = "") -> str:
    """Format the workers of pods with a verb, such as `workers 0 and 2 wait`. `verb` is in the singular. If no pod has an index,
    the pods are listed by name."""
    documents = list(pods)
    numbers = sorted({number for pod in documents if (number := pod_status.labelled_index(pod)) is not None})
    names = list(map(str, numbers)) or sorted(map(pod_status.name, documents))
    plural = len(names) > 1
    subject = f"{'worker' if numbers else 'pod'}{'s' * plural} {joined(names)}"
    return " ".join(filter(None, (subject, _PLURAL.get(verb, verb.removesuffix("s")) if plural else verb)))


def joined(words: Iterable[str], last: str = "and") -> str:
    """Join words as in `a, b and c`. A list of more than six words is shortened."""
    items = list(words)
    if len(items) > 6:
        items = [*items[:5], f"{len(items) - 5} more"]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def grouped(pairs: Iterable[tuple[str, Document]]) -> dict[str, list[Document]]:
    """Group pods by the first item of each pair."""
    groups: dict[str, list[Document]] = {}
    for key, pod in pairs:
        groups.setdefault(key, []).append(pod)
    return groups


def amount_text(resource: str, amount: float) -> str:
    """Format an amount of a resource, such as `16 GiB` of memory or `4` of any other resource."""
    return units.human_bytes(amount) if resource.endswith(("memory", "storage")) else f"{amount:.3g}"
