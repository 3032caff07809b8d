"""Kueue's Workloads for a job, and how an admission affects the job's pods. Pure.

A Workload requests quota, and its creator manages the pods (https://kueue.sigs.k8s.io/docs/concepts/workload/).
`operator.kueue_workloads` decides what to request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.kubernetes.api import kinds
from outlast.kubernetes.api.kinds import Kind
from outlast.kubernetes.manifests.render_request import Document

GROUP = kinds.WORKLOAD.group
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label with the UID of a Workload's job. Kueue's own tools use the label."""
WORKLOAD = "kueue.x-k8s.io/workload"
"""Annotation with the name of the Workload whose quota a pod uses."""
PODS = "main"

VERSIONS: tuple[tuple[Kind, Kind, Kind], ...] = (
    (kinds.WORKLOAD_V1BETA2, kinds.FLAVOR_V1BETA2, kinds.WORKLOAD_PRIORITY_V1BETA2),
    (kinds.WORKLOAD, kinds.FLAVOR, kinds.WORKLOAD_PRIORITY),
)
"""Workload, ResourceFlavor and WorkloadPriorityClass in the supported versions, newest first."""


@dataclass(frozen=True)
class Priority:
    """A Workload's priority and the class that it comes from. `value` is needed besides the class's name, because Kueue does not
    look it up."""

    value: int
    name: str = ""
    group: str = ""
    """API group of the priority class, which may be a class for pods or Kueue's own."""


def queue_name(job: Mapping[str, Any]) -> str:
    """Return an ElasticJob's Kueue queue, from its label or else from `scheduling`; empty if there is none."""
    label = (job["metadata"].get("labels") or {}).get(QUEUE)
    scheduling = job["spec"].get("scheduling") or {}
    return str(label or (scheduling.get("queue") if scheduling.get("gang") != "volcano" else "") or "")


def priority(job: Mapping[str, Any], classes: Iterable[Mapping[str, Any]]) -> Priority | str:
    """Return a job's priority from the class in its label, the pods' class, or the cluster's default. Return an error message if
    the class is missing."""
    label = (job["metadata"].get("labels") or {}).get(PRIORITY)
    class_name = label or (job["spec"].get("scheduling") or {}).get("priorityClassName")
    kind = kinds.WORKLOAD_PRIORITY.kind if label else kinds.PRIORITY_CLASS.kind
    for each in classes:
        if each["kind"] == kind and (each["metadata"]["name"] == class_name if class_name else each.get("globalDefault")):
            group = GROUP if label else kinds.PRIORITY_CLASS.group
            return Priority(int(each["value"]), each["metadata"]["name"], group)
    return (
        f"there is no {kind} called {class_name}; ask for one, or delete the job and name another" if class_name else Priority(0)
    )


def workload(
    kind: Kind,
    meta: Mapping[str, Any],
    *,
    queue: str,
    template: Mapping[str, Any],
    count: int,
    min_count: int,
    priority: Priority,
) -> Document:
    """Return a Workload for `min_count` to `count` pods of this template."""
    pods: Document = {"name": PODS, "count": count, "template": template}
    if min_count < count:
        pods["minCount"] = min_count
    class_fields: Document = {}
    if priority.name and kind == kinds.WORKLOAD_V1BETA2:
        own = priority.group == GROUP
        class_ = (kinds.WORKLOAD_PRIORITY if own else kinds.PRIORITY_CLASS).kind
        class_fields = {"priorityClassRef": {"group": priority.group, "kind": class_, "name": priority.name}}
    elif priority.name:
        source = "workloadpriorityclass" if priority.group == GROUP else "priorityclass"
        class_fields = {"priorityClassName": priority.name, "priorityClassSource": f"{priority.group}/{source}"}
    fields = {"queueName": queue, "podSets": [pods], "priority": priority.value, **class_fields}
    return kind.document(dict(meta), spec=fields)


def flavors(workload: Mapping[str, Any]) -> set[str]:
    return {flavor for each in _assigned(workload) for flavor in (each.get("flavors") or {}).values()}


def admitted_count(workload: Mapping[str, Any]) -> int:
    requested = workload["spec"]["podSets"][0].get("count", 1)
    return int(next((each["count"] for each in _assigned(workload) if each.get("count") is not None), requested))


def with_admission(pod: Mapping[str, Any], workload: Mapping[str, Any], flavors_: Mapping[str, Mapping[str, Any]]) -> Document:
    """Return the pod with the node labels of the Workload's flavors and the updates that admission checks require."""
    parts = [flavors_[flavor].get("spec") or {} for flavor in sorted(flavors(workload))]
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
