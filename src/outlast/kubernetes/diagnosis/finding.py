"""The findings of `outlast why` and `outlast doctor`, and functions that put lists and quantities into words. Pure."""

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
    """Name for programs: `image`, `unschedulable`, `out-of-memory`, ..."""
    what: str
    """The finding in one sentence."""
    remedy: str = ""
    """The remedy; empty if there is nothing to do."""
    evidence: tuple[str, ...] = ()
    """Verbatim messages from the API server, the scheduler or the kubelet, or lines from the log."""
    outcome: Outcome = "fail"
    """`fail`: the finding keeps jobs from training; `warn`: it may keep them, or has a cost; `pass`: there is no problem."""

    @property
    def wrong(self) -> bool:
        """Whether the finding keeps jobs from training."""
        return self.outcome == "fail"


def passed(name: str, what: str, remedy: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    """A finding without a problem: a job that is finished, suspended or training, or a check that passes."""
    return Finding(name, what, remedy, evidence, "pass")


def warned(name: str, what: str, remedy: str) -> Finding:
    """A finding about a problem that does not keep jobs from training."""
    return Finding(name, what, remedy, outcome="warn")


# Words


def repeated_failures(same: Sequence[int | None], failures: int, cause: str) -> str:
    """A sentence about failures without progress. `same`: the steps of the last failures, which are all equal."""
    how = "hung" if cause == FailureCause.HANG else "failed"
    if len(same) < 2:
        return f"it has failed {failures} times without a new checkpoint"
    more = f" ({failures} failures without a new checkpoint)" if failures > len(same) else ""
    return f"it has {how} {len(same)} times in a row{f' at step {same[0]}' if same[0] else ' before its first step'}{more}"


_SEVERAL = {"is": "are", "was": "were"}


def workers(pods: Iterable[Document], verb: str = "") -> str:
    """`worker 0 waits`, `workers 0 and 2 wait`, or the names of pods without an index; `verb` is given in the singular."""
    found = list(pods)
    numbers = sorted({number for pod in found if (number := pod_status.labelled_index(pod)) is not None})
    names = list(map(str, numbers)) or sorted(map(pod_status.name, found))
    several = len(names) > 1
    whom = f"{'worker' if numbers else 'pod'}{'s' * several} {joined(names)}"
    return " ".join(filter(None, (whom, _SEVERAL.get(verb, verb.removesuffix("s")) if several else verb)))


def joined(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`; for more than six words, the first five and the number of the rest."""
    found = list(words)
    if len(found) > 6:
        found = [*found[:5], f"{len(found) - 5} more"]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} {last} {found[-1]}" if found else ""


def grouped(pairs: Iterable[tuple[str, Document]]) -> dict[str, list[Document]]:
    """Pods grouped by the first item of each pair."""
    groups: dict[str, list[Document]] = {}
    for key, pod in pairs:
        groups.setdefault(key, []).append(pod)
    return groups


def amount_text(resource: str, amount: float) -> str:
    """An amount of a resource in words: `16 GiB` of memory, `4` of other resources."""
    return units.human_bytes(amount) if resource.endswith(("memory", "storage")) else f"{amount:.3g}"
