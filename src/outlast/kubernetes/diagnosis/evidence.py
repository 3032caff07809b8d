"""The snapshot of a job or a namespace, on which the rules of `outlast why` and `outlast doctor` are based.

`diagnosis.gather_evidence` reads it. Any document or field may be missing, and an event may outlive its pod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outlast.base.errors import ClusterError
from outlast.kubernetes.api import pod_status, workload_template
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.diagnosis.finding import Finding, workers
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.manifests.render_request import Document


@dataclass(frozen=True)
class Right:
    """A right that an Outlast command requires."""

    verb: str
    kind: Kind
    subresource: str = ""
    required: bool = True
    """Whether `submit` requires the right."""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}" + (f"/{self.subresource}" if self.subresource else "")


@dataclass(frozen=True)
class Snapshot:
    """The Kubernetes objects of one job or namespace, in no particular order."""

    name: str = ""
    namespace: str = "default"
    nodes: tuple[Document, ...] = ()
    storage_classes: tuple[Document, ...] = ()
    forbidden: Mapping[str, str] = field(default_factory=dict)
    """The reasons why kinds could not be read, keyed by kind, such as `jobs.batch`. Objects of these kinds are missing."""

    # For a job

    workload: Document = field(default_factory=dict)
    """An ElasticJob, Job or StatefulSet; empty if none exists."""
    pods: tuple[Document, ...] = ()
    events: tuple[Document, ...] = ()
    claims: tuple[Document, ...] = ()
    kueue_workloads: tuple[Document, ...] = ()
    queues: tuple[Document, ...] = ()
    """Kueue's LocalQueues."""
    pod_groups: tuple[Document, ...] = ()
    secrets: frozenset[str] = frozenset()
    config_maps: frozenset[str] = frozenset()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The last lines of each pod's log, keyed by pod name."""

    # For a namespace

    version: str = ""
    defined: bool = False
    """Whether ElasticJobs are served."""
    missing_rights: tuple[Right, ...] = ()
    operator: Document | None = None
    """The operator's Deployment."""
    conflicting_controllers: tuple[str, ...] = ()
    """Running Deployments of controllers that the operator replaces, as `namespace/name`."""
    dry_run_error: ClusterError | None = None
    """The API server's refusal of a small worker; None if it would admit one."""

    @property
    def kind(self) -> str:
        return str(self.workload.get("kind", ""))

    def events_about(self, document: Document, *reasons: str) -> list[Document]:
        """Return the events about an object, newest last. With `reasons`, return only events that have one of these reasons."""
        meta = document.get("metadata", {})
        events = [
            event
            for event in self.events
            if event.get("involvedObject", {}).get("name") == meta.get("name")
            and event["involvedObject"].get("kind") == document.get("kind", event["involvedObject"].get("kind"))
            and (not reasons or event.get("reason") in reasons)
        ]
        return sorted(events, key=event_time)

    def pods_of_worker(self, pod: Document) -> list[Document]:
        """Return all pods of this pod's worker; empty for a pod without an index."""
        index = pod_status.labelled_index(pod)
        return [other for other in self.pods if pod_status.labelled_index(other) == index is not None]

    def unreconciled(self) -> bool:
        """Return whether the workload is an ElasticJob for which the operator still has to do something."""
        status, suspended = self.workload.get("status") or {}, (self.workload.get("spec") or {}).get("suspend")
        late = not status or self.changed() or (self.missing() > 0 and not suspended)
        return self.kind == "ElasticJob" and late and job_status.final_state(self.workload) is None

    def changed(self) -> bool:
        """Return whether the workload has been changed since its controller last wrote its status."""
        generation = self.workload.get("metadata", {}).get("generation", 0)
        return bool((self.workload.get("status") or {}).get("observedGeneration", generation) < generation)

    def missing(self) -> int:
        """Return how many workers have no pod, or only one that has failed."""
        return self.replicas() - sum(pod_status.phase(pod) in ("Pending", "Running", "Succeeded") for pod in self.pods)

    def replicas(self) -> int:
        return workload_template.replicas(self.workload)


Rule = Callable[[Snapshot, float], Iterator[Finding]]
"""A rule yields findings about a snapshot. Its second argument is the time in seconds since the epoch."""


def per_pod(rule: Callable[[Snapshot, Document], Iterator[Finding]]) -> Rule:
    """Turn a rule about one pod into a rule about all pods. The sentences of `rule` begin with a verb, and the names of the pods'
    workers are put before the verb. Pods with equal findings share one finding."""

    @functools.wraps(rule)
    def for_all_pods(snapshot: Snapshot, _: float) -> Iterator[Finding]:
        by_sentence: dict[tuple[str, str], tuple[Finding, list[Document]]] = {}
        for pod in snapshot.pods:
            for each in rule(snapshot, pod):
                by_sentence.setdefault((each.what, each.remedy), (each, []))[1].append(pod)
        for each, pods in by_sentence.values():
            verb, _blank, rest = each.what.partition(" ")
            yield replace(each, what=f"{workers(pods, verb)} {rest}")

    return for_all_pods


def event_time(event: Document) -> str:
    """Return the RFC 3339 time of an event's last occurrence."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((str(time) for time in times if time), "")


def event_text(event: Document) -> str:
    """Format an event, such as `FailedScheduling (12 times): 0/3 nodes are available`."""
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    often = f" ({count} times)" if count > 1 else ""
    return f"{event.get('reason')}{often}: {str(event.get('message', '')).strip()}"
