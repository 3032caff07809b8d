"""How a node says that it leaves: a taint, a cordon and annotations. And what a node says of its machine. Pure.

    change = marked(node, notice)      a merge patch, on condition that nobody has written the node meanwhile
    change = cleared(node)             takes back what `marked` wrote, and nothing else
    notice = read(node)                what it says, for a watcher that has been restarted

The operator acts on the taint (`outlast.operator.snapshot.LEAVING`), the scheduler on taint and cordon, people and programs read
the annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outlast import contract
from outlast.contract import Annotation, LeavingKind
from outlast.errors import OutlastError
from outlast.kube import pods
from outlast.nodewatch import notices
from outlast.nodewatch.notices import Notice
from outlast.nodewatch.sources import Cloud

Document = Mapping[str, Any]
_CLOUDS: dict[str, Cloud] = {"aws": "aws", "gce": "gcp", "azure": "azure"}
"""By the scheme of a node's providerID."""
_GROUPS = (
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    "karpenter.sh/nodepool",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels with the name of a node's group."""
KEPT = "on this machine"
"""Id of a notice that was read from the node."""


@dataclass(frozen=True)
class Machine:
    """What labels say of a node; empty where they say nothing."""

    node: str
    zone: str
    type: str
    group: str


def machine(node: Document) -> Machine:
    """The machine of a node."""
    labels = node["metadata"].get("labels") or {}
    group = next((labels[key] for key in _GROUPS if labels.get(key)), "")
    zone, kind = labels.get("topology.kubernetes.io/zone", ""), labels.get("node.kubernetes.io/instance-type", "")
    return Machine(pods.name(node), zone, kind, group)


def cloud(node: Document) -> Cloud:
    """The cloud of a node, by its providerID. Raises OutlastError for another one."""
    given = str(node["spec"].get("providerID") or "")
    found = _CLOUDS.get(given.partition("://")[0])
    if found is None:
        raise OutlastError(
            f"node {pods.name(node)} has the providerID {given or '(none)'}, which is not of AWS, Google or Azure; "
            "name the cloud with --cloud, or an address of notices with --notice-url"
        )
    return found


def marked(node: Document, notice: Notice) -> dict[str, Any]:
    """The patch that makes a node say that it leaves. Taints of others stay; a cordon that was there is remembered as such."""
    meta, spec = node["metadata"], node["spec"]
    others = [each for each in spec.get("taints") or () if each["key"] != contract.LEAVING]
    at = None if notice.deadline is None else notices.utc(notice.deadline)
    found: dict[str, Any] = {Annotation.LEAVING_AT: at, Annotation.LEAVING_REASON: notice.reason}
    if not spec.get("unschedulable"):
        found[Annotation.CORDONED] = "true"
    taint = {"key": contract.LEAVING, "value": notice.kind.value, "effect": "NoSchedule"}
    return _patch(meta, found, {"taints": [*others, taint], "unschedulable": True})


def cleared(node: Document) -> dict[str, Any]:
    """The patch that takes the mark from a node; the cordon only if it was ours."""
    meta, spec = node["metadata"], node["spec"]
    change: dict[str, Any] = {"taints": [each for each in spec.get("taints") or () if each["key"] != contract.LEAVING] or None}
    if (meta.get("annotations") or {}).get(Annotation.CORDONED):
        change["unschedulable"] = None
    return _patch(meta, dict.fromkeys((Annotation.LEAVING_AT, Annotation.LEAVING_REASON, Annotation.CORDONED)), change)


def read(node: Document) -> Notice | None:
    """What a watcher has written on a node, if it has. A taint without a reason is somebody else's, and stays."""
    taint = next((each for each in node["spec"].get("taints") or () if each["key"] == contract.LEAVING), None)
    said = node["metadata"].get("annotations") or {}
    reason = said.get(Annotation.LEAVING_REASON)
    if taint is None or reason is None:
        return None
    return Notice(LeavingKind(taint.get("value", "")), notices.time(said.get(Annotation.LEAVING_AT)), reason, KEPT)


def same(one: Notice | None, other: Notice | None) -> bool:
    """Whether a node that says the one need not be written to say the other."""
    return _said(one) == _said(other)


def message(found: Machine, affected: list[str], notice: Notice, noticed: float) -> dict[str, Any]:
    """What is sent to a queue: the machine, its pods (`namespace/name`), and the notice."""
    at = None if notice.deadline is None else notices.utc(notice.deadline)
    told = {"kind": notice.kind.value, "reason": notice.reason, "noticed": notices.utc(noticed), "deadline": at}
    return {**asdict(found), **told, "pods": affected}


def _said(notice: Notice | None) -> tuple[object, ...] | None:
    if notice is None:
        return None
    return notice.kind, None if notice.deadline is None else notices.utc(notice.deadline), notice.reason


def _patch(meta: Document, annotations: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": meta["resourceVersion"], "annotations": annotations}, "spec": spec}
