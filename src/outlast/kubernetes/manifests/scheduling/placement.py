"""Constraints on the nodes of a worker's pod: spot machines, instance types, accelerators, spread over nodes."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.job import accelerators, spec
from outlast.kubernetes.manifests import labels, resources
from outlast.kubernetes.manifests.render_request import Document, Request, wrong

SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "lifecycle": "Ec2Spot",
}
"""Labels of spot nodes, with their values: Karpenter, EKS, GKE, AKS, self-managed groups on AWS."""
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
"""Deprecated labels of nodes, with their replacements."""


ON_DEMAND = "on-demand"
"""Value of `scheduling.worker0` that keeps worker 0 off spot machines."""


def pod(job: spec.Job, *, several: bool, on_demand: bool = False) -> Document:
    """The scheduling part of a PodSpec. `several`: whether the job has more pods than this one; `on_demand`: whether the pod
    avoids spot machines."""
    fields = job.spec
    if on_demand:
        fields = fields.model_copy(update={"scheduling": fields.scheduling.model_copy(update={"spot": "avoid"})})
    one = {name: value for name, value in _nodes(fields).items() if "," not in value}
    found: Document = {}
    if fields.scheduling.priority_class_name:
        found["priorityClassName"] = fields.scheduling.priority_class_name
    if one:
        found["nodeSelector"] = one
    if affinity := _affinity(fields):
        found["affinity"] = {"nodeAffinity": affinity}
    if several:
        found["topologySpreadConstraints"] = [spread(labels.selector(job.metadata.name))]
    if tolerations := _tolerations(fields):
        found["tolerations"] = tolerations
    return found


def spread(labels: dict[str, str]) -> Document:
    """A preference for one pod per node."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def _nodes(fields: spec.Spec) -> dict[str, str]:
    return {_OLD_NAMES.get(name, name): value for name, value in fields.node_selector.items()}


def _affinity(fields: spec.Spec) -> Document:
    """Node affinity: one of the terms of `required` must match, with all its expressions."""
    several = [
        {"key": name, "operator": "In", "values": [each.strip() for each in value.split(",") if each.strip()]}
        for name, value in _nodes(fields).items()
        if "," in value
    ]
    terms = [several] if several else []
    match fields.scheduling.spot:
        case "require":
            terms = [[_is(name, value), *several] for name, value in SPOT.items()]
        case "avoid":
            terms = [[*_no_spot(), *several]]
    found: Document = {}
    if terms:
        found[_REQUIRED] = {"nodeSelectorTerms": [{"matchExpressions": expressions} for expressions in terms]}
    if fields.scheduling.spot == "prefer":
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": [_is(name, value)]}} for name, value in SPOT.items()
        ]
    return found


def off_spot(affinity: Document) -> Document:
    """A pod's affinity with the requirement that its node is no spot machine. A node without any of the labels of spot nodes is
    not a spot machine."""
    nodes = affinity.get("nodeAffinity") or {}
    terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    limited = [{**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *_no_spot()]} for term in terms]
    return {**affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": limited}}}


def refuse_pin(request: Request, kind: str) -> None:
    """Raise InvalidJob if worker 0 is to be kept off spot machines, which is impossible if all pods are alike."""
    if request.spec.scheduling.worker0 == ON_DEMAND:
        remedy = "submit it as an ElasticJob, whose pods are made one by one, or set scheduling.spot to avoid"
        raise wrong(request.job, f"scheduling.worker0 ({ON_DEMAND}) cannot be had in {kind}, whose pods are all alike; {remedy}")


def _no_spot() -> list[Document]:
    return [_is(name, value, "NotIn") for name, value in SPOT.items()]


def _is(label: str, value: str, operator: str = "In") -> Document:
    return {"key": label, "operator": operator, "values": [value]}


def _tolerations(fields: spec.Spec) -> list[Document]:
    """The user's tolerations, then the tolerations for nodes with accelerators and for spot machines."""
    found = [each.model_dump(mode="json", by_alias=True, exclude_defaults=True) for each in fields.tolerations]
    device = resources.accelerator(fields.resources)
    return found + tolerated([device] if device else [], spot=fields.scheduling.spot != "avoid")


def tolerated(devices: Iterable[str], *, spot: bool = True) -> list[Document]:
    """Tolerations for the taints of nodes with these accelerators, and for those of spot nodes."""
    taints: dict[str, None] = {}
    for device in devices:
        taints |= dict.fromkeys(accelerators.taints(device))
    found: list[Document] = [{"key": taint, "operator": "Exists", "effect": "NoSchedule"} for taint in taints]
    return found + ([{"key": name, "operator": "Exists"} for name in _SPOT_TAINTS] if spot else [])
