"""Constraints on the nodes of a worker's pod: spot machines, instance types, accelerators, and spreading over nodes."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.job import accelerators, spec
from outlast.kubernetes.manifests import labels, resources
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job

SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "lifecycle": "Ec2Spot",
}
"""Labels of spot nodes, as set by Karpenter, EKS, GKE, AKS and self-managed groups on AWS."""
_SPOT_TAINTS = (
    "karpenter.sh/capacity-type",
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
    "spotInstance",
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_OLD_NAMES = {
    "beta.kubernetes.io/instance-type": "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/arch": "kubernetes.io/arch",
    "beta.kubernetes.io/os": "kubernetes.io/os",
}


ON_DEMAND = "on-demand"
"""Value of `scheduling.worker0` that keeps worker 0 off spot machines."""


def pod(job: spec.Job, *, has_peers: bool, on_demand: bool = False) -> Document:
    """Return the scheduling part of a PodSpec. With `has_peers`, the job's pods are spread over nodes. With `on_demand`, the pod
    avoids spot machines."""
    fields = job.spec
    if on_demand:
        fields = fields.model_copy(update={"scheduling": fields.scheduling.model_copy(update={"spot": "avoid"})})
    exact = {name: value for name, value in _nodes(fields).items() if "," not in value}
    constraints: Document = {}
    if fields.scheduling.priority_class_name:
        constraints["priorityClassName"] = fields.scheduling.priority_class_name
    if exact:
        constraints["nodeSelector"] = exact
    if affinity := _affinity(fields):
        constraints["affinity"] = {"nodeAffinity": affinity}
    if has_peers:
        selector = {"matchLabels": labels.selector(job.metadata.name)}
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        constraints["topologySpreadConstraints"] = [{**spread, "labelSelector": selector}]  # preferably one pod per node
    if tolerations := _tolerations(fields):
        constraints["tolerations"] = tolerations
    return constraints


def _nodes(fields: spec.Spec) -> dict[str, str]:
    return {_OLD_NAMES.get(name, name): value for name, value in fields.node_selector.items()}


def _affinity(fields: spec.Spec) -> Document:
    alternatives = [
        {"key": name, "operator": "In", "values": [each.strip() for each in value.split(",") if each.strip()]}
        for name, value in _nodes(fields).items()
        if "," in value
    ]
    terms = [alternatives] if alternatives else []
    match fields.scheduling.spot:
        case "require":
            terms = [[_expression(name, value), *alternatives] for name, value in SPOT.items()]
        case "avoid":
            terms = [[*_not_spot(), *alternatives]]
    affinity: Document = {}
    if terms:
        affinity[_REQUIRED] = {"nodeSelectorTerms": [{"matchExpressions": expressions} for expressions in terms]}
    if fields.scheduling.spot == "prefer":
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": [_expression(name, value)]}} for name, value in SPOT.items()
        ]
    return affinity


def avoid_spot(affinity: Document) -> Document:
    """Return a pod's affinity with the added requirement that its node has no spot label."""
    nodes = affinity.get("nodeAffinity") or {}
    terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    limited = [{**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *_not_spot()]} for term in terms]
    return {**affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": limited}}}


def reject_on_demand(request: Request, kind: str) -> None:
    """Raise InvalidJob if worker 0 must avoid spot machines. A workload of this kind cannot keep a single pod off them, because
    all its pods are alike."""
    if request.spec.scheduling.worker0 == ON_DEMAND:
        remedy = "submit it as an ElasticJob, whose pods are made one by one, or set scheduling.spot to avoid"
        raise invalid_job(
            request.job, f"scheduling.worker0 ({ON_DEMAND}) cannot be had in {kind}, whose pods are all alike; {remedy}"
        )


def _not_spot() -> list[Document]:
    return [_expression(name, value, "NotIn") for name, value in SPOT.items()]


def _expression(label: str, value: str, operator: str = "In") -> Document:
    return {"key": label, "operator": operator, "values": [value]}


def _tolerations(fields: spec.Spec) -> list[Document]:
    own = [each.model_dump(mode="json", by_alias=True, exclude_defaults=True) for each in fields.tolerations]
    device = resources.accelerator(fields.resources)
    return own + tolerations([device] if device else [], spot=fields.scheduling.spot != "avoid")


def tolerations(devices: Iterable[str], *, spot: bool = True) -> list[Document]:
    """Return tolerations for the taints of nodes with these accelerators and, if `spot` is true, for the taints of spot nodes."""
    taints: dict[str, None] = {}
    for device in devices:
        taints |= dict.fromkeys(accelerators.taints(device))
    tolerated: list[Document] = [{"key": taint, "operator": "Exists", "effect": "NoSchedule"} for taint in taints]
    return tolerated + ([{"key": name, "operator": "Exists"} for name in _SPOT_TAINTS] if spot else [])
