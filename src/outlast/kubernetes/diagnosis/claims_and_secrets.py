"""Rules about claims, Secrets and ConfigMaps that a pod waits for, and the default storage class."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.kubernetes.api import pod_status
from outlast.kubernetes.diagnosis import messages
from outlast.kubernetes.diagnosis.evidence import Snapshot, event_text, per_pod
from outlast.kubernetes.diagnosis.finding import Finding, joined
from outlast.kubernetes.manifests.render_request import Document


def default_class(snapshot: Snapshot) -> str:
    """Return the default storage class's name; empty if there is none."""
    key = "storageclass.kubernetes.io/is-default-class"
    defaults = [each for each in snapshot.storage_classes if (each["metadata"].get("annotations") or {}).get(key) == "true"]
    return pod_status.name(defaults[0]) if defaults else ""


@per_pod
def claims(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find missing or unbound claims for which pods wait."""
    by_name = {pod_status.name(claim): claim for claim in snapshot.claims}
    for name in claimed(pod) if pod_status.phase(pod) == "Pending" else ():
        claim, what = by_name.get(name), f"waits for the claim {name}"
        if claim is not None and claim.get("status", {}).get("phase") != "Bound":
            yield _unbound(snapshot, claim, what)
        elif claim is None and "persistentvolumeclaims" not in snapshot.forbidden:
            evidence = f"there are: {joined(sorted(by_name))}" if by_name else "the namespace has no claims"
            remedy = "correct `claim` under volumes, give it a `size` so that it is created, or create the PersistentVolumeClaim"
            yield Finding("claim-missing", f"{what}, which does not exist in namespace {snapshot.namespace}", remedy, (evidence,))


def claimed(pod: Document) -> list[str]:
    volumes = pod["spec"].get("volumes", [])
    ephemeral = [f"{pod_status.name(pod)}-{volume['name']}" for volume in volumes if "ephemeral" in volume]
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume] + ephemeral


def _unbound(snapshot: Snapshot, claim: Document, subject: str) -> Finding:
    class_name, what = claim["spec"].get("storageClassName"), f"{subject}, which has no volume"
    events = tuple(event_text(event) for event in snapshot.events_about({**claim, "kind": "PersistentVolumeClaim"})[-2:])
    classes = {pod_status.name(each): each for each in snapshot.storage_classes}
    forbidden = "storageclasses.storage.k8s.io" in snapshot.forbidden
    evidence = events if forbidden else (f"the cluster's storage classes: {joined(sorted(classes)) or 'none'}", *events)
    default = default_class(snapshot)
    storage_class = classes.get(class_name or default, {})
    provisioner = storage_class.get("provisioner", "the provisioner")
    if claim.get("status", {}).get("phase") == "Lost":
        return Finding("claim-lost", f"{subject}, whose volume is gone", "restore the volume or make a new claim", events)
    if class_name is None and (any("no storage class is set" in event for event in events) if forbidden else not default):
        remedy = "set storageClass to one of the cluster's, make one the default, or make a PersistentVolume for it"
        return Finding("claim-class", f"{what}: it names no storage class, and the cluster has no default one", remedy, evidence)
    if class_name and class_name not in classes and not forbidden:
        remedy = "correct storageClass, or install the class (delete the claim first: its class cannot be changed)"
        return Finding("claim-class", f"{what}: there is no storage class {class_name}", remedy, evidence)
    if any(event.startswith("ProvisioningFailed") for event in events):
        remedy = f"see what {provisioner} says, or choose another class"
        return Finding("claim-failed", f"{what}: {provisioner} cannot make one", remedy, events)
    if storage_class.get("volumeBindingMode") == "WaitForFirstConsumer":
        remedy = "see why its pod finds no node; if no other cause is given here, look at the provisioner's pods"
        return Finding("claim-waits", f"{what}: it is created when a pod that uses it has a node", remedy, events)
    return Finding("claim-pending", f"{what} yet", f"wait; if it stays so, see whether {provisioner} runs", events)


# Secrets, ConfigMaps and mounts

_MISSING = re.compile(
    r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found'
    r"|couldn't find key (?P<key>\S+) in (?P<of>Secret|ConfigMap) [^/]*/(?P<its>\S+)"
)
_KIND_NAMES = {"secret": "Secret", "configmap": "ConfigMap"}


def missing(message: str) -> tuple[str, str, str] | None:
    """Return the kind, name and key of what a kubelet's message reports missing, or None for any other message. The key is empty
    if a whole Secret or ConfigMap is missing."""
    if (match := _MISSING.search(message)) is None:
        return None
    return (match["kind"] or match["of"]).lower(), match["name"] or match["its"], match["key"] or ""


def _waiting_messages(snapshot: Snapshot, pod: Document) -> Iterator[str]:
    for _reason, message in pod_status.waiting_states(pod):
        yield message
    if pod_status.phase(pod) == "Pending":
        for event in snapshot.events_about(pod, "FailedMount", "FailedAttachVolume", "Failed"):
            yield str(event.get("message", ""))


@per_pod
def references(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find missing Secrets and ConfigMaps, and missing keys in them."""
    for kind, name, key in dict.fromkeys(filter(None, map(missing, _waiting_messages(snapshot, pod)))):
        kind_name, option = _KIND_NAMES[kind], f"-n {snapshot.namespace}"
        if key:
            remedy = f"add the key to it, or correct the name of the key (kubectl describe {kind} {name} {option})"
            yield Finding(f"{kind}-missing", f"waits for the key {key} of the {kind_name} {name}, which has none", remedy)
            continue
        names = sorted(snapshot.secrets if kind == "secret" else snapshot.config_maps)
        evidence = (f"there are: {joined(names)}",) if names else ()
        remedy = f"make it (kubectl create configmap {name} {option} --from-file=FILE) or correct the template"
        if kind == "secret":
            remedy = f"make it (kubectl create secret generic {name} {option} --from-literal=KEY=VALUE) or correct `secrets`"
        what = f"waits for the {kind_name} {name}, which does not exist in namespace {snapshot.namespace}"
        yield Finding(f"{kind}-missing", what, remedy, evidence)


@per_pod
def mounts(snapshot: Snapshot, pod: Document) -> Iterator[Finding]:
    """Find volumes that exist but cannot be mounted."""
    events = snapshot.events_about(pod, "FailedMount", "FailedAttachVolume") if pod_status.phase(pod) == "Pending" else []
    for event in events[-1:]:
        if not missing(message := str(event.get("message", ""))):
            yield messages.meaning("mounts", message, (event_text(event),), node=pod["spec"].get("nodeName"))
