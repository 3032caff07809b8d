"""The view of a job on a cluster, or of a place for jobs, on which the rules of `outlast why` and `outlast doctor` are based.

A `Snapshot` holds plain documents of the API server, read by `diagnosis.gather`; the rules read nothing else. Any document or
field may be missing, since a controller may be older. A list that is forbidden is empty, and its kind is in `unseen`. An event
may outlive its pod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outlast.base.errors import ClusterError
from outlast.kubernetes.api import pod_status, workload_template
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.diagnosis.finding import Finding, workers
from outlast.kubernetes.manifests.render_request import Document


@dataclass(frozen=True)
class Right:
    """A right that one of our commands needs."""

    verb: str
    kind: Kind
    subresource: str = ""
    needed: bool = True
    """Whether `submit` needs the right."""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}" + (f"/{self.subresource}" if self.subresource else "")


@dataclass(frozen=True)
class Snapshot:
    """The documents of one job or one namespace, in no particular order; kinds that could not be read are empty and listed in
    `unseen`."""

    name: str = ""
    namespace: str = "default"
    nodes: tuple[Document, ...] = ()
    classes: tuple[Document, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Kinds that could not be read (`jobs.batch`), and why."""

    # For a job

    workload: Document = field(default_factory=dict)
    """The ElasticJob, Job or StatefulSet; empty if there is none."""
    pods: tuple[Document, ...] = ()
    events: tuple[Document, ...] = ()
    claims: tuple[Document, ...] = ()
    queued: tuple[Document, ...] = ()
    """Workloads of Kueue."""
    queues: tuple[Document, ...] = ()
    """LocalQueues of Kueue."""
    groups: tuple[Document, ...] = ()
    secrets: frozenset[str] = frozenset()
    configs: frozenset[str] = frozenset()
    """Names of ConfigMaps."""
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The last lines of logs, by the pod's name."""

    # For a place for jobs

    version: str = ""
    """The version of the API server."""
    home: Document | None = None
    """The namespace itself."""
    quotas: tuple[Document, ...] = ()
    served: frozenset[Kind] = frozenset()
    """Kinds of optional add-ons that are installed, among the kinds that Outlast can use."""
    lacking: tuple[Right, ...] = ()
    """Rights that our commands need but that we do not have."""
    operator: Document | None = None
    """The operator's Deployment."""
    rivals: tuple[str, ...] = ()
    """Running Deployments of controllers that the operator replaces: `namespace/name`."""
    trial: ClusterError | None = None
    """The API server's refusal of a small worker in a dry run; None if it would be admitted."""

    @property
    def kind(self) -> str:
        return str(self.workload.get("kind", ""))

    @property
    def agentless(self) -> bool:
        """Whether the workload's pods run without Outlast's agent."""
        return workload_template.agentless(self.workload)

    def about(self, document: Document, *reasons: str) -> list[Document]:
        """The events about a document, the newest last; if `reasons` are given, only events with one of them."""
        meta = document.get("metadata", {})
        found = [
            event
            for event in self.events
            if event.get("involvedObject", {}).get("name") == meta.get("name")
            and event["involvedObject"].get("kind") == document.get("kind", event["involvedObject"].get("kind"))
            and (not reasons or event.get("reason") in reasons)
        ]
        return sorted(found, key=event_time)

    def of_worker(self, pod: Document) -> list[Document]:
        """All pods of this pod's worker; empty for a pod without an index."""
        index = pod_status.labelled_index(pod)
        return [other for other in self.pods if pod_status.labelled_index(other) == index is not None]

    def untaken(self) -> bool:
        """Whether the workload is an ElasticJob on which no operator has acted."""
        return self.kind == "ElasticJob" and not self.workload.get("status") and not self.pods

    def wanted(self) -> int:
        """The number of workers that the workload requests."""
        return workload_template.replicas(self.workload)


Rule = Callable[[Snapshot, float], Iterator[Finding]]
"""A function that yields the findings on a snapshot, given the time in seconds since the epoch."""


def of_pods(rule: Callable[[Snapshot, Document], Iterator[Finding]]) -> Rule:
    """A rule about all pods, made from a rule about a single pod; the sentences of `rule` begin with a verb. Pods with the same
    sentence share one finding, which has the evidence of the first pod."""

    @functools.wraps(rule)
    def of_all(snapshot: Snapshot, _: float) -> Iterator[Finding]:
        by_sentence: dict[tuple[str, str], tuple[Finding, list[Document]]] = {}
        for pod in snapshot.pods:
            for each in rule(snapshot, pod):
                by_sentence.setdefault((each.what, each.remedy), (each, []))[1].append(pod)
        for each, pods in by_sentence.values():
            verb, _blank, rest = each.what.partition(" ")
            yield replace(each, what=f"{workers(pods, verb)} {rest}")

    return of_all


def event_time(event: Document) -> str:
    """The time of an event's last occurrence, in RFC 3339, so that texts sort by time."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((str(time) for time in times if time), "")


def event_text(event: Document) -> str:
    """An event as text: `FailedScheduling (12 times): 0/3 nodes are available`."""
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    often = f" ({count} times)" if count > 1 else ""
    return f"{event.get('reason')}{often}: {str(event.get('message', '')).strip()}"
