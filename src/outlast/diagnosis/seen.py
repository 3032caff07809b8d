"""What there is to see of a job on a cluster, and how the rules ask about it.

`Seen` holds plain documents of the API server, gathered by `diagnosis.evidence`. Nothing here or in the rules looks anywhere
else. Nothing is assumed to be there: a controller may be older, a list may have been forbidden (then it is empty and named in
`unseen`), and an event may outlive its pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from outlast.contract import Label, Pod
from outlast.kube import dropins
from outlast.kube.kinds import LEGACY_JOB
from outlast.manifests.request import Document

INDEX = "batch.kubernetes.io/job-completion-index"
_VOLCANO_INDEX = "volcano.sh/task-index"
_STATEFULSET_INDEX = "apps.kubernetes.io/pod-index"
CONTAINERS = (Pod.CONTAINER, *(each.container for each in dropins.DROP_INS))
"""What the container with the worker is called, if a pod has several."""


@dataclass(frozen=True)
class Cause:
    """One thing that keeps a job from training, or the news that nothing does."""

    rule: str
    """Its name, for programs: `image`, `unschedulable`, `out-of-memory`, ..."""
    what: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    """What was seen, in the words of whoever said it."""
    remedy: str = ""
    wrong: bool = True
    """False for what is as it was wished: finished, suspended by the user."""


def failing(same: Sequence[int | None], failures: int, reason: str) -> str:
    """That so many failures came without progress. `same` are the steps of the last of them, which are equal."""
    how = "hung" if "hung: " in reason else "failed"
    if len(same) < 2:
        return f"it has failed {failures} times without a new checkpoint"
    more = f" ({failures} failures without a new checkpoint)" if failures > len(same) else ""
    return f"it has {how} {len(same)} times in a row{f' at step {same[0]}' if same[0] else ' before its first step'}{more}"


@dataclass(frozen=True)
class Seen:
    """The documents of one job. Tuples are in no order; what could not be read is empty and in `unseen`."""

    name: str
    namespace: str = "default"
    workload: Document = field(default_factory=dict)
    """The ElasticJob, Job, StatefulSet or Volcano Job; empty when there is none."""
    pods: tuple[Document, ...] = ()
    events: tuple[Document, ...] = ()
    nodes: tuple[Document, ...] = ()
    claims: tuple[Document, ...] = ()
    classes: tuple[Document, ...] = ()
    """StorageClasses."""
    quotas: tuple[Document, ...] = ()
    limits: tuple[Document, ...] = ()
    """LimitRanges."""
    queued: tuple[Document, ...] = ()
    """Workloads of Kueue."""
    queues: tuple[Document, ...] = ()
    """LocalQueues of Kueue, or Queues of Volcano."""
    groups: tuple[Document, ...] = ()
    """PodGroups."""
    secrets: frozenset[str] = frozenset()
    configs: frozenset[str] = frozenset()
    """Names of ConfigMaps."""
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The last lines of pods that failed, by the pod's name."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """What could not be read (`jobs.batch`), and why."""

    @property
    def kind(self) -> str:
        """Of the workload."""
        return str(self.workload.get("kind", ""))

    @property
    def archived(self) -> bool:
        """Whether it is an ElasticJob of `elastic.pytorch.org`."""
        return bool(self.workload.get("apiVersion") == LEGACY_JOB.api_version)

    def about(self, document: Document, *reasons: str) -> list[Document]:
        """The events about a document, the newest last; of these reasons, if any are given."""
        meta = document.get("metadata", {})
        found = [
            event
            for event in self.events
            if event.get("involvedObject", {}).get("name") == meta.get("name")
            and event["involvedObject"].get("kind") == document.get("kind", event["involvedObject"].get("kind"))
            and (not reasons or event.get("reason") in reasons)
        ]
        return sorted(found, key=when)

    def waiting(self) -> list[Document]:
        """Pods that have no node yet."""
        return [pod for pod in self.pods if phase(pod) == "Pending" and not pod["spec"].get("nodeName")]

    def wanted(self) -> int:
        """How many workers there are to be, as far as the workload says."""
        if (drop_in := dropins.of(self.workload)) is not None:
            return drop_in.sizes(self.workload)[1]
        spec = self.workload.get("spec", {})
        match self.kind:
            case "Job" if "tasks" in spec:
                return sum(task.get("replicas", 1) for task in spec["tasks"])
            case "Job":
                return int(spec.get("parallelism", 1))
            case "ElasticJob":
                return int(spec.get("workers", {}).get("replicas", 1))
        return int(spec.get("replicas", 1))


# Events and times


def when(event: Document) -> str:
    """The last time of an event, in RFC 3339, which sorts."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((str(time) for time in times if time), "")


def seconds(time: str | None) -> float | None:
    """Seconds since the epoch of a time that the API server gives."""
    return datetime.fromisoformat(time).timestamp() if time else None


def said(event: Document) -> str:
    """`FailedScheduling (12 times): 0/3 nodes are available`."""
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    often = f" ({count} times)" if count > 1 else ""
    return f"{event.get('reason')}{often}: {str(event.get('message', '')).strip()}"


# Pods


def phase(pod: Document) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str(pod.get("status", {}).get("phase", ""))


def name(document: Document) -> str:
    """Its name."""
    return str(document.get("metadata", {}).get("name", ""))


def index(pod: Document) -> int | None:
    """The index of a worker."""
    labels = {**pod["metadata"].get("annotations", {}), **pod["metadata"].get("labels", {})}
    found = next((labels[key] for key in (Label.WORKER, INDEX, _VOLCANO_INDEX, _STATEFULSET_INDEX) if key in labels), "")
    return int(found) if found.isdecimal() else None


def whom(pods: Iterable[Document]) -> str:
    """`worker 0`, `workers 0 and 2`, or names of pods that have no index."""
    found = list(pods)
    numbers = sorted({number for pod in found if (number := index(pod)) is not None})
    if not numbers:
        names = sorted(map(name, found))
        return f"pod{'s' * (len(names) > 1)} {together(names)}"
    return f"worker{'s' * (len(numbers) > 1)} {together(map(str, numbers))}"


def verb(pods: Sequence[Document], one: str, several: str) -> str:
    """The verb that goes with `whom`."""
    numbers = {index(pod) for pod in pods} - {None}
    return one if (len(numbers) or len(pods)) == 1 else several


def together(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`; of more than six the first five."""
    found = list(words)
    if len(found) > 6:
        found = [*found[:5], f"{len(found) - 5} more"]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} {last} {found[-1]}" if found else ""


def statuses(pod: Document) -> Iterator[Document]:
    """The statuses of a pod's containers, init containers first."""
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def silent(pod: Document) -> bool:
    """Whether its node does not answer: then the node's controller says that it is not ready, and its containers stay as they
    were seen last (kubernetes/pkg/controller/util/node, MarkPodsNotReady)."""
    gated = pod["spec"].get("readinessGates") or pod["metadata"].get("deletionTimestamp")
    contradiction = condition(pod, "Ready", "False") and condition(pod, "ContainersReady", "True")
    return bool(contradiction and not gated) or phase(pod) == "Unknown" or pod.get("status", {}).get("reason") == "NodeLost"


def stuck(pod: Document) -> Iterator[tuple[str, str]]:
    """Reason and message of containers that wait."""
    for status in statuses(pod):
        if held := status.get("state", {}).get("waiting"):
            yield str(held.get("reason", "")), str(held.get("message", ""))


def ended(pod: Document) -> Document | None:
    """How the worker's container ended: now, or before it was started again."""
    found: list[Document] = []
    for status in statuses(pod):
        over = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
        if over and (status.get("name") == Pod.CONTAINER or over.get("exitCode")):
            found.append({**over, "container": status.get("name")})
    return next((each for each in found if each.get("exitCode")), found[-1] if found else None)


WITHOUT_OUTLAST = (
    "install it there (pip install 'outlast[train,store]', with the directory of `outlast` on PATH), or build on Outlast's own "
    "image (docs/guide/kubernetes.md, Images)"
)
"""What to do about an image of torch alone."""
_MISSING = re.compile(
    r"exec: \"(?P<runc>[^\"]+)\": (?:executable file not found|.*no such file or directory)"
    r"|executable file [`'\"](?P<crun>[^`'\"]+)[`'\"] not found"
    r"|finding executable \"(?P<gvisor>[^\"]+)\""
    r"|(?P<other>executable file not found|no such file or directory)"
)


def command_missing(message: str) -> str | None:
    """The command that an image has not, by what runc, crun or gVisor said of a container that could not be started; empty when
    they do not name it; None when it is something else."""
    found = _MISSING.search(message)
    return next((name for name in (found["runc"], found["crun"], found["gvisor"]) if name), "") if found else None


def container(pod: Document, *wanted: str) -> Document:
    """A container of the pod's spec, that of the worker unless another is `wanted`; the first when there is none of that name."""
    containers = [*pod["spec"].get("containers", []), *pod["spec"].get("initContainers", [])]
    named = (each for each in containers if each.get("name") in (wanted or CONTAINERS))
    return next(named, containers[0] if containers else {})


def condition(document: Document, kind: str, status: str = "True") -> Document | None:
    """The condition of this type that has this status."""
    for each in document.get("status", {}).get("conditions") or ():
        if each.get("type") == kind and each.get("status") == status:
            return dict(each)
    return None


def grouped(found: Iterable[tuple[str, Document]]) -> dict[str, list[Document]]:
    """Pods by what was found about them."""
    groups: dict[str, list[Document]] = {}
    for key, pod in found:
        groups.setdefault(key, []).append(pod)
    return groups


# Quantities, https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "n": 1e-9, "u": 1e-6}
_UNITS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}


def quantity(text: Any) -> float:
    """`500m`, `16Gi` as a number."""
    found = re.fullmatch(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)([a-zA-Z]*)", str(text).strip())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * _UNITS[found[2]]


def requested(pod: Document, resource: str) -> float:
    """How much of a resource the pod's containers request together."""
    amounts = [each.get("resources", {}).get("requests", {}).get(resource, 0) for each in pod["spec"].get("containers", [])]
    return sum(map(quantity, amounts))


def readable(resource: str, amount: float) -> str:
    """`16 GiB` of memory, `4` of all else."""
    if resource.endswith(("memory", "storage")):
        unit = next((unit for unit in ("Ti", "Gi", "Mi") if amount >= _UNITS[unit]), "Ki")
        return f"{amount / _UNITS[unit]:.3g} {unit}B"
    return f"{amount:.3g}"
