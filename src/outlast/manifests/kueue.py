"""What the operator asks of Kueue for a job, and what Kueue's answer means for its pods.

Kueue knows quotas, and Workloads that want some of them; whose pods those are is the business of who made the Workload
(https://kueue.sigs.k8s.io/docs/concepts/workload/). Everything here is documents; what is to be asked for when is decided in
`operator.queues`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.kube import kinds
from outlast.kube.kinds import Kind
from outlast.manifests import names
from outlast.manifests.request import Document

GROUP = kinds.WORKLOAD.group
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a job: its queue."""
PRIORITY = "kueue.x-k8s.io/priority-class"
"""Label of a job: its WorkloadPriorityClass."""
JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Workload: the job that it is for. Kueue's own tools look for it."""
WORKLOAD = "kueue.x-k8s.io/workload"
"""Annotation of a pod: the Workload whose quota it uses."""
PODS = "main"
"""The one set of pods of our Workloads."""

VERSIONS: tuple[tuple[Kind, Kind, Kind], ...] = (
    (kinds.WORKLOAD_V1BETA2, kinds.FLAVOR_V1BETA2, kinds.WORKLOAD_PRIORITY_V1BETA2),
    (kinds.WORKLOAD, kinds.FLAVOR, kinds.WORKLOAD_PRIORITY),
)
"""Workloads, ResourceFlavors and WorkloadPriorityClasses in the versions that we speak, the newest first."""


@dataclass(frozen=True)
class Priority:
    """How urgent a Workload is. A name needs a value: Kueue looks up none."""

    value: int
    name: str = ""
    group: str = ""
    """Of the class: Kueue's own, or the one of pods."""


def queue(job: Mapping[str, Any]) -> str:
    """The queue of Kueue that an ElasticJob is to wait in: of its label, else of `scheduling`; empty for none."""
    label = (job["metadata"].get("labels") or {}).get(QUEUE)
    scheduling = job["spec"].get("scheduling") or {}
    return str(label or (scheduling.get("queue") if scheduling.get("gang") != "volcano" else "") or "")


def priority(job: Mapping[str, Any], classes: Iterable[Mapping[str, Any]]) -> Priority | str:
    """The priority of a job, as Kueue finds that of its own: by the label, else by the class of the pods, else the cluster's
    default. A sentence when its class is not there."""
    label = (job["metadata"].get("labels") or {}).get(PRIORITY)
    named = label or (job["spec"].get("scheduling") or {}).get("priorityClassName")
    kind = kinds.WORKLOAD_PRIORITY.kind if label else kinds.PRIORITY_CLASS.kind
    for each in classes:
        if each["kind"] == kind and (each["metadata"]["name"] == named if named else each.get("globalDefault")):
            group = GROUP if label else kinds.PRIORITY_CLASS.group
            return Priority(int(each["value"]), each["metadata"]["name"], group)
    return f"there is no {kind} called {named}; ask for one, or delete the job and name another" if named else Priority(0)


def workload(
    kind: Kind,
    meta: Mapping[str, Any],
    *,
    queue: str,
    template: Mapping[str, Any],
    count: int,
    least: int,
    priority: Priority,
) -> Document:
    """A Workload for `count` pods of this template; fewer are welcome, down to `least`. `meta` is its metadata."""
    pods: Document = {"name": PODS, "count": count, "template": template}
    if least < count:
        pods["minCount"] = least
    named: Document = {}
    if priority.name and kind == kinds.WORKLOAD_V1BETA2:
        own = priority.group == GROUP
        class_ = (kinds.WORKLOAD_PRIORITY if own else kinds.PRIORITY_CLASS).kind
        named = {"priorityClassRef": {"group": priority.group, "kind": class_, "name": priority.name}}
    elif priority.name:
        source = "workloadpriorityclass" if priority.group == GROUP else "priorityclass"
        named = {"priorityClassName": priority.name, "priorityClassSource": f"{priority.group}/{source}"}
    fields = {"queueName": queue, "podSets": [pods], "priority": priority.value, **named}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": dict(meta), "spec": fields}


def name(job: str, uid: str, number: int) -> str:
    """The name of a job's Workload; the next job of this name has others."""
    return names.fit(f"{job}-{uid[:8]}-{number}")


def flavors(workload: Mapping[str, Any]) -> set[str]:
    """The ResourceFlavors that an admitted Workload was assigned."""
    return {flavor for each in _assigned(workload) for flavor in (each.get("flavors") or {}).values()}


def admitted(workload: Mapping[str, Any]) -> int:
    """How many pods it was admitted with."""
    asked = workload["spec"]["podSets"][0].get("count", 1)
    return int(next((each["count"] for each in _assigned(workload) if each.get("count") is not None), asked))


def placed(pod: Mapping[str, Any], workload: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> Document:
    """The pod where its Workload was admitted to: on the nodes of its flavors (`found`, by name), and as admission checks say."""
    parts = [found[flavor].get("spec") or {} for flavor in sorted(flavors(workload))]
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        parts += [update for update in check.get("podSetUpdates") or () if update["name"] == PODS]
    meta, fields = dict(pod["metadata"]), dict(pod["spec"])
    meta["annotations"] = {**(meta.get("annotations") or {}), WORKLOAD: workload["metadata"]["name"]}
    for part in parts:
        for key in ("labels", "annotations"):
            if part.get(key):
                meta[key] = {**(meta.get(key) or {}), **part[key]}
        if selector := {**(part.get("nodeLabels") or {}), **(part.get("nodeSelector") or {})}:
            fields["nodeSelector"] = {**(fields.get("nodeSelector") or {}), **selector}
        if new := [each for each in part.get("tolerations") or () if each not in (fields.get("tolerations") or ())]:
            fields["tolerations"] = [*(fields.get("tolerations") or ()), *new]
    return {**pod, "metadata": meta, "spec": fields}


def _assigned(workload: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(((workload.get("status") or {}).get("admission") or {}).get("podSetAssignments") or ())
