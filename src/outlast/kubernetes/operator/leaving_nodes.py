"""Detects nodes that are about to be terminated, and computes the deadlines and grace periods of their pods. Pure.

The deadline is in an annotation (`contract.Annotation.LEAVING_AT`) on the node or, if the process that announces it has no access
to nodes, on a pod. Without the annotation, the notice's usual period counts from when the operator first saw the notice; see
docs/decisions/0045.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.job.contract import LEAVING, Annotation, LeavingKind
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.manifests.scheduling.placement import SPOT

Document = Mapping[str, Any]

SPOT_NOTICE_S = 120.0
"""Time from AWS's interruption notice until the machine ends.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
_SPOT_ITN = "aws-node-termination-handler/spot-itn"
"""A taint that only spot nodes get, whatever their labels."""
TAINTS: Mapping[str, float | None] = {
    LEAVING: None,  # its value is the kind; docs/guide/spot.md
    # https://github.com/aws/aws-node-termination-handler/blob/main/pkg/node/node.go
    _SPOT_ITN: SPOT_NOTICE_S,
    "aws-node-termination-handler/scheduled-maintenance": None,
    "aws-node-termination-handler/asg-lifecycle-termination": None,
    "aws-node-termination-handler/rebalance-recommendation": None,
    "karpenter.sh/disrupted": SPOT_NOTICE_S,  # https://karpenter.sh/docs/concepts/disruption/
    "karpenter.sh/disruption": SPOT_NOTICE_S,  # https://karpenter.sh/v0.37/concepts/disruption/
    # Kubelets leave ordinary pods 15 of the 30 s: https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    "cloud.google.com/impending-node-termination": 15.0,
    # At least 30 s, by Azure's scheduled events: https://learn.microsoft.com/en-us/azure/aks/node-auto-drain
    "remediator.kubernetes.azure.com/unschedulable": 30.0,
    "remediator.aks.microsoft.com/unschedulable": 30.0,
    # https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
    "ToBeDeletedByClusterAutoscaler": None,
    # https://kubernetes.io/docs/reference/labels-annotations-taints/#node-kubernetes-io-out-of-service
    "node.kubernetes.io/out-of-service": None,
}
"""Time from each notice until a spot node is gone, in seconds; None if the pod's own grace period ends first, as it does on other
nodes: there, the same notice announces a planned change."""
CONDITIONS = {"VMEventScheduled": 30.0}  # https://learn.microsoft.com/en-us/azure/aks/node-problem-detector
"""The same for node conditions that count as notices while they are True and the node is cordoned: a node that accepts pods is
not leaving."""
TAINTED_AT = "tainted"
"""Key under which the operator stores when it first saw a node's notice, by its own clock."""
RESERVED_S = 2.0
"""Time reserved for a deletion to reach the kubelet and end the pod."""


@dataclass(frozen=True)
class Departure:
    """Why a worker has to leave, and by when."""

    cause: str
    """The key of the taint or annotation, or the condition's type; for the taint `LEAVING`, also its value."""
    deadline: float | None = None
    """Seconds since the epoch; None if the pod's own grace period ends first."""
    reason: str = ""

    def sentence(self, node: str) -> str:
        """Return a phrase for the worker's log that names the node and the cause."""
        return f"node {node} ({self.cause}{f', {self.reason}' if self.reason else ''})"

    def grace_s(self, pod: Document, now: float) -> int | None:
        """Return the grace period for deleting a pod, in seconds; None if the pod's own grace period ends before the deadline. It
        is at least 1, because a deletion with a grace period of 0 does not wait for the node."""
        if self.deadline is None:
            return None
        left_s = max(1, math.floor(self.deadline - now - RESERVED_S))
        own_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        return left_s if left_s < own_s else None


def node_departure(node: Document | None) -> Departure | None:
    """Return why and by when a node's workers have to leave, or None if the node stays."""
    notices = _notices(node or {})
    if node is None or not notices:
        return None
    labels = node["metadata"].get("labels") or {}
    annotations = node["metadata"].get("annotations") or {}
    spot = any(labels.get(name) == value for name, value in SPOT.items())
    kind = notices.get(LEAVING, LeavingKind.UNKNOWN)
    seen, deadline = node.get(TAINTED_AT), _deadline(annotations)
    if deadline is not None and kind is LeavingKind.MAINTENANCE and seen is not None and deadline <= seen:
        deadline = None  # the maintenance began before we saw the notice, and may last for hours: there is time to save
    if deadline is None and seen is not None:
        periods = [_notice_period_s(name, each, spot=spot) for name, each in notices.items()]
        deadline = min((seen + each for each in periods if each is not None), default=None)
    first = LEAVING if LEAVING in notices else next(iter(notices))
    return Departure(f"{first}={kind}" if kind else first, deadline, _reason(annotations))


def _notices(node: Document) -> dict[str, LeavingKind]:
    """Return the notices among a node's taints and conditions. Only the value of our own taint names a kind."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    taints = {each["key"]: each.get("value") or "" for each in spec.get("taints") or () if each.get("key") in TAINTS}
    notices = {key: LeavingKind(value) if key == LEAVING else LeavingKind.UNKNOWN for key, value in taints.items()}
    true = [each for each in status.get("conditions") or () if each.get("status") == "True"]
    # A freeze lasts only seconds.
    types = [each["type"] for each in true if "freeze" not in f"{each.get('reason')} {each.get('message')}".lower()]
    return notices | ({each: LeavingKind.UNKNOWN for each in types if each in CONDITIONS} if spec.get("unschedulable") else {})


def pod_departure(pod: Document) -> Departure | None:
    """Return why and by when a pod's worker has to leave even if its node stays, or None if it does not have to."""
    annotations = pod["metadata"].get("annotations") or {}
    if (deadline := _deadline(annotations)) is None:
        return None
    return Departure(Annotation.LEAVING_AT, deadline, _reason(annotations))


def earliest(*departures: Departure | None) -> Departure | None:
    """Return the departure with the earliest deadline; None if there are no departures. A departure without a deadline counts as
    the latest."""
    existing = [each for each in departures if each is not None]
    return min(existing, key=lambda each: math.inf if each.deadline is None else each.deadline, default=None)


def _notice_period_s(name: str, kind: LeavingKind, *, spot: bool) -> float | None:
    if kind is LeavingKind.SPOT or name == _SPOT_ITN:
        return SPOT_NOTICE_S
    return {**TAINTS, **CONDITIONS}[name] if spot else None


def _deadline(annotations: Mapping[str, str]) -> float | None:
    try:
        return pod_status.timestamp(annotations.get(Annotation.LEAVING_AT)) or None
    except (ValueError, TypeError, OverflowError):
        return None


def _reason(annotations: Mapping[str, str]) -> str:
    return str(annotations.get(Annotation.LEAVING_REASON) or "")[:256]  # an arbitrary limit
