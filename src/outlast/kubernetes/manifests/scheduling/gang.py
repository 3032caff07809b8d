"""Gang scheduling of the workers by the coscheduling plugin or by Volcano.

With `auto`, the operator chooses a scheduler that the cluster has (`choose`); without an operator, there is no gang. Kueue admits
whole jobs by itself; see `labels.queue_label`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from outlast.job import spec
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import labels, resources
from outlast.kubernetes.manifests.render_request import Document, Request

GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label on a gang's pods, for the coscheduling plugin."""
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""Annotation on a gang's pods, for Volcano."""
SCHEDULERS = {"coscheduling": "scheduler-plugins-scheduler", "volcano": "volcano"}
GROUPS = {"volcano": kinds.VOLCANO_GROUP.group, "coscheduling": kinds.POD_GROUP.group}
"""API groups, keyed by the scheduler to which they belong. A cluster that serves a group has the group's scheduler. If it serves
both groups, the first scheduler is chosen."""

SchedulerName = Literal["none", "coscheduling", "volcano"]


@dataclass(frozen=True)
class Gang:
    """A gang's scheduler, and the labels, annotations and objects that the scheduler needs."""

    scheduler: str = ""
    """Name of the scheduler; empty for the cluster's default."""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    documents: list[Document] = field(default_factory=list)


NONE = Gang()


def choose(fields: spec.Spec, groups: Collection[str], *, admitted: bool = False) -> SchedulerName:
    """Return the gang scheduler of a job in a cluster with these API groups. With `auto`, it is `none` for a job that may train
    with one worker, or that Kueue admits as a whole (`admitted`)."""
    requested = fields.scheduling.gang
    if requested != "auto":
        return requested
    if fields.workers.min < 2 or admitted:
        return "none"
    return "volcano" if GROUPS["volcano"] in groups else "coscheduling" if GROUPS["coscheduling"] in groups else "none"


def missing(scheduler: SchedulerName, groups: Collection[str]) -> str:
    """Return a sentence if the cluster lacks the gang's scheduler, otherwise an empty string."""
    group = GROUPS.get(scheduler, "")
    if not group or group in groups:
        return ""
    return f"scheduling.gang is {scheduler}, and the cluster has no PodGroups of {group}; {kinds.INSTALLED_BY[group]}"


def of(request: Request, name: str, scheduler: SchedulerName | None = None) -> Gang:
    """Return the gang of a job with several workers. `name` is its PodGroup's name; `scheduler` defaults to the one in the job
    file."""
    match scheduler or request.spec.scheduling.gang:
        case "coscheduling":  # https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/
            fields = _minimum(request.spec)
            if timeout := request.spec.startup_deadline_seconds:
                fields["scheduleTimeoutSeconds"] = math.ceil(timeout)
            group = kinds.POD_GROUP.document(labels.metadata(request, name), spec=fields)
            return Gang(SCHEDULERS["coscheduling"], {GROUP_LABEL: name}, {}, [group])
        case "volcano":  # https://volcano.sh/en/docs/podgroup/
            queue = {"queue": request.spec.scheduling.queue, "priorityClassName": request.spec.scheduling.priority_class_name}
            fields = {**_minimum(request.spec), **{key: value for key, value in queue.items() if value}}
            group = kinds.VOLCANO_GROUP.document(labels.metadata(request, name), spec=fields)
            return Gang(SCHEDULERS["volcano"], {}, {GROUP_ANNOTATION: name}, [group])
    return NONE


def _minimum(fields: spec.Spec) -> Document:
    minimum: Document = {"minMember": fields.workers.min}
    if quantities := resources.total(fields, fields.workers.min):
        minimum["minResources"] = quantities
    return minimum
