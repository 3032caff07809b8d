"""Who starts the workers all or none: nobody, the coscheduling plugin, or Volcano.

`of` says what pods must carry for it, and which PodGroup there must be. `auto` is nobody: only who sees the cluster can know
better. Kueue admits whole Jobs by itself and needs but its label, see `labels.kueue`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outlast import spec
from outlast.manifests import labels, resources
from outlast.manifests.request import Document, Request

GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
"""Of pods that the coscheduling plugin starts together."""
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""Of pods that Volcano starts together."""
SCHEDULERS = {"coscheduling": "scheduler-plugins-scheduler", "volcano": "volcano"}
"""Who schedules a gang."""


@dataclass(frozen=True)
class Gang:
    """What all-or-none asks of the pods."""

    scheduler: str = ""
    """Name of the scheduler. Default: the cluster's."""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    documents: list[Document] = field(default_factory=list)


NONE = Gang()


def of(request: Request, name: str) -> Gang:
    """The gang of a job with several workers; its PodGroup is called `name`."""
    match request.spec.scheduling.gang:
        case "coscheduling":  # https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/
            group: Document = {
                "apiVersion": "scheduling.x-k8s.io/v1alpha1",
                "kind": "PodGroup",
                "metadata": labels.metadata(request, name),
                "spec": _least(request.spec),
            }
            if timeout := request.spec.startup_deadline_seconds:
                group["spec"]["scheduleTimeoutSeconds"] = math.ceil(timeout)
            return Gang(SCHEDULERS["coscheduling"], {GROUP_LABEL: name}, {}, [group])
        case "volcano":  # https://volcano.sh/en/docs/podgroup/
            group = {
                "apiVersion": "scheduling.volcano.sh/v1beta1",
                "kind": "PodGroup",
                "metadata": labels.metadata(request, name),
                "spec": {**_least(request.spec), **volcano_queue(request.spec)},
            }
            return Gang(SCHEDULERS["volcano"], {}, {GROUP_ANNOTATION: name}, [group])
    return NONE


def volcano_queue(fields: spec.Spec) -> dict[str, str]:
    """Volcano's queue and priority."""
    found = {"queue": fields.scheduling.queue, "priorityClassName": fields.scheduling.priority_class_name}
    return {key: value for key, value in found.items() if value}


def _least(fields: spec.Spec) -> Document:
    found: Document = {"minMember": fields.workers.min}
    if together := resources.times(fields.resources, fields.workers.min):
        found["minResources"] = together
    return found
