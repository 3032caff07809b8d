"""What `outlast why` has to say: causes, and the words for several workers, quantities and repeated failures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.contract import FailureCause
from outlast.kube import pods as kube_pods
from outlast.manifests.request import Document


@dataclass(frozen=True)
class Cause:
    """One thing that keeps a job from training, or the news that nothing does."""

    rule: str
    """Its name, for programs: `image`, `unschedulable`, `out-of-memory`, ..."""
    what: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    """What the API server, the scheduler, the kubelet or the log said, word for word."""
    remedy: str = ""
    wrong: bool = True
    """False for what is as the user wants it: finished, suspended, training."""


def repeated_failures(same: Sequence[int | None], failures: int, cause: str) -> str:
    """A sentence about failures without progress. `same` are the equal steps of the last ones."""
    how = "hung" if cause == FailureCause.HANG else "failed"
    if len(same) < 2:
        return f"it has failed {failures} times without a new checkpoint"
    more = f" ({failures} failures without a new checkpoint)" if failures > len(same) else ""
    return f"it has {how} {len(same)} times in a row{f' at step {same[0]}' if same[0] else ' before its first step'}{more}"


def workers_text(pods: Iterable[Document]) -> str:
    """`worker 0`, `workers 0 and 2`, or names of pods that have no index."""
    found = list(pods)
    numbers = sorted({number for pod in found if (number := kube_pods.labelled_index(pod)) is not None})
    if not numbers:
        names = sorted(map(kube_pods.name, found))
        return f"pod{'s' * (len(names) > 1)} {joined(names)}"
    return f"worker{'s' * (len(numbers) > 1)} {joined(map(str, numbers))}"


def verb(pods: Sequence[Document], one: str, several: str) -> str:
    """The verb that goes with `whom`."""
    numbers = {kube_pods.labelled_index(pod) for pod in pods} - {None}
    return one if (len(numbers) or len(pods)) == 1 else several


def joined(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`; of more than six the first five."""
    found = list(words)
    if len(found) > 6:
        found = [*found[:5], f"{len(found) - 5} more"]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} {last} {found[-1]}" if found else ""


def grouped(found: Iterable[tuple[str, Document]]) -> dict[str, list[Document]]:
    """Pods by a finding about them."""
    groups: dict[str, list[Document]] = {}
    for key, pod in found:
        groups.setdefault(key, []).append(pod)
    return groups


_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20))


def amount_text(resource: str, amount: float) -> str:
    """`16 GiB` of memory, `4` of all else."""
    if resource.endswith(("memory", "storage")):
        unit, size = next((each for each in _UNITS if amount >= each[1]), ("KiB", 2.0**10))
        return f"{amount / size:.3g} {unit}"
    return f"{amount:.3g}"
