"""Nodes that are about to be terminated: which taints say so, by when, and how long a pod there may take. Pure.

A deadline is annotated by who knows it (`contract.Annotation.LEAVING_AT`), on the node or, by those without rights to nodes, on a
pod. Without one the usual time of the notice counts, from when the operator first saw the taint; see docs/decisions/0045.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.contract import LEAVING, Annotation, LeavingKind
from outlast.kube import pods as podwords
from outlast.manifests.scheduling import SPOT

Document = Mapping[str, Any]

SPOT_NOTICE_S = 120.0
"""From AWS's interruption notice to the end of the machine.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""
GKE_NOTICE_S = 15.0
"""What a kubelet on GKE leaves to pods that are no system pods, of the 30 s of a spot machine.
https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms"""
TAINTS: Mapping[str, float | None] = {
    LEAVING: None,
    "karpenter.sh/disrupted": None,
    "karpenter.sh/disruption": None,
    "aws-node-termination-handler/spot-itn": SPOT_NOTICE_S,
    "aws-node-termination-handler/scheduled-maintenance": None,
    "aws-node-termination-handler/asg-lifecycle-termination": None,
    "aws-node-termination-handler/rebalance-recommendation": None,
    "cloud.google.com/impending-node-termination": None,
    "ToBeDeletedByClusterAutoscaler": None,
    "node.kubernetes.io/out-of-service": None,
}
"""Taints of nodes that are about to be terminated, and the seconds from their notice to the end; None where there is no limit
below a pod's own grace period."""
_SPOT_ONLY = {
    "karpenter.sh/disrupted": SPOT_NOTICE_S,
    "karpenter.sh/disruption": SPOT_NOTICE_S,
    "cloud.google.com/impending-node-termination": GKE_NOTICE_S,
}
"""The same on spot nodes, for taints that do not tell an interruption from a planned change."""
TAINTED = "tainted"
"""Key of the time, by the operator's clock, at which a watch first delivered a node with one of these taints."""
KEPT_S = 2.0
"""Of the time left, what the way of a deletion to the kubelet and the end of a pod take."""


@dataclass(frozen=True)
class Leave:
    """Why a worker has to go."""

    cause: str
    """The taint's key, with its value if it is ours, or the annotation's key."""
    deadline: float | None = None
    """Seconds since the epoch; None: no sooner than the pod's own grace period ends."""
    reason: str = ""
    """The sentence of who wrote the deadline, if any."""

    def sentence(self, node: str) -> str:
        """What the worker's log says: where it has to leave, and why."""
        return f"node {node} ({self.cause}{f', {self.reason}' if self.reason else ''})"

    def grace_s(self, pod: Document, now: float) -> int | None:
        """The grace period to delete a pod with; None: its own, which ends sooner. At least 1: 0 would not wait for its node."""
        if self.deadline is None:
            return None
        left_s = max(1, math.floor(self.deadline - now - KEPT_S))
        own_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        return left_s if left_s < own_s else None


def of_node(node: Document | None) -> Leave | None:
    """Why the workers of a node have to go; None for a node that stays."""
    taints = ((node or {}).get("spec") or {}).get("taints") or ()
    found = [taint for taint in taints if taint.get("key") in TAINTS]
    if node is None or not found:
        return None
    labels = node["metadata"].get("labels") or {}
    annotations = node["metadata"].get("annotations") or {}
    spot = any(labels.get(name) == value for name, value in SPOT.items())
    deadlines = [_deadline(annotations)] if Annotation.LEAVING_AT in annotations else []
    if not any(deadlines) and (seen := node.get(TAINTED)) is not None:
        usual = (_usual(taint, spot=spot) for taint in found)
        deadlines = [seen + notice_s for notice_s in usual if notice_s is not None]
    known = [each for each in deadlines if each is not None]
    first = next((taint for taint in found if taint["key"] == LEAVING), found[0])
    kind = LeavingKind(first.get("value") or "") if first["key"] == LEAVING else LeavingKind.UNKNOWN
    return Leave(f"{first['key']}={kind}" if kind else first["key"], min(known, default=None), _reason(annotations))


def of_pod(pod: Document) -> Leave | None:
    """Why this worker has to go although its node may stay."""
    annotations = pod["metadata"].get("annotations") or {}
    if (deadline := _deadline(annotations)) is None:
        return None
    return Leave(Annotation.LEAVING_AT, deadline, _reason(annotations))


def soonest(*leaves: Leave | None) -> Leave | None:
    """The one with the earliest deadline; one without a deadline is the last."""
    known = [each for each in leaves if each is not None]
    return min(known, key=lambda each: math.inf if each.deadline is None else each.deadline, default=None)


def _usual(taint: Document, *, spot: bool) -> float | None:
    if taint["key"] == LEAVING:
        return SPOT_NOTICE_S if taint.get("value") == LeavingKind.SPOT else None
    return TAINTS[taint["key"]] or (_SPOT_ONLY.get(taint["key"]) if spot else None)


def _deadline(annotations: Mapping[str, str]) -> float | None:
    """The annotated deadline; None when there is none, or one that cannot be read."""
    try:
        return podwords.seconds(annotations.get(Annotation.LEAVING_AT)) or None
    except (ValueError, TypeError, OverflowError):
        return None


def _reason(annotations: Mapping[str, str]) -> str:
    return str(annotations.get(Annotation.LEAVING_REASON) or "")[:_LONGEST]


_LONGEST = 256
"""Characters of a sentence that others have written into an annotation."""
