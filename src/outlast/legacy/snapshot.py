"""A snapshot of an ElasticJob of `elastic.pytorch.org` and its pods: failures, missing pods, conflicts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outlast import contract
from outlast.kube import pods as podwords
from outlast.kube.ownership import owned_by
from outlast.legacy import pods as legacy
from outlast.operator.leaving import Leave
from outlast.operator.plan import Deletion, Document
from outlast.rendezvous import failures
from outlast.rendezvous.world import until

RETRYABLE = (130, 137, 138, 143)
"""Exit codes after which `ExitCode` restarts a worker; all others are permanent."""
OVERDUE_S = 60.0
"""Timeout of a deletion after the pod's grace period: then its node does not answer."""
CAUSE_S = failures.PLAIN_PODS.cause
"""How long a failure that may be due to the loss of worker 0's store waits for the end of worker 0. Kubelets report ends within
about a second, with times in whole seconds on slightly different clocks; the rest is margin."""
_NODE_STARTED = ("Unknown", "ContainerStatusUnknown")
"""Reasons that containerd and the kubelet give for containers that did not survive a restart of their node."""


@dataclass(frozen=True)
class Failure:
    """A failed pod."""

    index: int
    pod: Document
    code: int | None
    """None: it was lost, or failed before it started."""
    disrupted: bool
    sentence: str
    time: float

    @property
    def permanent(self) -> bool:
        """Whether `ExitCode` does not restart it. Without an exit code a restart may succeed."""
        return self.code is not None and self.code not in RETRYABLE


@dataclass(frozen=True)
class Snapshot:
    """A job and its pods at one time."""

    job: Mapping[str, Any]
    pods: Sequence[Document]
    now: float
    lost: frozenset[str]
    leaving: Mapping[str, Leave] = field(default_factory=dict)
    """By the uid of the pod."""

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def status(self) -> Document:
        found: Document = self.job.get("status") or {}
        return found

    @property
    def spec(self) -> Document:
        found: Document = self.job["spec"]
        return found

    @cached_property
    def own(self) -> dict[int, Document]:
        """The job's pods by index, which is part of their name and so unique."""
        return {
            index: pod for pod in self.pods if (index := podwords.labelled_index(pod)) is not None and owned_by(pod, self.job)
        }

    @cached_property
    def strangers(self) -> dict[int, Document]:
        """Pods that do not belong to the job and have the name of one of its workers, by index."""
        names = {contract.worker_name(self.name, index): index for index in range(self.wanted)}
        named = [(names.get(pod["metadata"]["name"]), pod) for pod in self.pods if not owned_by(pod, self.job)]
        return {index: pod for index, pod in named if index is not None}

    @cached_property
    def wanted(self) -> int:
        return legacy.sizes(self.job)[1]

    @cached_property
    def ended(self) -> str | None:
        """`Failed` or `Succeeded`, once the job has ended."""
        true = [each["type"] for each in self.status.get("conditions") or () if each["status"] == "True"]
        return next((each for each in ("Failed", "Succeeded") if each in true), None)

    @property
    def ended_at(self) -> str:
        """When it ended. Of failed jobs the archived controller wrote that into the condition only."""
        told = [each.get("lastTransitionTime") for each in self.status.get("conditions") or () if each["type"] == self.ended]
        times = [self.status.get("completionTime"), *told, self.job["metadata"]["creationTimestamp"]]
        return next(str(each) for each in times if each)

    def phase(self, pod: Document) -> str:
        """The phase of its torchrun, which differs from the pod's when sidecars fail or run on."""
        found = podwords.phase(pod)
        if pod["spec"].get("restartPolicy") != "Never" or podwords.leaves(pod):
            return found
        code = next(
            (_end_of(each).get("exitCode") for each in _containers(pod) if each["name"] == legacy.torchrun(self.job)), None
        )
        if code is None or (code == 0 and _disruption(pod) is not None):
            return found
        return "Failed" if code else "Succeeded"

    def over(self, pod: Document) -> bool:
        """Whether its torchrun has ended for good."""
        return self.phase(pod) in ("Succeeded", "Failed")

    @cached_property
    def succeeded(self) -> dict[int, Document]:
        return {index: pod for index, pod in self.own.items() if self.phase(pod) == "Succeeded"}

    @cached_property
    def failures(self) -> list[Failure]:
        """Failed pods of wanted workers. A worker that started after another one had finished found the training closed: that is
        no failure."""
        found = [_failure(index, pod, self.job) for index, pod in sorted(self.own.items()) if self.phase(pod) == "Failed"]
        found = [
            each for each in found if each.index < self.wanted and not podwords.leaves(each.pod) and not self._late(each.pod)
        ]
        return [self._explained(each) for each in found]

    @cached_property
    def held(self) -> set[int]:
        """Workers whose failure may be secondary to the loss of worker 0, which another kubelet may report later."""
        host = self.own.get(0)
        if host is None or self.over(host):
            return set()
        found = [each for each in self.failures if self._may_echo(each) and not each.disrupted]
        return {each.index for each in found if until(each.time, CAUSE_S, self.now) is not None}

    def _may_echo(self, failure: Failure) -> bool:
        """Whether it ended as torchrun does when the store of worker 0 is gone: with exit code 1, whatever the script."""
        return failure.index > 0 and _terminated(failure.pod, self.job).get("exitCode") == 1

    def _host_lost(self, failure: Failure) -> bool:
        """Whether the worker 0 that hosted its rendezvous is gone."""
        if not self._may_echo(failure):
            return False
        host = self.own.get(0)
        if host is None or podwords.leaves(host):
            return True
        if self.phase(host) == "Failed":
            how = _failure(0, host, self.job)
            return how.disrupted or not how.permanent
        began = _terminated(failure.pod, self.job).get("startedAt") or failure.pod["metadata"]["creationTimestamp"]
        return podwords.seconds(host["metadata"]["creationTimestamp"]) > podwords.seconds(began)

    def _explained(self, failure: Failure) -> Failure:
        if not self._host_lost(failure):
            return failure
        sentence = f"{failure.sentence} since worker 0, where workers meet, was lost"
        return dataclasses.replace(failure, disrupted=True, sentence=sentence)

    @cached_property
    def late(self) -> list[Document]:
        """Pods that started after others had finished: nothing is left to train."""
        return [pod for pod in self.own.values() if self.succeeded and not self.over(pod) and self._late(pod)]

    def _late(self, pod: Document) -> bool:
        ends = [_terminated(each, self.job).get("finishedAt") for each in self.succeeded.values()]
        state = _container(pod, self.job).get("state") or {}
        began = (state.get("terminated") or state.get("running") or {}).get("startedAt")
        if not began:
            return podwords.phase(pod) == "Pending"
        return any(end and podwords.seconds(end) <= podwords.seconds(began) for end in ends)

    @cached_property
    def missing(self) -> list[int]:
        """Workers to be created."""
        if self.succeeded or legacy.nameless(self.job):
            return []
        return [index for index in range(self.wanted) if index not in self.own and index not in self.strangers]

    @cached_property
    def stale(self) -> dict[int, Document]:
        """Pods started with a different --nnodes than the job asks for now; and, if a worker is to be created, those of the
        archived controller, whose rendezvous is elsewhere."""
        said = legacy.nnodes(self.job)
        told = {index: nnodes_of(pod) for index, pod in self.own.items() if not self.over(pod)}
        return {index: self.own[index] for index, each in told.items() if (self.missing if each is None else each != said)}

    # Restarts

    @cached_property
    def counted(self) -> list[Failure]:
        """Failures that count against backoffLimit."""
        return [each for each in self.failures if not each.disrupted and each.index not in self.held]

    @cached_property
    def new(self) -> list[Failure]:
        """Those not counted yet."""
        judged = self.status.get("judged") or ()
        return [each for each in self.counted if each.pod["metadata"]["uid"] not in judged]

    @cached_property
    def restarts(self) -> int:
        return int(self.status.get("restarts") or 0) + len(self.new) + self.again

    @cached_property
    def started(self) -> dict[str, int]:
        """Container restarts by kubelets, by the uid of the pod."""
        counts = {pod["metadata"]["uid"]: int(_container(pod, self.job).get("restartCount") or 0) for pod in self.own.values()}
        told = self.status.get("started") or {}
        return {uid: most for uid, count in counts.items() if (most := max(count, int(told.get(uid, 0))))}

    @cached_property
    def again(self) -> int:
        """Container restarts that count and are not counted yet."""
        told = self.status.get("started") or {}
        more = {uid: count - int(told.get(uid, 0)) for uid, count in self.started.items()}
        return sum(more.get(pod["metadata"]["uid"], 0) for i, pod in self.own.items() if not self._interrupted(i, pod))

    def _interrupted(self, index: int, pod: Document) -> bool:
        """Whether its container restarted because its node did, or because worker 0 was lost: all others end with exit code 1
        then. A failure of its own with that code is not counted either, as torchrun has retried it often."""
        ended = (_container(pod, self.job).get("lastState") or {}).get("terminated") or {}
        return (index > 0 and ended.get("exitCode") == 1) or ended.get("reason") in _NODE_STARTED

    # Nodes that do not answer

    def stuck(self) -> Iterator[Deletion]:
        for pod in self.own.values():
            node = pod["spec"].get("nodeName", "")
            if node in self.lost and not self.over(pod):
                yield deletion(pod, f"its node {node} is lost", grace_s=0)
            elif (due := _due(pod)) is not None and due <= self.now:
                yield deletion(pod, f"its node {node or '(none)'} has not ended it in time", grace_s=0)

    def next_stuck(self) -> float | None:
        return min((due for pod in self.own.values() if (due := _due(pod)) is not None and due > self.now), default=None)


def _failure(index: int, pod: Document, job: Mapping[str, Any]) -> Failure:
    status, ended, before = pod.get("status") or {}, _terminated(pod, job), _before(pod)
    why, disruption = status.get("reason") or "", _disruption(pod)
    code = int(ended["exitCode"]) if ended else None
    if disruption is not None:
        sentence = f"was lost ({disruption})" if disruption else "was lost"
    elif ended.get("reason") == "OOMKilled":
        sentence = podwords.out_of_memory(pod, _container(pod, job)["name"])
    elif ended:
        sentence = f"failed with exit code {code}"
    elif before:
        ended = before["state"]["terminated"]
        code = int(ended["exitCode"])
        sentence = f"failed with exit code {code} in its init container {before['name']}"
    else:
        sentence = f"failed before it began{f' ({why})' if why else ''}"
    times = [each.get("lastTransitionTime") for each in podwords.conditions(pod)]
    when = [podwords.seconds(each) for each in [ended.get("finishedAt"), *times] if each]
    return Failure(index, pod, code, disruption is not None, sentence, when[0] if when else 0.0)


def _disruption(pod: Document) -> str | None:
    """Why a pod was disrupted from outside, empty if unknown; None if it was not."""
    why = (pod.get("status") or {}).get("reason") or ""
    if (target := podwords.disruption(pod)) is not None:
        return target.get("reason") or why
    return why if why == "Evicted" or podwords.refused(why) else None


def _before(pod: Document) -> Document:
    """The status of the first init container that failed. Sidecars among them end when another one fails."""
    sidecars = {each["name"] for each in pod["spec"].get("initContainers") or () if each.get("restartPolicy") == "Always"}
    found = [each for each in (pod.get("status") or {}).get("initContainerStatuses") or () if each["name"] not in sidecars]
    first: Document = next((each for each in found if _end_of(each).get("exitCode")), {})
    return first


def _container(pod: Document, job: Mapping[str, Any]) -> Document:
    """The status of the container with torchrun, else of the one that failed first."""
    found = _containers(pod)
    named = [each for each in found if each["name"] == legacy.torchrun(job)]
    failed = [each for each in found if _end_of(each).get("exitCode")]
    first: Document = next(iter([*named, *failed, *found]), {})
    return first


def _terminated(pod: Document, job: Mapping[str, Any]) -> Document:
    return _end_of(_container(pod, job))


def _containers(pod: Document) -> Sequence[Document]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _end_of(container: Document) -> Document:
    """Termination state of a container; empty while it has not ended."""
    found: Document = (container.get("state") or {}).get("terminated") or {}
    return found


def nnodes_of(pod: Document) -> str | None:
    """--nnodes of its torchrun; None if the archived controller has created it."""
    found: str | None = (pod["metadata"].get("annotations") or {}).get(legacy.NNODES)
    return found


def _due(pod: Document) -> float | None:
    """When a pod that is being deleted is overdue; its deletionTimestamp is when its grace ends."""
    return podwords.seconds(pod["metadata"]["deletionTimestamp"]) + OVERDUE_S if podwords.leaves(pod) else None


def deletion(pod: Document, reason: str, *, grace_s: int | None = None) -> Deletion:
    return Deletion(pod["metadata"]["name"], pod["metadata"]["uid"], reason, grace_s)
